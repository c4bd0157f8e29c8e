"""Ranks the tiles of a case by their machine code: spills, then bound, occupancy and shared memory.

A smaller bound need not mean a shorter time: the ranking selects the tiles to time first.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import counted, occupancy, work
from fasttfm.kernels.tiles.table import Tile
from ptx_check.ledger.counted import Counted

_SIZES = (16, 32, 64, 128)
_HELD = (8, 128)
"""Fewest and most tile elements per thread."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A case with one tile and its count, or the compiler's error."""

    case: CompileCase
    counted: Counted | None
    error: str = ""

    def rank(self, chip: Chip) -> tuple:
        """Sort key, smaller is better; cases that do not compile or fit come last."""
        if self.counted is None or self.counted.resources.shared > chip.shared_memory:
            return (True,)
        needs = self.counted.resources
        share = occupancy(chip.name, needs, self.counted.warps)
        return (False, needs.spill, round(needs.bound, 1), -share, needs.shared)


def tiles(chip: Chip, case: CompileCase) -> list[CompileCase]:
    """The case with every tile worth trying, its own first."""
    names = [name for name in ("ROWS", "COLUMNS") if name in case.arguments]
    if len(names) < 2:
        return [case]
    result = {case.name: case}
    for rows, columns, warps in itertools.product(_SIZES, _SIZES, (2, 4, 8)):
        if _HELD[0] <= rows * columns / (warps * chip.warp) <= _HELD[1]:
            tile = Tile(rows, columns, warps, case.num_stages, case.arguments.get("DEPTH", 0))
            name = re.sub(r"[^/]+$", str(tile), case.name)
            arguments = {**case.arguments, "ROWS": rows, "COLUMNS": columns}
            result.setdefault(name, replace(case, name=name, arguments=arguments, num_warps=warps))
    return list(result.values())


def search(chip: Chip, case: CompileCase) -> list[Tried]:
    """Counts all tiles() and returns them best first."""
    tried = []
    for each in tiles(chip, case):
        try:
            tried.append(Tried(each, counted.of_case(chip, each)))
        except Exception as error:  # any exception of the compiler
            first_line = next(iter(str(error).splitlines()), "")
            tried.append(Tried(each, None, f"{type(error).__name__}: {first_line[:120]}"))
    return sorted(tried, key=lambda each: each.rank(chip))


def reason(chip: Chip, tried: Sequence[Tried], shipped: CompileCase) -> str:
    """One line that compares the best tile with the shipped one."""
    best = tried[0]
    ours = next(each for each in tried if each.case.name == shipped.name)
    if best.counted is None or ours.counted is None or best is ours:
        return f"{shipped.name} stays"
    first, second = best.counted.resources, ours.counted.resources
    return (
        f"{shipped.name} -> {best.case.name.rpartition('/')[2]}: bound {second.bound:.1f} -> {first.bound:.1f}, "
        f"spill {second.spill} -> {first.spill} B, {work.elements(chip, best.case):.0f} elements a thread"
    )
