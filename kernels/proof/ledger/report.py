"""The ledger as tables for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import peers, units, work
from fasttfm.kernels.proof.ledger.collect import Found
from fasttfm.kernels.proof.ledger.count import Count, Usage
from fasttfm.kernels.proof.ledger.counted import Counted
from fasttfm.kernels.proof.ledger.latency import latency
from fasttfm.kernels.proof.ledger.peers import Peer
from fasttfm.kernels.proof.ledger.search import Tried
from fasttfm.kernels.proof.report import aligned
from fasttfm.kernels.proof.resources import occupancy

_USED = ("loop", "instr.", *units.UNITS, "bound", "by")
_NEEDS = ("latency", "registers", "spill B", "shared B", "occupancy")
"""latency: cycles an element by the control codes, of the warps that can reside."""

Row = tuple[Chip, CompileCase, Counted]


def table(rows: Iterable[Row]) -> str:
    """Every loop over tiles of every case, lightest first, then (-) what is outside of them: cycles an element."""
    lines: list[tuple[str, ...]] = [("case", "chip", *_USED, *_NEEDS)]
    for chip, case, found in rows:
        name = f"{case.name} {case.dtype}"
        elements = work.elements(chip, case)
        for used, cells in _parts(found.count, elements):
            lines.append((name, chip.name, *cells, *_needs(chip, found, used, elements)))
    return aligned(lines, names=2)


def foreign(rows: Iterable[Found], wanted: re.Pattern[str]) -> str:
    """The kernels that a file launches; cycles an element of the tile that their constants name, else a thread."""
    from fasttfm.kernels.compile_case import CHIPS

    lines: list[tuple[str, ...]] = [("kernel", "chip", *_USED, *_NEEDS)]
    for found in rows:
        settings = " ".join(f"{name}={value}" for name, value in found.constants.items())
        if wanted.search(f"{found.name} {settings}"):
            for used, cells in _parts(found.counted.count, found.elements()):
                needs = _needs(CHIPS[found.chip], found.counted, used, found.elements())
                lines.append((f"{found.name} {settings}", found.chip, *cells, *needs))
    return aligned(lines, names=2)


def of_peers(rows: Iterable[Peer]) -> str:
    """Kernels of a library; cycles an element where the name tells the tile, else a thread."""
    lines: list[tuple[str, ...]] = [("kernel", "chip", *_USED, "registers", "spill B")]
    for peer in rows:
        elements = peers.elements(peer.name) or 1.0
        for _, cells in _parts(peer.count, elements):
            needs = ("?" if number is None else str(number) for number in (peer.registers, peer.spill))
            lines.append((peer.title, peer.chip, *cells, *needs))
    return aligned(lines, names=2)


def tried(chip: Chip, rows: Sequence[Tried]) -> str:
    """A search's tiles, the best first, by their main loops."""
    lines: list[tuple[str, ...]] = [("case", "chip", *_USED[1:], *_NEEDS)]
    for each in rows:
        name = f"{each.case.name} {each.case.dtype}"
        if each.counted is None:
            lines.append((name, chip.name, *[""] * (len(lines[0]) - 3), each.error))
            continue
        main, elements = work.main(each.case, each.counted.count), work.elements(chip, each.case)
        lines.append((name, chip.name, *_cells(main, elements), *_needs(chip, each.counted, main, elements)))
    return aligned(lines, names=2)


def _parts(count: Count, elements: float) -> list[tuple[Usage, tuple[str, ...]]]:
    """Every loop and what is outside of them, with its cells."""
    parts = [*((str(number), loop) for number, loop in enumerate(count.loops, 1)), ("-", count.outside)]
    return [(used, (name, *_cells(used, elements))) for name, used in parts]


def _needs(chip: Chip, found: Counted, used: Usage, elements: float) -> tuple[str, ...]:
    needs = found.resources
    waits, share = latency(chip, used, needs, found.warps) / elements, occupancy(chip, needs, found.warps)
    return f"{waits:.1f}", str(needs.registers), str(needs.spill), f"{needs.shared:,}", f"{share:.0%}"


def _cells(used: Usage, elements: float) -> tuple[str, ...]:
    """Instructions, cycles an element by unit, the bound and the unit that sets it."""
    cycles = (f"{value / elements:.1f}" for value in used.columns.values())
    return (str(used.instructions), *cycles, f"{used.bound / elements:.1f}", used.busiest)
