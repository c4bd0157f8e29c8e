"""Tables of tiles: which tile a kernel takes for each chip and size.

    FORWARD = tiles('''
        kind  width | simt     sm_80,sm_86  sm_90       sm_80+
        half  64    | 32x32w8  64x32w4s2    128x64w4s3  64x32w4
        tf32  64    | -        -            64x64w4     64x32w4
        *     *     | 16x32w8  -            -           16x32w8
    ''')
    FORWARD(chip, "bf16", 64)

Left of the bar, cells list comma-separated values: half means fp16,bf16, and * any value. Right of it, column headers
are chips: a name, sm_80+ (sm_80 and newer) or one of GROUPS. A chip outside the compile matrix counts as its nearest
relative, the newest NVIDIA chip in it that is not newer. The answer is the first matching cell, row by row and from
left to right; - matches nothing. Comments follow a #.

A row that ends with @ 3.5,3.9+ applies only to these versions of Triton (3.5, and 3.9 and newer): another compiler or
assembler may spill where the pinned one does not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fasttfm.kernels.chip import CHIPS, Chip

Answer = TypeVar("Answer")

GROUPS: dict[str, Callable[[Chip], bool]] = {
    "*": lambda chip: True,
    "amd": lambda chip: chip.name.startswith("gfx"),
    "nvidia": lambda chip: chip.capability > 0,
    "simt": lambda chip: not chip.matrix_units,  # no matrix units for Triton; includes the interpreter
    "interpreter": lambda chip: chip.name == "interpreter",
}

_VERSIONS = re.compile(r"(?:\d+\.\d+\+?(?:,(?!$)|$))*")
_WRITTEN = re.compile(r"(?:(\d+)x)?(\d+)(?:x(\d+))?w(\d+)(?:s(\d+))?")


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of a matrix with its warps and stages; in attention, rows are queries and columns are keys."""

    rows: int
    """0: a part of one row."""
    columns: int
    warps: int
    stages: int = 1
    depth: int = 0
    """Depth of an iteration (BLOCK_K) of a matrix product; else 0."""
    sizes: dict[str, int] = field(init=False, repr=False, compare=False)
    """Kernel constants of the tile: its nonzero sizes by name."""

    def __post_init__(self) -> None:
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        object.__setattr__(self, "sizes", {name: size for name, size in sizes.items() if size})

    @classmethod
    def parse(cls, text: str) -> Tile:
        """Parse text such as 128x64w4s3: rows x columns [x depth], warps, and stages if not 1."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(f"invalid tile {text}: write it as 128x64w4s3")
        rows, columns, depth, warps, stages = (int(part or 0) for part in match.groups())
        return cls(rows, columns, warps, stages or 1, depth)

    def __str__(self) -> str:
        return f"{'x'.join(str(size) for size in self.sizes.values())}w{self.warps}s{self.stages}"

    def options(self, stages: int | None = None) -> dict[str, int]:
        """Return constants and options of a launch; stages: overrides the tile's."""
        return {**self.sizes, "num_warps": self.warps, "num_stages": stages or self.stages}


class Table(Generic[Answer]):
    """Table from (chip, *size) to the answer of the first matching cell."""

    def __init__(self, text: str, answer: Callable[[str], Answer]) -> None:
        """answer: parses a cell."""
        head, *lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
        self.parts, self.chips = _sides(head)
        for name in ",".join(self.chips).split(","):
            if name not in GROUPS and name.removesuffix("+") not in CHIPS:
                raise ValueError(f"a table of tiles has a column for {name}, which is neither a chip nor a group")
        self.sizes: list[tuple[list[str], ...]] = []
        """For each row, the matching values of each part of the size."""
        self.compilers: list[str] = []
        """For each row, its versions of Triton as text; empty: all."""
        self.answers: dict[tuple[int, int], Answer] = {}
        """(row, column) -> the answer of the cell."""
        self._cache: dict[tuple, Answer] = {}
        for row, line in enumerate(lines):
            line, _, versions = map(str.strip, line.partition("@"))
            size, cells = _sides(line)
            if (len(size), len(cells)) != (len(self.parts), len(self.chips)):
                raise ValueError(f"the row {line!r} of a table of tiles must have a cell for each column of {head!r}")
            if not _VERSIONS.fullmatch(versions):
                raise ValueError(f"a row of a table of tiles is for Triton {versions!r}: write versions as 3.5,3.9+")
            self.compilers.append(versions)
            self.sizes.append(tuple(cell.replace("half", "fp16,bf16").split(",") for cell in size))
            self.answers |= {(row, column): answer(cell) for column, cell in enumerate(cells) if cell != "-"}

    def __call__(self, chip: Chip, *size: Any) -> Answer:
        """Return the answer for a chip and size. Raises ValueError if no cell matches."""
        key = (chip.name, *size)
        answer = self._cache.get(key)
        if answer is None:
            answer = self._cache[key] = self.answers[self.cell(chip, *size)]
        return answer

    def cell(self, chip: Chip, *size: Any) -> tuple[int, int]:
        """Return row and column of the first matching cell. Raises ValueError if there is none."""
        columns = [i for i, names in enumerate(self.chips) if any(_is_one(chip, name) for name in names.split(","))]
        for row, cells in enumerate(self.sizes):
            matches = all(str(value) in cell or cell == ["*"] for value, cell in zip(size, cells, strict=True))
            if matches and _is_for(self.compilers[row]):
                for column in columns:
                    if (row, column) in self.answers:
                        return row, column
        values = ", ".join(f"{name} {value}" for name, value in zip(self.parts, size))
        raise ValueError(f"no tile is listed for {chip.name}, {values}: add a cell to its table in kernels/tiles")


def tiles(text: str) -> Table[Tile]:
    """Return a table whose cells are tiles."""
    return Table(text, Tile.parse)


def _sides(line: str) -> tuple[list[str], list[str]]:
    left, _, right = line.partition("|")
    return left.split(), right.split()


def _is_one(chip: Chip, name: str) -> bool:
    if name in GROUPS:
        return GROUPS[name](chip)
    if name.endswith("+"):
        return chip.capability >= CHIPS[name[:-1]].capability
    return name == relative(chip)


def _is_for(versions: str) -> bool:
    """Return whether a row with these versions applies to the installed Triton."""
    for version in versions.split(",") if versions else ():
        number = tuple(map(int, version.removesuffix("+").split(".")))
        if compiler() == number or (version.endswith("+") and compiler() > number):
            return True
    return not versions


@functools.cache
def compiler() -> tuple[int, ...]:
    """Return the version of Triton, such as (3, 7)."""
    import triton  # lazily: most rows do not depend on it

    return tuple(map(int, triton.__version__.split(".")[:2]))


@functools.cache
def relative(chip: Chip) -> str:
    """Return the chip of the compile matrix that represents this one: itself, or the newest NVIDIA chip in it that is
    not newer. Other AMD chips, and the interpreter, have none: their own name."""
    if chip.name in CHIPS or not chip.capability:
        return chip.name
    older = [other for other in CHIPS.values() if 0 < other.capability <= chip.capability]
    return max(older, key=lambda other: other.capability, default=CHIPS["sm_60"]).name
