"""Reproducible subword sampling: a new segmentation for every visit of a sentence, the same in every process.

SentencePiece's own sampler cannot be used: version 0.2.3 salts its generator once per process, whatever seed is set, so
a resumed run would train on other segmentations. Here a sample depends only on the model's pieces and scores, the text
and a key: (seed, epoch, sentence, side).

    bpe        BPE-dropout (Provilkov et al. 2020, algorithm 1): drop each possible merge with probability p, apply the
               best of the rest, repeat until all are dropped. p = 0 is SentencePiece's segmentation, 1 characters.
    unigram    Samples a segmentation with probability proportional to P(segmentation)^alpha: forward filtering,
               backward sampling over the lattice of pieces (Kudo 2018, with all segmentations for l).

Input is SentencePiece's own segmentation, hence already normalized. It is cut wherever no piece crosses the cut;
unknown pieces, bytes and user-defined symbols are kept. One CPU core samples about 190,000 tokens a second for bpe,
half a million for unigram (Multi30k, 8,000 pieces).
"""

import itertools
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fasttfm.data.sentencepiece_model import BPE, BYTE, NORMAL, UNIGRAM, UNUSED, read_model
from fasttfm.data.tokenizer import UNK, Tokenizer
from fasttfm.errors import UserError

_MOST_CACHED = 1 << 18  # states of bpe, about 100 MB; a fourth as many lattices of unigram take 200
_UNKNOWN_PENALTY = 10.0  # SentencePiece's kUnkPenalty


class SubwordSampler:
    """Samples segmentations for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, amount: float) -> None:
        """amount: p for bpe, in [0, 1]; alpha for unigram, at least 0.

        Raises ValueError for any other amount, for word and character models, and for bpe with unused pieces; UserError
        for an imported vocabulary.
        """
        if tokenizer.vocabulary is not None:
            raise UserError("--subword-sampling: an imported vocabulary has a single segmentation: omit the option")
        kind, pieces = read_model(tokenizer.model)
        if kind not in (UNIGRAM, BPE) or (kind == BPE and any(type == UNUSED for _, _, type in pieces)):
            raise ValueError("subword sampling needs a unigram model, or a bpe model without unused pieces")
        if not math.isfinite(amount) or amount < 0 or (kind == BPE and amount > 1):
            raise ValueError(f"amount is {amount}: bpe needs a probability, unigram a number >= 0")
        self._amount = float(amount)
        self._is_bpe = kind == BPE
        self._scores = {piece: score for piece, score, type in pieces if type == NORMAL}
        self._ids = {piece: i for i, (piece, _, type) in enumerate(pieces) if type == NORMAL}
        self._bytes = {int(piece[3:5], 16): i for i, (piece, _, type) in enumerate(pieces) if type == BYTE}
        # empty for pieces that are never re-segmented
        self._texts = [piece if type == NORMAL else "" for piece, _, type in pieces]
        self._inside = {left + right for piece in self._scores for left, right in itertools.pairwise(piece)}
        self._longest = max(map(len, self._scores), default=1)
        self._unknown_score = min(self._scores.values(), default=0.0) - _UNKNOWN_PENALTY
        self._most_cached = _MOST_CACHED if self._is_bpe else _MOST_CACHED // 4
        self._cache: dict[Any, Any] = {}
        """bpe: text as merges have split it -> _merges(); unigram: text -> _lattice()."""

    def sample(self, ids: np.ndarray, *key: int) -> np.ndarray:
        """A sampled segmentation, int64. ids: SentencePiece's own; key: such as seed, epoch, sentence and side."""
        draw = random.Random(repr(key)).random
        sample = self._merged if self._is_bpe else self._walked
        sampled: list[int] = []
        for part in self._parts(ids.tolist()):
            if isinstance(part, int):
                sampled.append(part)
                continue
            for piece in sample(part, draw):
                if piece in self._ids:
                    sampled.append(self._ids[piece])
                else:  # a character
                    sampled += [self._bytes[byte] for byte in piece.encode()] if self._bytes else [UNK]
        if sampled.count(UNK) > 1:  # merge adjacent unknown pieces, as SentencePiece does
            sampled = [i for i, before in zip(sampled, [None, *sampled]) if not i == before == UNK]
        return np.array(sampled, np.int64)

    def _parts(self, ids: list[int]) -> Iterator[str | int]:
        """Parts of a text that no piece crosses, cut between characters that are adjacent in no piece; ids to keep."""
        part = ""
        for i in ids:
            text = self._texts[i]
            if part and (not text or part[-1] + text[0] not in self._inside):
                yield part
                part = ""
            part += text
            if not text:
                yield i
        if part:
            yield part

    def _cached(self, compute: Callable[[Any], Any], key: Any) -> Any:
        """compute(key), cached."""
        value = self._cache.get(key)
        if value is None:
            if len(self._cache) >= self._most_cached:
                self._cache.clear()
            value = self._cache[key] = compute(key)
        return value

    def _merged(self, text: str, draw: Callable[[], float]) -> Sequence[str]:
        """The pieces of one run of BPE-dropout."""
        split = tuple(text)
        while True:
            for i in self._cached(self._merges, split):
                if draw() >= self._amount:
                    split = (*split[:i], split[i] + split[i + 1], *split[i + 2 :])
                    break
            else:
                return split

    def _merges(self, split: tuple[str, ...]) -> list[int]:
        """The left pieces of all possible merges, best first."""
        joined = map("".join, itertools.pairwise(split))
        merges = sorted((-self._scores[piece], i) for i, piece in enumerate(joined) if piece in self._scores)
        return [i for _, i in merges]

    def _walked(self, text: str, draw: Callable[[], float]) -> Sequence[str]:
        """The pieces of one walk through the lattice."""
        lattice = self._cached(self._lattice, text)
        pieces, begin = [], 0
        while begin < len(text):
            ends, weights = lattice[begin]
            end = ends[bisect(weights, draw() * weights[-1], 0, len(weights) - 1)]
            pieces.append(text[begin:end])
            begin = end
        return pieces

    def _lattice(self, text: str) -> list[tuple[list[int], list[float]]]:
        """For the begin of a piece: its possible ends, and their cumulative weights."""
        rest = [0.0] * (len(text) + 1)  # log of the summed weights of all segmentations of the rest of the text
        lattice = []
        for begin in reversed(range(len(text))):
            last = min(begin + self._longest, len(text))
            ends = [end for end in range(begin + 1, last + 1) if end == begin + 1 or text[begin:end] in self._scores]
            logs = [self._amount * self._scores.get(text[begin:e], self._unknown_score) + rest[e] for e in ends]
            largest = max(logs)
            weights = list(itertools.accumulate(math.exp(each - largest) for each in logs))
            rest[begin] = largest + math.log(weights[-1])
            lattice.append((ends, weights))
        return lattice[::-1]
