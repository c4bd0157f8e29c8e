"""Text tables of the counts of compile cases."""

from collections.abc import Iterable, Sequence

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import work
from fasttfm.kernels.proof.ledger.search import Tried
from ptx_check.ledger.counted import Counted
from ptx_check.ledger.report import NEEDS, USED, needs_cells, parts, used_cells
from ptx_check.ledger.text_table import aligned

Row = tuple[Chip, CompileCase, Counted]


def table(rows: Iterable[Row]) -> str:
    """Every loop over tiles of every case, lightest first, then (-) the code outside of loops: cycles per element."""
    lines: list[tuple[str, ...]] = [("case", "chip", *USED, *NEEDS)]
    for chip, case, result in rows:
        name = f"{case.name} {case.dtype}"
        elements = work.elements(chip, case)
        for used, cells, order in parts(result.count, elements):
            lines.append((name, chip.name, *cells, *needs_cells(chip.name, result, used, elements), order))
    return aligned(lines, names=2)


def tried(chip: Chip, rows: Sequence[Tried]) -> str:
    """The tiles of a search, best first, with their main loops."""
    lines: list[tuple[str, ...]] = [("case", "chip", *USED[1:], *NEEDS)]
    for each in rows:
        name = f"{each.case.name} {each.case.dtype}"
        if each.counted is None:
            lines.append((name, chip.name, *[""] * (len(lines[0]) - 3), each.error))
            continue
        main, elements = each.counted.count.main, work.elements(chip, each.case)
        cells = needs_cells(chip.name, each.counted, main, elements)
        order = next(iter(each.counted.count.orders), "")
        lines.append((name, chip.name, *used_cells(main, elements), *cells, order))
    return aligned(lines, names=2)
