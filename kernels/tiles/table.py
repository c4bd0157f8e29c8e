"""Tables of tiles: what a kernel takes on each chip for each size.

    FORWARD = tiles('''
        kind  width | simt     sm_80,sm_86  sm_90       sm_80+
        half  64    | 32x32w8  64x32w4s2    128x64w4s3  64x32w4
        tf32  64    | -        -            64x64w4     64x32w4
        *     *     | 16x32w8  -            -           16x32w8
    ''')
    FORWARD(chip, "bf16", 64)

Left of the bar a cell lists values with commas; half is fp16,bf16, and * any. Right of it a column is headed by the
chips that it is for: by name, as sm_80+ (sm_80 and newer) or as one of GROUPS; a chip that the matrix does not compile
for goes with its nearest relative (the newest NVIDIA chip that it is not older than). The first cell that fits, row by
row and from left to right, holds the answer; - is none. What follows a # says why.

A row that ends with @ 3.5,3.9+ holds under these versions of Triton alone (3.5, and 3.9 and newer): another compiler,
with another assembler, may spill what the pinned one does not.
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
    "simt": lambda chip: not chip.matrix_units,  # no matrix units in Triton's reach; the interpreter too
    "interpreter": lambda chip: chip.name == "interpreter",
}

_VERSIONS = re.compile(r"(?:\d+\.\d+\+?(?:,(?!$)|$))*")
_WRITTEN = re.compile(r"(?:(\d+)x)?(\d+)(?:x(\d+))?w(\d+)(?:s(\d+))?")


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of a matrix and how it is computed; of attention, rows are queries and columns keys."""

    rows: int
    """0: a part of one row."""
    columns: int
    warps: int
    stages: int = 1
    depth: int = 0
    """Of a step of a matrix product whose depth is walked; else 0."""
    sizes: dict[str, int] = field(init=False, repr=False, compare=False)
    """The constants of a kernel that takes this tile."""

    def __post_init__(self) -> None:
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        object.__setattr__(self, "sizes", {name: size for name, size in sizes.items() if size})

    @classmethod
    def parse(cls, text: str) -> Tile:
        """The tile of text such as 128x64w4s3: rows x columns [x depth], warps and, unless there is one, stages."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(f"a tile is written as 128x64w4s3, not {text}")
        rows, columns, depth, warps, stages = (int(part or 0) for part in match.groups())
        return cls(rows, columns, warps, stages or 1, depth)

    def __str__(self) -> str:
        return f"{'x'.join(str(size) for size in self.sizes.values())}w{self.warps}s{self.stages}"

    def options(self, stages: int | None = None) -> dict[str, int]:
        """A launch's constants and options; stages: fewer than its own."""
        return {**self.sizes, "num_warps": self.warps, "num_stages": stages or self.stages}


class Table(Generic[Answer]):
    """(chip, *size) -> the answer of the first cell that fits."""

    def __init__(self, text: str, answer: Callable[[str], Answer]) -> None:
        """answer: makes the answer of what a cell says."""
        head, *lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
        self.parts, self.chips = _sides(head)
        for name in ",".join(self.chips).split(","):
            if name not in GROUPS and name.removesuffix("+") not in CHIPS:
                raise ValueError(f"a table of tiles has a column for {name}, which is neither a chip nor a group")
        self.sizes: list[tuple[list[str], ...]] = []
        """For each row the values of each part of the size that it holds for."""
        self.compilers: list[str] = []
        """For each row the versions of Triton that it is for; empty: all."""
        self.answers: dict[tuple[int, int], Answer] = {}
        """(row, column) -> what the cell says."""
        self._known: dict[tuple, Answer] = {}
        for row, line in enumerate(lines):
            line, _, versions = map(str.strip, line.partition("@"))
            size, cells = _sides(line)
            if (len(size), len(cells)) != (len(self.parts), len(self.chips)):
                wanted = f"{' '.join(self.parts)} | {' '.join(self.chips)}"
                raise ValueError(f"a row of a table of tiles is {line!r}: it needs a cell for each of {wanted}")
            if not _VERSIONS.fullmatch(versions):
                raise ValueError(f"a row of a table of tiles is for Triton {versions!r}: write versions as 3.5,3.9+")
            self.compilers.append(versions)
            self.sizes.append(tuple(cell.replace("half", "fp16,bf16").split(",") for cell in size))
            self.answers |= {(row, column): answer(cell) for column, cell in enumerate(cells) if cell != "-"}

    def __call__(self, chip: Chip, *size: Any) -> Answer:
        """Raises ValueError where no cell fits."""
        key = (chip.name, *size)
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = self.answers[self.cell(chip, *size)]
        return answer

    def cell(self, chip: Chip, *size: Any) -> tuple[int, int]:
        """Row and column of the cell that answers. Raises ValueError as calling the table does."""
        columns = [i for i, names in enumerate(self.chips) if any(_is_one(chip, name) for name in names.split(","))]
        for row, wanted in enumerate(self.sizes):
            fits = all(str(value) in cell or cell == ["*"] for value, cell in zip(size, wanted, strict=True))
            if fits and _is_for(self.compilers[row]):
                for column in columns:
                    if (row, column) in self.answers:
                        return row, column
        what = ", ".join(f"{name} {value}" for name, value in zip(self.parts, size))
        raise ValueError(f"no tile is listed for {chip.name}, {what}: fill a cell of its table in kernels/tiles")


def tiles(text: str) -> Table[Tile]:
    """A table whose cells are tiles."""
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
    """True if a row with these versions holds under the Triton that is installed."""
    for version in versions.split(",") if versions else ():
        wanted = tuple(map(int, version.removesuffix("+").split(".")))
        if compiler() == wanted or (version.endswith("+") and compiler() > wanted):
            return True
    return not versions


@functools.cache
def compiler() -> tuple[int, ...]:
    """Triton's version, as (3, 7)."""
    import triton  # not before: most rows are read without it

    return tuple(map(int, triton.__version__.split(".")[:2]))


@functools.cache
def relative(chip: Chip) -> str:
    """The chip of the compile matrix that stands for this one: itself, or on NVIDIA the newest that it is not older
    than; another AMD chip has none."""
    if chip.name in CHIPS or not chip.capability:
        return chip.name
    older = [known for known in CHIPS.values() if 0 < known.capability <= chip.capability]
    return max(older, key=lambda known: known.capability, default=CHIPS["sm_60"]).name
