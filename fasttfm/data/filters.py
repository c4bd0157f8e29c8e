"""Filters for parallel text; each rule reports its count and its first match.

    empty        a side is blank or has no subwords
    too long     a side has more subwords than max_length
    ratio        one side has more than max_ratio times the other's subwords
    identical    both sides are the same text, hence untranslated
    script       less than half of a side's letters are in its script: another language, or noise
    duplicate    the same pair of lines occurred before

Only the first matching rule counts. Recipes for WMT's Common Crawl start with such rules.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from fasttfm.data.corpus import Pair
from fasttfm.data.unicode_forms import has_text
from fasttfm.errors import UserError
from fasttfm.system.wording import counted

_REASONS = {
    "empty": "an empty side",
    "too long": "a side that is too long",
    "ratio": "an extreme length ratio (--max-ratio)",
    "identical": "the same text on both sides (--drop-identical)",
    "script": "a side in another script (--src-script, --tgt-script)",
    "duplicate": "an earlier duplicate (--drop-duplicates)",
}
"""Rule -> reason in the report: "skipped 2 pairs with ..."."""
RULES = tuple(_REASONS)

SCRIPTS = {
    "latin": ("LATIN",),
    "greek": ("GREEK",),
    "cyrillic": ("CYRILLIC",),
    "hebrew": ("HEBREW",),
    "arabic": ("ARABIC",),
    "devanagari": ("DEVANAGARI",),
    "thai": ("THAI",),
    "chinese": ("CJK",),
    "japanese": ("CJK", "HIRAGANA", "KATAKANA"),
    "korean": ("HANGUL", "CJK"),
}
"""Script -> prefixes of the Unicode names of its letters."""


@dataclass(slots=True)
class Filter:
    """The filter of a split, with counts of skipped pairs."""

    max_length: int
    max_ratio: float | None = None
    drop_identical: bool = False
    scripts: tuple[str | None, str | None] = (None, None)
    """Names from SCRIPTS for source and target; None accepts any text."""
    repeated: np.ndarray | None = None
    """(pairs,) bool from repeated_pairs(), to drop duplicates."""
    counts: Counter[str] = field(default_factory=Counter)
    """Rule -> number of skipped pairs."""
    first: dict[str, str] = field(default_factory=dict)
    """Rule -> FILE:LINE of the first skipped pair."""
    _seen: int = 0

    def keeps(self, pair: Pair, source: list[int], target: list[int]) -> bool:
        """Whether to use a pair, given its subwords; call it for every pair of the split, in order."""
        rule = self._rule(pair, source, target)
        self._seen += 1
        if rule is not None:
            self.counts[rule] += 1
            self.first.setdefault(rule, f"{pair.file}:{pair.line}")
        return rule is None

    def report(self) -> Iterator[str]:
        """Yields a line for each rule that skipped pairs."""
        for rule, first in self.first.items():
            limit = f" (more than {self.max_length} subwords, see --max-length)" if rule == "too long" else ""
            yield f"skipped {counted(self.counts[rule], 'pair')} with {_REASONS[rule]}{limit}; first: {first}"

    def _rule(self, pair: Pair, source: list[int], target: list[int]) -> str | None:
        if not source or not target or not has_text(pair.source) or not has_text(pair.target):
            return "empty"
        shorter, longer = sorted((len(source), len(target)))
        if longer > self.max_length:
            return "too long"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return "ratio"
        if self.drop_identical and pair.source.strip() == pair.target.strip():
            return "identical"
        if not all(map(_is_written_in, (pair.source, pair.target), self.scripts)):
            return "script"
        if self.repeated is not None and self.repeated[self._seen]:
            return "duplicate"
        return None


def _is_written_in(text: str, script: str | None) -> bool:
    """Whether at least half of a text's letters are in a script; true for None and for text without letters."""
    if script is None:
        return True
    letters = [_name(character) for character in text if character.isalpha()]
    return 2 * sum(name.startswith(SCRIPTS[script]) for name in letters) >= len(letters)


@cache
def _name(character: str) -> str:
    return unicodedata.name(character, "")


def check_script(flag: str, name: str | None) -> None:
    """Raises UserError for an unknown script."""
    if name is not None and name not in SCRIPTS:
        raise UserError(f"{flag} {name}: must be one of {', '.join(SCRIPTS)}")


def repeated_pairs(pairs: Iterable[Pair], count: int) -> np.ndarray:
    """(count,) bool: whether the same two lines occurred before. Takes about 30 bytes of memory per pair.

    Compares 64-bit digests: with 36 million pairs, one run in 28,000 loses a new pair.
    """
    texts = (f"{pair.source.strip()}\n{pair.target.strip()}".encode() for pair in pairs)
    digests = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts)
    repeated = np.ones(count, dtype=bool)
    repeated[np.unique(np.fromiter(digests, np.uint64, count), return_index=True)[1]] = False
    return repeated
