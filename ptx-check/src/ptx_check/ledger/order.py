"""Order of a loop's asynchronous products and of what stands between them, as one line:

    B A H4 | W0 E34 A H4 | B

H4 are four products (HGMMA), | the end of a group, A warpgroup.arrive, W0 a wait for all groups but 0, E34 as many
exponentials (MUFU.EX2), B a barrier (BAR.SYNC).
Exponentials between a group's end and its wait are computed while the products run.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from ptx_check.ledger.code import Instruction

_RUNS = ("H", "E")
"""Marks of which several in a row are counted as one."""


def order(instructions: Iterable[Instruction]) -> str:
    """The order in these instructions; empty where none is an asynchronous product."""
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
