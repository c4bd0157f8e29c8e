"""Launch of a cubin: decoded instructions, arguments, faults.

Every program runs in each of ORDERS, which complete products and copies immediately or at their wait, and run warps
together or one by one. Results that differ between orders would be nondeterministic on a device.
"""

from typing import Any

import numpy as np

from ptx_check import sample
from ptx_check.faults import Fault, Location
from ptx_check.ledger import sass
from ptx_check.machine_code import barriers, control, cubin, floats, integers, memory, moves, products
from ptx_check.machine_code.operands import Code, operand, predicate, split
from ptx_check.machine_code.run import ORDERS, Order, Warps
from ptx_check.memory import Buffer

LANES = 4096
"""Threads executed at once."""
MEANINGS = {
    **integers.MEANINGS, **floats.MEANINGS, **moves.MEANINGS, **memory.MEANINGS, **products.MEANINGS,
    **barriers.MEANINGS, **barriers.CONTROL, **control.MEANINGS, **control.CONTROL,
}  # fmt: skip


def _read(of: cubin.Cubin) -> list[Code]:
    """Decode the instructions of a cubin."""
    (function,) = [each for each in sass.parse(of.text) if each.name == of.name]
    places = {each.address: place for place, each in enumerate(function.instructions)}
    made = []
    for each in function.instructions:
        target = each.target
        if each.name == "CALL":
            target = function.labels.get(each.operands.strip("`()"))
        of_operands = [operand(part) for part in split(each.operands)]
        place = None if target is None else places[target]
        made.append(Code(of.name, each.address, each.opcode, of_operands, each.guard, place))
    return made


class Launch:
    def __init__(
        self, of: cubin.Cubin, grid: tuple[int, int, int], threads: int, shared: int, values: list[bytes],
        known: list[Buffer], programs: int | None = None, *, registers: int = 255,
    ) -> None:  # fmt: skip
        self.name, self.grid, self.threads, self.shared = of.name, grid, threads, shared
        self.registers, self.stack, self.first = registers, cubin.stack_of(of), of.first
        self.banks = {0: cubin.constants(of, values, (threads, 1, 1), grid)}
        self.banks |= {number: np.frombuffer(table, np.uint8) for number, table in of.tables.items()}
        codes = _read(of)
        self.places = {code.address: place for place, code in enumerate(codes)}
        self.instructions = [self._meaning(code) for code in codes]
        self.leaders = [False] * (len(codes) + 1)
        for code in codes:
            if code.target is not None:
                self.leaders[code.target] = True
        self.watched: set[int] = set()
        self.asynchronous = False
        for code in codes:
            if code.name == "HGMMA":
                self.asynchronous = True
                self.watched |= products.registers_of(code)
            if code.name in ("RET", "BRX"):
                self.leaders = [True] * (len(codes) + 1)
        self.known, self.memory = known, memory.Global(known)
        self.faults: dict[tuple, Fault] = {}
        self.numbers = sample.chosen(grid[0] * grid[1] * grid[2], programs)
        self.left_out = grid[0] * grid[1] * grid[2] - len(self.numbers)
        self.guessed = False

    def _meaning(self, code: Code) -> tuple[Any, Any, bool]:
        meaning = MEANINGS.get(code.name)
        guard = predicate(operand(code.guard.removeprefix("@")), code) if code.guard else None
        if meaning is None:
            raise code.unknown()
        return guard, meaning(code), code.name in control.CONTROL or code.name in barriers.CONTROL

    def fault(self, kind: str, address: int, message: str, location: Location) -> None:
        self.faults.setdefault((kind, address), Fault(kind, message, location))

    def execute(self, orders: tuple[Order, ...] = ORDERS) -> list[Fault]:
        """Run every program in each order, from the same initial memory; memory keeps the results of the last order."""
        orders = orders if self.asynchronous else orders[: len(ORDERS) - 1]
        sampled = self.left_out > 0 or any(buffer.unknown is not None for buffer in self.known)
        self.memory.before = [buffer.bytes.copy() for buffer in self.known] if len(orders) > 1 else []
        first: list[np.ndarray] = []
        differing = False
        with np.errstate(all="ignore"):
            for position, order in enumerate(orders):
                if position:
                    for buffer, old in zip(self.known, self.memory.before):
                        buffer.bytes[:] = old
                if sampled:
                    for buffer in self.known:
                        buffer.footprint = sample.Footprint(buffer.size)
                self._run(order)
                first = first or [buffer.bytes.copy() for buffer in self.known]
                differing |= any((buffer.bytes != one).any() for buffer, one in zip(self.known, first))
        if differing:
            message = "results depend on when products and copies are complete, or on which warp goes first"
            self.fault("order", -1, message, Location(self.name, 0, "machine code"))
        if sampled:
            sample.after(self.known, left_out=self.left_out > 0, guessed=self.guessed)
        return list(self.faults.values())

    def _run(self, order: Order) -> None:
        step = max(1, LANES // self.threads)
        for first in range(0, len(self.numbers), step):
            Warps(self, self.numbers[first : first + step, None], order).run()
