"""Text tables of the ledger."""

import re
from collections.abc import Iterable

from ptx_check.ledger import peers, units
from ptx_check.ledger.collect import Found
from ptx_check.ledger.count import Count, Usage
from ptx_check.ledger.counted import Counted
from ptx_check.ledger.latency import latency
from ptx_check.ledger.peers import Peer
from ptx_check.ledger.resources import occupancy
from ptx_check.ledger.text_table import aligned

USED = ("loop", "instr.", *units.UNITS, "bound", "by")
NEEDS = ("latency", "registers", "spill B", "shared B", "occupancy", "order")
"""latency: stall cycles per element, divided by the resident warps (latency.py). order: of the asynchronous products
(order.py)."""


def of_found(rows: Iterable[Found], wanted: re.Pattern[str]) -> str:
    """Return the table of a file's kernels; cycles per tile element, or per thread if the tile is unknown."""
    lines: list[tuple[str, ...]] = [("kernel", "chip", *USED, *NEEDS)]
    for found in rows:
        settings = " ".join(f"{name}={value}" for name, value in found.constants.items())
        if wanted.search(f"{found.name} {settings}"):
            for used, cells, order in parts(found.counted.count, found.elements()):
                needs = needs_cells(found.chip, found.counted, used, found.elements())
                lines.append((f"{found.name} {settings}", found.chip, *cells, *needs, order))
    return aligned(lines, names=2)


def of_peers(rows: Iterable[Peer]) -> str:
    """Return the table of a library's kernels; cycles per tile element, or per thread if the tile is unknown."""
    lines: list[tuple[str, ...]] = [("kernel", "chip", *USED, "registers", "spill B", "order")]
    for peer in rows:
        elements = peers.elements(peer.name) or 1.0
        for _, cells, order in parts(peer.count, elements):
            needs = ("?" if number is None else str(number) for number in (peer.registers, peer.spill))
            lines.append((peer.title, peer.chip, *cells, *needs, order))
    return aligned(lines, names=2)


def parts(count: Count, elements: float) -> list[tuple[Usage, tuple[str, ...], str]]:
    """Return usage, cells and order of each loop over tiles, lightest first, then of the code outside of loops (-)."""
    named = [*((str(number), loop) for number, loop in enumerate(count.loops, 1)), ("-", count.outside)]
    orders = [*count.orders, *[""] * (len(named) - len(count.orders))]
    return [(used, (name, *used_cells(used, elements)), order) for (name, used), order in zip(named, orders)]


def used_cells(used: Usage, elements: float) -> tuple[str, ...]:
    """Return the cells of the USED columns, without the first (the loop's name)."""
    cycles = (f"{value / elements:.1f}" for value in used.columns.values())
    return (str(used.instructions), *cycles, f"{used.bound / elements:.1f}", used.busiest)


def needs_cells(chip: str, found: Counted, used: Usage, elements: float) -> tuple[str, ...]:
    """Return the cells of the NEEDS columns, without the last (the order)."""
    needs = found.resources
    waits, share = latency(chip, used, needs, found.warps) / elements, occupancy(chip, needs, found.warps)
    return f"{waits:.1f}", str(needs.registers), str(needs.spill), f"{needs.shared:,}", f"{share:.0%}"
