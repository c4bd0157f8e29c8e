"""Moses tokenization followed by BPE codes of fastBPE or subword-nmt (Sennrich et al. 2016), as in fairseq's models.

    Das ist's, Vater.  ->  Das ist &apos;s , Vater .  ->  Das ist &apos;s , V@@ ater .

Moses' rules come from sacremoses (extra: moses). The codes file lists the merges in order, one pair per line; fastBPE
appends a count to each, subword-nmt starts with a #version line.
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
"""Suffix of a piece that does not end its word."""
_END = "</w>"
"""End of a word in the codes."""
_CACHE_SIZE = 200_000
"""Words in the cache of pieces."""
_NORMALIZED_AWAY = re.compile("[„“”‘’‚…–—«»]")
_VERSION = re.compile(r"#version: *(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MosesVocabulary(Vocabulary):
    """Numbered pieces, and the preprocessing applied before BPE."""

    language: str
    """Language of Moses' abbreviation and apostrophe rules, such as en."""
    normalized: bool
    """Whether quotation marks and dashes are replaced by ASCII (normalize-punctuation.perl)."""
    split_dashes: bool
    """Whether a dash within a word becomes the token @-@ (tokenizer.perl -a)."""
    escaped: bool
    """Whether &, quotation marks and brackets become entities such as &apos;."""
    lowercase: bool
    """Whether text is lower-cased."""

    def __str__(self) -> str:
        steps = {"normalized": self.normalized, "dashes split": self.split_dashes, "escaped": self.escaped}
        steps["lower-cased"] = self.lowercase
        return ", ".join([f"Moses tokens ({self.language})", *(name for name, applied in steps.items() if applied)])

    @classmethod
    def inferred(cls, language: str, pieces: Sequence[str], **fields: Any) -> "MosesVocabulary":
        """Infer the preprocessing from the pieces.

        & and @ next to other characters occur in Moses' tokens only as entities and as @-@.
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
    """Splits a line into Moses tokens, and these by BPE codes into pieces that the vocabulary numbers."""

    file_name = "bpe{}.codes"
    vocabulary_kind = MosesVocabulary

    def __init__(self, model: bytes, vocabulary: MosesVocabulary | None = None):
        """model: the bytes of the codes file. Raises ValueError for invalid codes, UserError without sacremoses."""
        sacremoses = optional("sacremoses", "moses")
        if vocabulary is None:
            raise ValueError("its vocabulary file is missing")
        self.model = model
        self._number(vocabulary)
        self._settings = vocabulary
        self._merges, self._end_alone = _read_codes(model)
        merged = [left + right for left, right in self._merges]
        self._pieces = {each.removesuffix(_END) if each.endswith(_END) else each + JOINED for each in merged}
        if self._end_alone:
            self._pieces |= set(merged)
        self._cache: dict[str, list[str]] = {}
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
        if word not in self._cache:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[word] = self._merged(word)
        return self._cache[word]

    def _merged(self, word: str) -> list[str]:
        """The pieces of a word: repeatedly join all occurrences of the pair with the lowest rank."""
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
        *inner, last = filter(None, parts)  # the end may be a separate part
        return [*(part + JOINED for part in inner), last]

    def _joined(self, pieces: list[str]) -> str:
        words = f"{' '.join(pieces)} ".replace(f"{JOINED} ", "").split()
        return self._text.detokenize(words, unescape=self._settings.escaped)

    def stable_prefix(self, ids: Sequence[int]) -> str:
        """The prefix of decode(ids) that stays the same whatever ids follow: the text before the last whole word."""
        ends = [number for number, piece in enumerate(self.pieces(ids), start=1) if not piece.endswith(JOINED)]
        return self.decode(ids[: ends[-2]]) if len(ends) > 1 else ""

    def cuts_into(self, piece: str) -> bool:
        """Whether the codes produce this piece for some word."""
        return piece in self._pieces or len(piece.removesuffix(JOINED)) == 1


def _read_codes(content: bytes) -> tuple[dict[tuple[str, str], int], bool]:
    """The rank of each pair, and whether the end of a word is a separate symbol (subword-nmt before 0.2).

    Raises ValueError for a line that is not a pair.
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
