"""Cycles that instructions take of each unit, and the bound that the busiest unit sets."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ptx_check.ledger import gcn, units
from ptx_check.ledger.code import Function, Instruction, Loop
from ptx_check.ledger.order import order

SHORTEST = 24
"""Instructions of a loop that may be one over tiles; shorter ones wait for a barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cycles of one scheduler by unit that some instructions take, each executed once by one warp."""

    instructions: int = 0
    issue: float = 0.0
    """One slot an instruction."""
    fp32: float = 0.0
    """Multiplications and additions; on NVIDIA's chips IMAD too, which shares their lanes."""
    imad: float = 0.0
    """IMAD alone, on the lanes that know it."""
    alu: float = 0.0
    """On AMD's chips every vector instruction: they share their lanes."""
    mufu: float = 0.0
    memory: float = 0.0
    """Of the load/store unit, by instructions."""
    tensor: float = 0.0
    shared: int = 0
    """Bytes that a thread's accesses to shared memory are wide. No column of the bound: 128 bytes a cycle and
    multiprocessor are counted beside it."""
    moved: int = 0
    """Bytes that a thread's accesses to global memory are wide."""
    spilled: int = 0
    """Instructions that reload or store spilled registers."""
    stall: int = 0
    """Cycles that a warp waits between its instructions, by the control codes: alone it cannot be faster. No column of
    the bound, because other warps fill them. What it waits for memory comes on top. 0 on AMD's chips."""

    @property
    def columns(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in units.UNITS}

    @property
    def bound(self) -> float:
        """Cycles below which it cannot be done: the busiest unit's."""
        return max(self.columns.values())

    @property
    def busiest(self) -> str:
        """The unit that sets the bound."""
        columns = self.columns
        return max(columns, key=lambda name: columns[name])

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in FIELDS})


FIELDS = tuple(Usage.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Count:
    """Demands of one kernel's machine code."""

    loops: tuple[Usage, ...]
    """Its loops over tiles, the lightest first. Of two in an attention kernel one compares with the mask's borders."""
    outside: Usage
    """What no loop holds: before, between and after them."""
    products: bool
    """Whether the loops have tensor instructions: they are then alternatives, else one follows the other. Those of a
    specialised kernel's consumers are alternatives too."""
    orders: tuple[str, ...] = ()
    """Of each loop what stands between its asynchronous products (order.py); empty for a loop without."""

    @property
    def main(self) -> Usage:
        """Return the bound: of loops with products the lightest, else all loops; without any, the whole."""
        if not self.loops:
            return self.outside
        return self.loops[0] if self.products else sum(self.loops[1:], self.loops[0])


def usage(instructions: Sequence[Instruction], chip: str, warps: int, code: Sequence[Instruction] = ()) -> Usage:
    """Return what instructions take; warps of the program; code: the whole function, for the shape of tcgen05's."""
    if chip in gcn.RATES:
        return _amd_usage(instructions, gcn.RATES[chip])
    rates = units.RATES[chip]
    kinds = Counter(map(units.unit, instructions))
    tensor = sum(units.tensor_cycles(each, rates, warps, code) for each in instructions if units.unit(each) == "tensor")
    return Usage(
        instructions=len(instructions),
        issue=float(len(instructions)),
        fp32=(kinds["fp32"] + kinds["imad"]) * rates.fp32,
        imad=kinds["imad"] * rates.imad,
        alu=kinds["alu"] * rates.alu,
        mufu=kinds["mufu"] * rates.mufu,
        memory=kinds["memory"] * rates.memory,
        tensor=tensor,
        shared=sum(map(units.shared_bytes, instructions)),
        moved=sum(map(units.global_bytes, instructions)),
        spilled=sum(each.name in ("LDL", "STL") for each in instructions),
        stall=sum(each.stall for each in instructions),
    )


def _amd_usage(instructions: Sequence[Instruction], rates: gcn.Rates) -> Usage:
    by_unit: defaultdict[str, float] = defaultdict(float)
    for each in instructions:
        kind = gcn.unit(each)
        if kind in ("fp32", "alu", "mufu"):
            cycles = gcn.vector_cycles(each, rates)
            by_unit[kind] += cycles
            if kind != "mufu" or rates.wave == 64:  # RDNA has lanes of their own for them
                by_unit["vector"] += cycles
        elif kind == "tensor":
            by_unit[kind] += gcn.tensor_cycles(each, rates)
        elif kind == "memory":
            by_unit[kind] += gcn.memory_cycles(each, rates)
    return Usage(
        instructions=len(instructions),
        issue=len(instructions) * rates.issue,
        fp32=by_unit["fp32"],
        alu=by_unit["vector"],
        mufu=by_unit["mufu"],
        memory=by_unit["memory"],
        tensor=by_unit["tensor"],
        shared=sum(gcn.width(each) for each in instructions if each.opcode.startswith("ds_")),
        moved=sum(gcn.width(each) for each in instructions if re.match("buffer_|global_|flat_", each.opcode)),
        spilled=sum(each.opcode.startswith("scratch_") for each in instructions),
    )


def count(function: Function, chip: str, warps: int) -> Count:
    """The loops over tiles and the rest of a kernel, for a program of as many warps."""
    code = function.instructions
    loops, products = main_loops(function, chip)
    loops = sorted(loops, key=lambda loop: len(loop.own))
    used, orders = (usage(loop.own, chip, warps, code) for loop in loops), (order(loop.own) for loop in loops)
    return Count(tuple(used), usage(function.outside, chip, warps, code), products, tuple(orders))


def main_loops(function: Function, chip: str) -> tuple[list[Loop], bool]:
    """The innermost loops over tiles, and whether they have tensor instructions: if any has, only those that do, else
    those that read memory. (One that only fills it runs instead of the others.)"""
    loops = [loop for loop in function.loops if loop.inner < SHORTEST <= len(loop.own)]
    products = [loop for loop in loops if _has_products(loop.own, chip)]
    return products or [loop for loop in loops if _reads(loop.own)], bool(products)


def _has_products(instructions: Iterable[Instruction], chip: str) -> bool:
    return any((gcn if chip in gcn.RATES else units).unit(each) == "tensor" for each in instructions)


def _reads(instructions: Iterable[Instruction]) -> bool:
    return any(re.match(r"LDG|LD$|LD\.|(global|buffer|flat)_load", each.opcode) for each in instructions)
