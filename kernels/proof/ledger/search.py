"""Tries tiles of a case and ranks them by what the machine code says: spills first, then the bound.

A tile with a lower bound need not be faster, and one with a higher bound cannot reach the other's: the ranking is where
timing starts. Of equal bounds the tile with more resident warps goes first, then the one with less shared memory.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import counted, occupancy, work
from ptx_check.ledger.counted import Counted

_SIZES = (16, 32, 64, 128)
_HELD = (8, 128)
"""Elements that a thread may hold, fewest and most."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A tile of a case, and what became of it."""

    case: CompileCase
    counted: Counted | None
    error: str = ""

    def rank(self, chip: Chip) -> tuple:
        """Smaller is better; what does not compile, or does not fit, comes last."""
        if self.counted is None or self.counted.resources.shared > chip.shared_memory:
            return (True,)
        needs = self.counted.resources
        share = occupancy(chip.name, needs, self.counted.warps)
        return (False, needs.spill, round(needs.bound, 1), -share, needs.shared)


def tiles(chip: Chip, case: CompileCase) -> list[CompileCase]:
    """The case with every tile that is worth a try, its own first."""
    names = [name for name in ("ROWS", "COLUMNS") if name in case.arguments]
    if len(names) < 2:
        return [case]
    result = {case.name: case}
    for rows in _SIZES:
        for columns in _SIZES:
            for warps in (2, 4, 8):
                if _HELD[0] <= rows * columns / (warps * chip.warp) <= _HELD[1]:
                    tried = with_tile(case, rows, columns, warps)
                    result.setdefault(tried.name, tried)
    return list(result.values())


def with_tile(case: CompileCase, rows: int, columns: int, warps: int) -> CompileCase:
    """The case with another tile, and the name that goes with it."""
    sizes = [rows, columns, *([case.arguments["DEPTH"]] if "DEPTH" in case.arguments else [])]
    tile = f"{'x'.join(map(str, sizes))}w{warps}s{case.num_stages}"
    return replace(
        case,
        name=re.sub(r"[^/]+$", tile, case.name),
        arguments={**case.arguments, "ROWS": rows, "COLUMNS": columns},
        num_warps=warps,
    )


def search(chip: Chip, case: CompileCase, cases: Sequence[CompileCase] = ()) -> list[Tried]:
    """Count every tile, and return them best first. cases: instead of tiles()."""
    tried = []
    for each in cases or tiles(chip, case):
        try:
            tried.append(Tried(each, counted.of_case(chip, each)))
        except Exception as error:  # whatever the compiler raises is why there is no count
            tried.append(
                Tried(each, None, f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}")
            )
    return sorted(tried, key=lambda each: each.rank(chip))


def reason(chip: Chip, tried: Sequence[Tried], shipped: CompileCase) -> str:
    """One line: why the best tile beats the shipped one."""
    best = tried[0]
    ours = next(each for each in tried if each.case.name == shipped.name)
    if best.counted is None or ours.counted is None or best is ours:
        return f"{shipped.name} stays"
    first, second = best.counted.resources, ours.counted.resources
    return (
        f"{shipped.name} -> {best.case.name.rpartition('/')[2]}: bound {second.bound:.1f} -> {first.bound:.1f}, "
        f"spill {second.spill} -> {first.spill} B, {work.elements(chip, best.case):.0f} elements a thread"
    )
