"""Order of a loop's asynchronous products, exponentials and barriers, as one line:

    B A H4 | W0 E34 A H4 | B

    H4    four products (HGMMA)
    |     end of a wgmma group
    W0    wait until at most 0 groups are pending
    A     warpgroup.arrive
    E34   34 exponentials (MUFU.EX2)
    B     barrier (BAR.SYNC)

Exponentials between the end of a group and its wait overlap with the products.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from ptx_check.ledger.code import Instruction

_RUNS = ("H", "E")
"""Marks whose runs are written with a count."""


def order(instructions: Iterable[Instruction]) -> str:
    """Return the order of the instructions; empty without asynchronous products."""
    marks = [mark for each in instructions for mark in _marks(each)]
    if "H" not in marks:
        return ""
    runs = ((mark, len(list(run))) for mark, run in groupby(marks))
    return " ".join(f"{mark}{count}" if mark in _RUNS else " ".join([mark] * count) for mark, count in runs)


def _marks(each: Instruction) -> Iterator[str]:
    if each.name == "HGMMA":
        yield "H"
        if "gsb0" in each.operands:
            yield "|"
    elif each.opcode.startswith("MUFU.EX2"):
        yield "E"
    elif each.opcode.startswith("BAR.SYNC"):
        yield "B"
    elif each.opcode.startswith("WARPGROUP.ARRIVE"):
        yield "A"
    elif each.opcode.startswith("WARPGROUP.DEPBAR") and (groups := re.search(r"gsb0,\s*(\w+)", each.operands)):
        yield f"W{int(groups[1], 0)}"
