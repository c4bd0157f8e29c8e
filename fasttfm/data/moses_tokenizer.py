"""Subwords of fastBPE and subword-nmt (Sennrich et al. 2016) on Moses' tokens: what fairseq's models are trained on.

    Das ist's, Vater.  ->  Das ist &apos;s , Vater .  ->  Das ist &apos;s , V@@ ater .

Moses' rules are sacremoses' (extra: moses). The codes are the merges in their order, a pair a line: fastBPE writes a
count behind each, subword-nmt a line #version before them.
https://github.com/rsennrich/subword-nmt and https://github.com/glample/fastBPE
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import optional
from fasttfm.system.parsing import characters

JOINED = "@@"
"""Ending of a piece that continues in the same word."""
_END = "</w>"
"""The end of a word in the codes."""
_MOST_KEPT = 200_000
"""Words whose pieces are kept."""
_NORMALIZED_AWAY = re.compile("[„“”‘’‚…–—«»]")
_VERSION = re.compile(r"#version: *(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MosesVocabulary(Vocabulary):
    """Numbered pieces, with the steps that text goes through before it is split into them."""

    language: str
    """Of Moses' abbreviations and apostrophes, such as en."""
    normalized: bool
    """Whether quotation marks and dashes were made ASCII (normalize-punctuation.perl)."""
    split_dashes: bool
    """Whether a dash within a word is the token @-@ (tokenizer.perl -a)."""
    escaped: bool
    """Whether &, quotation marks and brackets are entities, such as &apos;."""
    lowercase: bool
    """Whether capital letters became small ones."""

    def __str__(self) -> str:
        done = {"normalized": self.normalized, "dashes split": self.split_dashes, "escaped": self.escaped}
        done["in small letters"] = self.lowercase
        return ", ".join([f"Moses' tokens of {self.language}", *(what for what, holds in done.items() if holds)])

    @classmethod
    def inferred(cls, language: str, pieces: Sequence[str], **fields: Any) -> "MosesVocabulary":
        """The preparation that pieces show.

        Moses' tokens hold & and @ beside other characters only where entities and @-@ were made.
        """
        return cls(
            pieces=list(pieces),
            language=language,
            normalized=not any(map(_NORMALIZED_AWAY.search, pieces)),
            split_dashes=any(piece.startswith("@") and piece != "@" for piece in pieces),
            escaped=any(piece.startswith("&") and piece != "&" for piece in pieces),
            lowercase=not any(piece != piece.lower() for piece in pieces if not piece.startswith(("<", "[", "_"))),
            **fields,
        )


class MosesTokenizer(Tokenizer):
    """Cuts a line into Moses' tokens, and these by the codes into pieces that the vocabulary numbers."""

    file_name = "bpe{}.codes"
    vocabulary_kind = MosesVocabulary

    def __init__(self, model: bytes, vocabulary: MosesVocabulary | None = None):
        """model: the bytes of the codes. Raises ValueError when they are none, UserError where sacremoses is not
        installed."""
        sacremoses = optional("sacremoses", "moses")
        if vocabulary is None:
            raise ValueError("codes need the vocabulary that lay beside them")
        self.model = model
        self._number(vocabulary)
        self._settings = vocabulary
        self._merges, self._end_alone = _read_codes(model)
        made = [left + right for left, right in self._merges]
        self._pieces = {each.removesuffix(_END) if each.endswith(_END) else each + JOINED for each in made}
        if self._end_alone:
            self._pieces |= set(made)
        self._kept: dict[str, list[str]] = {}
        self._normalizer = sacremoses.MosesPunctNormalizer(vocabulary.language)
        self._tokens = sacremoses.MosesTokenizer(vocabulary.language)
        self._text = sacremoses.MosesDetokenizer(vocabulary.language)

    def _cut(self, text: str) -> list[str]:
        line = characters(text)
        if self._settings.normalized:
            line = self._normalizer.normalize(line)
        words: Iterable[str] = self._tokens.tokenize(
            line, aggressive_dash_splits=self._settings.split_dashes, escape=self._settings.escaped
        )
        if self._settings.lowercase:
            words = map(str.lower, words)
        return [piece for word in words for piece in self._pieces_of(word)]

    def _pieces_of(self, word: str) -> list[str]:
        if word not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[word] = self._merged(word)
        return self._kept[word]

    def _merged(self, word: str) -> list[str]:
        """The pieces of a word: the pair that comes first among the codes is joined everywhere, then the next."""
        parts = [*word, _END] if self._end_alone else [*word[:-1], word[-1] + _END]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in self._merges]:
            left, right = min(pairs, key=self._merges.__getitem__)
            joined: list[str] = []
            for part in parts:
                if part == right and joined and joined[-1] == left:
                    joined[-1] = left + right
                else:
                    joined.append(part)
            parts = joined
        parts[-1] = parts[-1].removesuffix(_END)
        *inner, last = filter(None, parts)  # an end may be a part alone
        return [*(part + JOINED for part in inner), last]

    def _joined(self, pieces: list[str]) -> str:
        words = f"{' '.join(pieces)} ".replace(f"{JOINED} ", "").split()
        return self._text.detokenize(words, unescape=self._settings.escaped)

    def lasting(self, ids: Sequence[int]) -> str:
        """The beginning of decode(ids) that no further ids change: the text before the last whole word."""
        ends = [number for number, piece in enumerate(self.pieces(ids), start=1) if not piece.endswith(JOINED)]
        return self.decode(ids[: ends[-2]]) if len(ends) > 1 else ""

    def cuts_into(self, piece: str) -> bool:
        """Return whether the codes make a piece of some word."""
        return piece in self._pieces or len(piece.removesuffix(JOINED)) == 1

    def piece_id(self, piece: str) -> int | None:
        """The id of a piece; None where the vocabulary has it not."""
        return self._ids.get(piece)


def _read_codes(content: bytes) -> tuple[dict[tuple[str, str], int], bool]:
    """The rank of each pair, and whether a word's end is a part of its own (subword-nmt before 0.2).

    Raises ValueError for a line that is no pair.
    """
    try:
        lines = content.decode().rstrip("\n").split("\n")
    except UnicodeDecodeError:
        raise ValueError("codes must be UTF-8") from None
    version = _VERSION.match(lines[0])
    pairs = [line.strip("\r ").split(" ") for line in lines[1 if version else 0 :]]
    for number, pair in enumerate(pairs, start=2 if version else 1):
        if not (len(pair) == 2 or (len(pair) == 3 and not version and pair[2].isdecimal())):
            raise ValueError(f"line {number:,} is not a pair of subwords: {' '.join(pair)[:60]!r}")
    ranks = {(left, right): rank for rank, (left, right, *_) in reversed(list(enumerate(pairs)))}
    is_old = (int(version[1]), int(version[2])) < (0, 2) if version else len(pairs[0]) == 2
    return ranks, is_old
