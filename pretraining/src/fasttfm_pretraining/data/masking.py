"""Token masking for masked language models.

15% of the tokens are selected. Of these, 80% become [MASK], 10% a random token and 10% stay (BERT); for ELECTRA 85%
become [MASK] and 15% stay. The units are tokens, whole words, or phrases and entities of a list (ERNIE 1.0), never
markers or padding. Each row draws from its own numpy generator.
Source: Devlin et al. 2019, section 3.1 and appendix A.1; Clark et al. 2020; Sun et al. 2019 (ERNIE).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fasttfm.errors import UserError
from fasttfm.system.files import unreadable


@dataclass(frozen=True, kw_only=True)
class MaskingVocabulary:
    """The part of a vocabulary that masking needs."""

    size: int
    begin: int
    """[CLS], before a row."""
    end: int
    """[SEP], after a segment."""
    mask: int
    """[MASK]."""
    is_special: np.ndarray
    """(size,) bool: tokens that are never masked and never used as random replacements."""
    begins_word: np.ndarray
    """(size,) bool: pieces that begin a word."""


class Shares(NamedTuple):
    """Shares of masked tokens by replacement; the others stay unchanged and are still predicted."""

    mask: float = 0.8
    random: float = 0.1


BERT_SHARES = Shares()
ELECTRA_SHARES = Shares(0.85, 0.0)


class Phrases:
    """Token sequences that are masked together."""

    def __init__(self, sequences: Iterable[Sequence[int]] = ()) -> None:
        self._by_first: dict[int, list[tuple[int, ...]]] = {}
        for sequence in sorted({tuple(each) for each in sequences if len(each) > 1}, key=lambda each: -len(each)):
            self._by_first.setdefault(sequence[0], []).append(sequence)

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def spans(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Find phrases in tokens as [begin, end): left to right, longest match first, without overlap."""
        spans, begin = [], 0
        while begin < len(tokens):
            for phrase in self._by_first.get(tokens[begin], ()):
                if tuple(tokens[begin : begin + len(phrase)]) == phrase:
                    spans.append((begin, begin + len(phrase)))
                    begin += len(phrase) - 1
                    break
            begin += 1
        return spans


def read_phrases(path: Path, encode: object) -> Phrases:
    """Read phrases from a UTF-8 file, one per line. encode: text to tokens.

    Raises UserError for a missing file, invalid UTF-8, or no phrase of more than one token.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise UserError(f"--phrases {path}: no such file") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"--phrases {path}: is not UTF-8 (byte {error.start + 1:,}): convert it") from None
    assert callable(encode)
    phrases = Phrases(encode(line.strip()) for line in lines if line.strip())
    if not len(phrases):
        raise UserError(f"--phrases {path}: has no phrase of more than one token: give one phrase a line")
    return phrases


class MaskedRow(NamedTuple):
    """A masked row."""

    tokens: np.ndarray
    """(S,) int64."""
    positions: np.ndarray
    """(M,) int64, ascending: positions of the masked tokens."""
    labels: np.ndarray
    """(M,) int64: the original tokens there."""


class Masker:
    """Masks tokens of rows."""

    def __init__(
        self,
        vocabulary: MaskingVocabulary,
        *,
        rate: float = 0.15,
        shares: Shares = BERT_SHARES,
        whole_words: bool = False,
        phrases: Phrases | None = None,
    ) -> None:
        """rate: share of a row's maskable tokens. Phrases are masked as a whole, also without whole_words."""
        self.vocabulary, self.rate, self.shares = vocabulary, rate, shares
        self.whole_words, self.phrases = whole_words, phrases
        self._ordinary = np.flatnonzero(~vocabulary.is_special)

    def budget(self, candidates: int) -> int:
        """Number of tokens to mask of so many; whole words and phrases may mask slightly fewer."""
        return max(1, round(self.rate * candidates)) if candidates else 0

    def __call__(self, tokens: np.ndarray, random: np.random.Generator) -> MaskedRow:
        """Mask tokens of a row (S,) int64. A row of markers alone stays unchanged, and nothing is predicted."""
        candidates = np.flatnonzero(~self.vocabulary.is_special[tokens])
        budget = self.budget(len(candidates))
        if not self.whole_words and self.phrases is None:
            positions = np.sort(random.permutation(candidates)[:budget])
        else:
            positions = self._whole(tokens, candidates, budget, random)
        labels = tokens[positions]
        seen = tokens.copy()
        draw = random.random(len(positions))
        replaced = (draw >= self.shares.mask) & (draw < self.shares.mask + self.shares.random)
        seen[positions[draw < self.shares.mask]] = self.vocabulary.mask
        seen[positions[replaced]] = random.choice(self._ordinary, int(replaced.sum()))
        return MaskedRow(seen, positions, labels)

    def _whole(
        self, tokens: np.ndarray, candidates: np.ndarray, budget: int, random: np.random.Generator
    ) -> np.ndarray:
        """Whole words or phrases in random order, skipping those that exceed the remaining budget.

        At least one unit is masked: a row of one long word would otherwise teach nothing.
        """
        units = self._units(tokens, candidates)
        chosen: list[int] = []
        for number in random.permutation(len(units)):
            unit = units[number]
            if not chosen or len(chosen) + len(unit) <= budget:
                chosen += unit
            if len(chosen) >= budget:
                break
        return np.array(sorted(chosen), np.int64)

    def _units(self, tokens: np.ndarray, candidates: np.ndarray) -> list[list[int]]:
        """Positions of the candidates, grouped into units that are masked together."""
        inside = np.zeros(len(tokens), bool)  # whether a place continues the unit before it
        if self.whole_words:
            inside[candidates] = ~self.vocabulary.begins_word[tokens[candidates]]
        for begin, end in [] if self.phrases is None else self.phrases.spans(tokens.tolist()):
            inside[begin], inside[begin + 1 : end] = False, True
            if self.whole_words and end < len(tokens):  # a phrase ends where its word does
                inside[end] &= not self.vocabulary.begins_word[tokens[end]]
        units: list[list[int]] = []
        for position in candidates.tolist():
            if units and inside[position] and units[-1][-1] == position - 1:
                units[-1].append(position)
            else:
                units.append([position])
        return units
