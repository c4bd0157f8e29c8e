"""Cycles that instructions take on each unit, and the lower bound set by the busiest unit."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ptx_check.ledger import gcn, units
from ptx_check.ledger.code import Function, Instruction, Loop
from ptx_check.ledger.order import order

SHORTEST = 24
"""Fewest instructions of a loop over tiles; shorter loops spin on a barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cycles of one scheduler, by unit, for a list of instructions that one warp executes once."""

    instructions: int = 0
    issue: float = 0.0
    """Issue slots: one per instruction; on AMD chips Rates.issue cycles each."""
    fp32: float = 0.0
    """Float additions and multiplications; on NVIDIA chips also IMAD, which shares their lanes."""
    imad: float = 0.0
    """IMAD alone, on the lanes that support it."""
    alu: float = 0.0
    """Integer and logic instructions; on AMD chips all vector instructions, because they share their lanes."""
    mufu: float = 0.0
    memory: float = 0.0
    """Load/store unit: by instruction; on AMD chips by width."""
    tensor: float = 0.0
    shared: int = 0
    """Bytes of shared memory accessed per thread. Not part of the bound."""
    moved: int = 0
    """Bytes of global memory accessed per thread."""
    spilled: int = 0
    """Instructions that store or reload spilled registers."""
    stall: int = 0
    """Cycles that a single warp stalls between instructions by the control codes, memory latency excluded. Not part of
    the bound, because other warps fill the stalls. 0 on AMD chips."""

    @property
    def columns(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in units.UNITS}

    @property
    def bound(self) -> float:
        """Lower bound: the cycles of the busiest unit."""
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
    """Usage of one kernel: its loops over tiles, and the code outside of loops."""

    loops: tuple[Usage, ...]
    """Loops over tiles, lightest first. If an attention kernel has two, one of them handles the tiles that the mask's
    borders cross."""
    outside: Usage
    """Code outside of loops: before, between and after them."""
    products: bool
    """Whether the loops have tensor instructions. If so they are taken as alternatives, else as consecutive; the loops
    of a warp-specialized kernel's consumers are alternatives too."""
    orders: tuple[str, ...] = ()
    """Order of the asynchronous products of each loop (order.py); empty for a loop without them."""

    @property
    def main(self) -> Usage:
        """Usage that sets the kernel's bound: the lightest loop with products, else all loops, else the whole code."""
        if not self.loops:
            return self.outside
        return self.loops[0] if self.products else sum(self.loops[1:], self.loops[0])


def usage(instructions: Sequence[Instruction], chip: str, warps: int, code: Sequence[Instruction] = ()) -> Usage:
    """Return the usage of instructions.

    warps: per program. code: the whole function, in which the shape of a tcgen05 product is looked up.
    """
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
            if kind != "mufu" or rates.wave == 64:  # RDNA has separate lanes for transcendentals
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
    """Count a kernel's loops over tiles and its other code; warps: per program."""
    code = function.instructions
    loops, products = main_loops(function, chip)
    loops = sorted(loops, key=lambda loop: len(loop.own))
    used, orders = (usage(loop.own, chip, warps, code) for loop in loops), (order(loop.own) for loop in loops)
    return Count(tuple(used), usage(function.outside, chip, warps, code), products, tuple(orders))


def main_loops(function: Function, chip: str) -> tuple[list[Loop], bool]:
    """Return the innermost loops over tiles, and whether they have tensor instructions.

    If some have tensor instructions, only those are returned; else those that load global memory. (A loop that only
    stores, such as one that fills with zeros, runs in place of the others.)
    """
    loops = [loop for loop in function.loops if loop.inner < SHORTEST <= len(loop.own)]
    products = [loop for loop in loops if _has_products(loop.own, chip)]
    return products or [loop for loop in loops if _reads(loop.own)], bool(products)


def _has_products(instructions: Iterable[Instruction], chip: str) -> bool:
    return any((gcn if chip in gcn.RATES else units).unit(each) == "tensor" for each in instructions)


def _reads(instructions: Iterable[Instruction]) -> bool:
    return any(re.match(r"LDG|LD$|LD\.|(global|buffer|flat)_load", each.opcode) for each in instructions)
