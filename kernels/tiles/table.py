"""Tables of tiles: what a kernel takes for a group of chips and a size, a row each.

    FORWARD = Table(Tile, '''
        chips         kind  width  | rows columns warps stages
        sm_90,sm_100  *     64     | 128  64      4     3
        sm_80+        tf32  64     | 64   32      4     1
        *             *     64     | 32   32      8     1
    ''')
    FORWARD(chip, "bf16", 64)

The first row that fits holds. A cell left of the bar lists values with commas; * stands for any. Chips are listed by
name, as sm_80+ (sm_80 and newer) or as one of GROUPS; a chip that the matrix does not compile for goes with its nearest
relative (the newest NVIDIA chip that it is not older than). What follows a # says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of a matrix and how it is computed; of attention, rows are queries and columns keys."""

    rows: int
    columns: int
    warps: int
    stages: int = 1

    def options(self, stages: int | None = None) -> dict[str, int]:
        """A launch's constants and options; stages: fewer than its own."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns}
        return {**sizes, "num_warps": self.warps, "num_stages": stages or self.stages}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    cells: tuple[tuple[str, ...], ...]
    """What it holds for: the chips, then a tuple of values for each part of the size."""
    answer: Any

    def fits(self, chip: Chip, size: tuple) -> bool:
        chips, *wanted = self.cells
        return any(_is_one(chip, name) for name in chips) and all(
            str(value) in cell or cell == ("*",) for value, cell in zip(size, wanted, strict=True)
        )


class Table(Generic[Answer]):
    """(chip, *size) -> what the first row that fits answers."""

    def __init__(self, answer: Callable[..., Answer], text: str) -> None:
        """answer: makes the answer of the cells right of the bar, whole numbers being given as int."""
        head, *lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
        self.columns = head.partition("|")[0].split()
        self.rows = [self._row(answer, line) for line in lines]

    def _row(self, answer: Callable[..., Answer], line: str) -> Row:
        left, bar, right = line.partition("|")
        cells = tuple(tuple(cell.split(",")) for cell in left.split())
        if not bar or len(cells) != len(self.columns):
            raise ValueError(f"a row of a table of tiles is {line!r}: it needs {' '.join(self.columns)} and then a bar")
        if strangers := [name for name in cells[0] if not _known(name)]:
            raise ValueError(f"a row of a table of tiles is {line!r}: there is no chip or group {', '.join(strangers)}")
        return Row(cells, answer(*(int(cell) if cell.isdigit() else cell for cell in right.split())))

    def __call__(self, chip: Chip, *size: Any) -> Answer:
        """Raises ValueError where no row fits."""
        row = next((row for row in self.rows if row.fits(chip, size)), None)
        if row is None:
            what = ", ".join(f"{name} {value}" for name, value in zip(self.columns[1:], size))
            raise ValueError(f"no tile is listed for {chip.name}, {what}: add a row to its table in kernels/tiles")
        return row.answer


def _known(name: str) -> bool:
    return name in GROUPS or name.removesuffix("+") in CHIPS


def _is_one(chip: Chip, name: str) -> bool:
    if name in GROUPS:
        return GROUPS[name](chip)
    if name.endswith("+"):
        return chip.capability >= CHIPS[name[:-1]].capability
    return name == relative(chip)


@functools.cache
def relative(chip: Chip) -> str:
    """The chip of the compile matrix that stands for this one: itself, or on NVIDIA the newest that it is not older
    than; another AMD chip has none."""
    if chip.name in CHIPS or not chip.capability:
        return chip.name
    older = [known for known in CHIPS.values() if 0 < known.capability <= chip.capability]
    return max(older, key=lambda known: known.capability, default=CHIPS["sm_60"]).name
