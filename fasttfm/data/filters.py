"""Rules that leave out pairs of a corpus: a table, each with its count and its first place.

    empty        a side is blank, or has no subword
    too long     a side has more subwords than max_length
    ratio        one side has more than max_ratio times the other's subwords
    identical    both sides are the same text: never translated
    script       less than half of a side's letters are of its script: another language, or noise
    duplicate    the same pair of lines came before

The first rule that holds counts. Rules of this kind stand at the beginning of every recipe for WMT's Common Crawl.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from fasttfm.data.corpus import Pair
from fasttfm.data.unicode_forms import has_text
from fasttfm.errors import UserError

_TOLD = {
    "empty": ("has", "have", "a side that is empty"),
    "too long": ("has", "have", "a side that is too long"),
    "ratio": ("has", "have", "sides of too unlike lengths (--max-ratio)"),
    "identical": ("has", "have", "the same text on both sides (--drop-identical)"),
    "script": ("is", "are", "written in another script (--src-script, --tgt-script)"),
    "duplicate": ("came", "came", "before (--drop-duplicates)"),
}
"""Rule -> what is said of one pair, and of several, that it leaves out."""
RULES = tuple(_TOLD)

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
"""A script -> how Unicode's names of its letters begin."""


@dataclass(slots=True)
class Dropped:
    """Pairs that one rule left out."""

    count: int = 0
    first: str = ""
    """FILE:LINE of the first one."""


@dataclass(slots=True)
class Filter:
    """Rules for the pairs of one split, and what they left out so far."""

    max_length: int
    max_ratio: float | None = None
    drop_identical: bool = False
    scripts: tuple[str | None, str | None] = (None, None)
    """Names from SCRIPTS for source and target; None takes any text."""
    repeated: np.ndarray | None = None
    """(pairs,) bool: what repeated_pairs() says, if duplicates are to go."""
    dropped: dict[str, Dropped] = field(default_factory=dict)
    _seen: int = 0

    def keeps(self, pair: Pair, source: list[int], target: list[int]) -> bool:
        """Return whether a pair is used; to be called for each pair of the split, in order, with its subwords."""
        rule = self._rule(pair, source, target)
        self._seen += 1
        if rule is None:
            return True
        dropped = self.dropped.setdefault(rule, Dropped(first=f"{pair.file}:{pair.line}"))
        dropped.count += 1
        return False

    def report(self) -> Iterator[str]:
        """Yields a line on each rule that left pairs out."""
        for rule, tally in self.dropped.items():
            limit = f" (more than {self.max_length} subwords, see --max-length)" if rule == "too long" else ""
            one, more, what = _TOLD[rule]
            pairs = f"pair {one}" if tally.count == 1 else f"pairs {more}"
            yield f"{tally.count:,} {pairs} {what}{limit}, left out; the first is {tally.first}"

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
        if not all(
            _is_written_in(text, script)
            for text, script in zip((pair.source, pair.target), self.scripts)
            if script is not None
        ):
            return "script"
        if self.repeated is not None and self.repeated[self._seen]:
            return "duplicate"
        return None


def _is_written_in(text: str, script: str) -> bool:
    """Return whether at least half of a text's letters are of a script; one without letters passes."""
    letters = [_name(character) for character in text if character.isalpha()]
    return 2 * sum(name.startswith(SCRIPTS[script]) for name in letters) >= len(letters)


@cache
def _name(character: str) -> str:
    return unicodedata.name(character, "")


def check_script(flag: str, name: str | None) -> None:
    """Raises UserError for a script that is not known."""
    if name is not None and name not in SCRIPTS:
        raise UserError(f"{flag} {name}: one of {', '.join(SCRIPTS)} is allowed")


def repeated_pairs(pairs: Iterable[Pair], count: int) -> np.ndarray:
    """(count,) bool: whether the same two lines came before. Takes some 30 bytes of memory a pair.

    Lines are compared by 64 bits of a digest: of 36 million pairs one in 28,000 runs would lose a pair that is new.
    """
    repeated = np.ones(count, dtype=bool)
    repeated[np.unique(np.fromiter(_digests(pairs), np.uint64, count), return_index=True)[1]] = False
    return repeated


def _digests(pairs: Iterable[Pair]) -> Iterator[int]:
    for pair in pairs:
        content = f"{pair.source.strip()}\n{pair.target.strip()}".encode()
        yield int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
