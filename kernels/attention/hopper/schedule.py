"""Which tile of which head each program has in which turn.

A section of planes at a time, whose keys and values the second-level cache holds; of a section the longest rows first.
Every other turn the programs take theirs in the opposite order, and each section begins with the program behind the
one that the last section would have given its next: of 16 x 16 heads of 1,024 rows, causal, on 132 processors the
busiest program then has 1.03 times the mean, as of 4 x 16 heads of 2,048; of heads of 4,096 and more under 1.01 (counted
by tiles). Taken in turn alone, 32 heads of 8,192 rows in sections of 8 have 1.16.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(1 << 30)
"""Past every row: the first one of a turn without work."""


@triton.jit
def turns(tiles, planes, section, programs):
    """How many numbers there are, of which a program takes every one that is its own modulo `programs`."""
    whole = planes // section
    rounds = whole * tl.cdiv(section * tiles, programs) + tl.cdiv((planes - whole * section) * tiles, programs)
    return rounds * programs


@triton.jit
def place(number, tiles, planes, section, programs, ROWS: tl.constexpr):
    """(first row, plane) of a number: of `tiles` tiles of ROWS rows a plane; NOWHERE where the turn has no work."""
    rounds = tl.cdiv(section * tiles, programs)
    turn = number // programs
    before = turn // rounds
    turn -= before * rounds
    at = (number + before * (section * tiles)) % programs
    at = turn * programs + tl.where(turn % 2 == 1, programs - 1 - at, at)
    width = tl.minimum(section, planes - before * section)
    row = tl.where(at < width * tiles, (tiles - 1 - at // width) * ROWS, NOWHERE)
    return row, before * section + at % width
