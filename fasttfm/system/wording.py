"""Counts in messages (plurals, tallies of lines), and paths as text."""

import os
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """A count of lines and the first of them."""

    count: int = 0
    first: int | None = None
    """Line number, from 1."""

    def add(self, line: int) -> None:
        self.count += 1
        self.first = self.first or line

    def __str__(self) -> str:
        return f"{counted(self.count, 'line')} (first: line {self.first:,})"


def counted(count: int, noun: str) -> str:
    """1 line, 2 lines, 1,000 lines."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def plain_text(path: str | os.PathLike[str]) -> str:
    """A path as valid text: invalid UTF-8 becomes U+FFFD."""
    return os.fsencode(path).decode("utf-8", errors="replace")
