"""Executes machine code for the warps of a chunk of programs; warps at the same instruction run together.

Diverged lanes of a warp reconverge because the lowest address runs first. The order of warps is a parameter (Order), so
that the extremes of a device's behaviour can be executed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_check.faults import Location, Unsupported
from ptx_check.machine_code.barriers import stored, unfinished
from ptx_check.machine_code.memory import Local, Shared, arrived
from ptx_check.machine_code.operands import F32, U32

_FAR = np.int32(1 << 30)
_MOST = 3_000_000
"""Maximum code segments executed."""
_PATIENCE = 2048
"""Segments after which other warps get a turn, because the running ones may wait for them."""


@dataclass(frozen=True, slots=True)
class Order:
    """Scheduling choices of a device: completion of asynchronous work, and order of warps."""

    copies: bool = False
    """Copies complete at their wait instead of immediately."""
    products: bool = False
    """Products complete at their wait instead of immediately."""
    first: int | None = None
    """Warps of a program run one at a time until they wait, from the first (0) or the last (-1) on; None: together."""


EARLY = Order()
ORDERS = (EARLY, Order(copies=True, first=-1), Order(products=True, first=0), Order(products=True, first=-1))
"""The extremes of a device's behaviour, for copies and for products. The last order is only for launches with
asynchronous products: a producer that runs after its consumers overwrites operands that pending products still read."""


class Warps:
    """State of the programs `numbers` (programs, 1) of a launch: registers, memory, program counters.

    Arrays have a row per warp: the first warps of all programs, then the second warps, and so on.
    """

    def __init__(self, launch: Any, numbers: np.ndarray, order: Order) -> None:
        programs, self.count_of = len(numbers), launch.threads // 32
        rows = programs * self.count_of
        self.launch, self.order = launch, order
        self.programs, self.memory = programs, launch.memory
        self.R = np.zeros((260, rows, 32), U32)
        self.P = np.zeros((8, rows, 32), bool)
        self.UR = np.zeros((66, rows, 1), U32)
        self.UP = np.zeros((8, rows, 1), bool)
        self.lane = np.arange(32, dtype=U32)[None]
        self.warp = np.repeat(np.arange(self.count_of), programs)[:, None]
        self.program = np.tile(np.arange(programs), self.count_of)[:, None]
        self.tid = (self.warp * 32 + np.arange(32)).astype(U32)
        x, y, _ = launch.grid
        of = numbers[self.program[:, 0]]
        self.ctaid = [part.astype(U32) for part in (of % x, of // x % y, of // (x * y))]
        self.shared = Shared(programs, launch.shared)
        self.local = Local(rows * 32, launch.stack)
        self.every = np.arange(rows)
        self.pcs = np.zeros((rows, 32), np.int32)
        self.alive = np.ones((rows, 32), bool)
        self.waiting = np.zeros(rows, bool)
        """Whether a warp waits at a barrier, or for a condition that is retested after a change (`asks`)."""
        self.asks = np.zeros(rows, bool)
        self.why: dict[int, str] = {}
        self.met = np.zeros((programs, 16), np.int64)
        self.needed = np.zeros((programs, 16), np.int64)
        self.barrier = np.full(rows, -1)
        self.counted = np.zeros(rows, bool)
        self.registers = np.full(rows, launch.registers)
        self.pool = np.zeros(programs, np.int64)
        self.copies: list[tuple] = []
        self.groups = np.zeros(rows, np.int64)
        """Committed copy groups of each warp."""
        self.products = np.zeros(rows, np.int64)
        """Committed product groups of each warp."""
        self.pending: list[tuple] = []
        self.sums = np.zeros((256, rows, 32), F32) if order.products and launch.asynchronous else None
        self.flying = np.zeros((256, rows), bool)
        """Warps with pending late products, by the first accumulator register; `sums` holds their accumulators."""
        self.fenced = np.zeros(rows, np.int64)
        """Time of each warp's last fence.proxy.async."""
        self.touched = np.zeros((256, rows), bool)
        """Registers of products that other instructions have written since the last wgmma.fence."""
        self.barriers: dict[tuple[int, int], Any] = {}
        self.bulk: list[Any] = []
        self.stores: list[Any] = []
        self.count = 0
        self.select(slice(None))

    # ------------------------------------------------------------------------------------------- the chosen warps

    def select(self, w: Any, m: Any = None) -> None:
        """Select the running warps and their lanes, (warps, 32) or (warps, 1)."""
        self.w, self.rows = w, self.every[w]
        self.shape = (len(self.rows), 32)
        self.m = m

    def active(self) -> Any:
        return np.ones(self.shape, bool) if self.m is None else np.broadcast_to(self.m, self.shape)

    def whole_warps(self) -> bool:
        """Whether all live lanes of the selected warps are active."""
        return bool((self.active() | ~self.alive[self.w]).all())

    def bank(self, number: int) -> np.ndarray:
        return self.launch.banks[number]

    def put(self, number: int, value: Any) -> None:
        row = self.R[number]
        if self.m is None:
            row[self.w] = value
        elif isinstance(self.w, slice):
            np.copyto(row[self.w], value, where=self.m)
        else:
            kept = row[self.w]
            np.copyto(kept, value, where=self.m)
            row[self.w] = kept
        if number in self.launch.watched:
            self.touched[number, self.w] = True

    def put_truth(self, number: int, value: Any) -> None:
        row = self.P[number]
        if self.m is None:
            row[self.w] = value
        else:
            kept = row[self.w].copy()
            np.copyto(kept, value, where=self.m)
            row[self.w] = kept

    def _uniform(self, row: Any, value: Any) -> None:
        value = np.asarray(value)
        if value.ndim == 2 and value.shape[1] != 1:
            value = value[:, :1]
        if self.m is None:
            row[self.w] = value
        else:
            kept = row[self.w].copy()
            np.copyto(kept, value, where=self.m.any(1, keepdims=True))
            row[self.w] = kept

    def put_uniform(self, number: int, value: Any) -> None:
        self._uniform(self.UR[number], value)

    def put_uniform_truth(self, number: int, value: Any) -> None:
        self._uniform(self.UP[number], value)

    def fault(self, kind: str, code: Any, message: str) -> None:
        self.launch.fault(kind, code.address, message, code.location)

    def unfenced(self, grains: Any, fenced: Any) -> bool:
        """Whether any of these 16-byte units was written after `fenced` by a warp that has passed no fence since."""
        shared = self.shared
        late = shared.written[grains] > fenced
        return bool((late & (shared.written[grains] > self.fenced[shared.writer[grains]])).any())

    def guess(self, buffer: Any, places: Any, lanes: Any, unit: int) -> None:
        """Record a read of memory that skipped programs may have written."""
        self.launch.guessed = self.launch.guessed or buffer.touches_unknown(places, lanes, unit)

    def arrive(self, rows: Any, before: Any) -> None:
        chosen = self.w, self.m
        arrived(self, rows, before)
        self.select(*chosen)
        stored(self, rows, before)

    # ------------------------------------------------------------------------------------------------------ places

    def run(self) -> None:
        """Run all programs to completion."""
        for turn in range(_MOST):
            ready = self.alive.any(1) & ~self.waiting
            if not ready.any():
                if not self.alive.any():
                    return unfinished(self)
                if not self.stuck():
                    return None
                continue
            self.choose(ready, turn)
            self.stretch()
        raise Unsupported(f"machine code of {self.launch.name} runs for {_MOST} stretches: it may never end")

    def choose(self, ready: Any, turn: int) -> None:
        """Select warps at one address, and their lanes."""
        places = np.where(self.alive & ready[:, None], self.pcs, _FAR)
        first = 0
        if self.order.first is not None:
            each = places.reshape(self.count_of, -1).min(1)
            turned = np.roll(np.arange(self.count_of)[:: self.order.first or 1], turn // _PATIENCE)
            chosen = turned[(each[turned] < _FAR).argmax()]
            first = chosen * self.programs
            places = places[first : first + self.programs]
        low = places.min()
        if turn % _PATIENCE == _PATIENCE - 1:
            low = places[places < _FAR].max()
        lanes = places == low
        here = lanes.any(1)
        self.pc = int(low)
        w: Any
        if here.all():
            w = slice(None) if len(here) == len(self.every) else slice(first, first + len(here))
        else:
            w = np.flatnonzero(here) + first
            lanes = lanes[here]
        self.select(w, None if lanes.all() else lanes)
        self.alone = bool(self.m is None and here.all() and self.order.first is None)

    def stretch(self) -> None:
        """Run instructions up to one of control flow, or to a branch target, where other warps may wait."""
        instructions, leaders = self.launch.instructions, self.launch.leaders
        pc, chosen, here = self.pc, self.w, self.m
        while True:
            if pc >= len(instructions):
                raise Unsupported(f"machine code of {self.launch.name} runs past its end")
            guard, step, control = instructions[pc]
            self.count += 1
            if control:
                self.pc = pc
                self.put_places(here, pc + 1)
                if guard is None or self.narrow(guard, here):
                    step(self)
                return
            if guard is None:
                step(self)
            else:
                if self.narrow(guard, here):
                    step(self)
                self.select(chosen, here)
            pc += 1
            if leaders[pc] and not self.alone:
                self.put_places(here, pc)
                return

    def narrow(self, guard: Any, here: Any) -> bool:
        """Restrict the selection to the lanes that pass a guard. Returns whether there are any."""
        mask = guard(self) if here is None else guard(self) & here
        some = mask.any(1)
        if not some.all():
            mask = np.broadcast_to(mask, (len(self.rows), mask.shape[1]))[some] if len(some) > 1 else mask
            self.select(self.rows[np.broadcast_to(some, len(self.rows))], mask)
        self.m = None if mask.all() else mask
        return bool(some.any())

    def put_places(self, mask: Any, places: Any) -> None:
        if mask is None:
            self.pcs[self.w] = places
        else:
            kept = self.pcs[self.w].copy()
            np.copyto(kept, places, where=mask)
            self.pcs[self.w] = kept

    def go(self, target: int, way: Any) -> None:
        """Branch the running lanes for which the condition holds."""
        mask = self.m if way is None else way if self.m is None else way & self.m
        self.put_places(mask, np.int32(target))

    def go_to_addresses(self, code: Any, addresses: Any) -> None:
        places = self.launch.places
        lanes = self.active()
        wrong = [a for a in np.unique(addresses[lanes]).tolist() if a not in places]
        if wrong:
            raise Unsupported(f"machine code: a branch to {wrong[0]:#x}, where there is no instruction", code.location)
        at = np.array([places.get(a, 0) for a in addresses.ravel().tolist()], np.int32).reshape(addresses.shape)
        self.put_places(self.m, at)

    def leave(self) -> None:
        self.alive[self.w] = self.alive[self.w] & ~self.active()
        self.changed()

    # ----------------------------------------------------------------------------------------------------- waiting

    def changed(self) -> None:
        """Wake warps that wait for a condition."""
        self.waiting[self.asks] = False
        self.asks[:] = False

    def go_on_without(self, waits: Any) -> bool:
        """Make some of the selected warps retry this instruction after a change. Returns whether others are left."""
        if waits.any():
            rows = self.rows[waits]
            self.waiting[rows] = self.asks[rows] = True
            self.put_places(waits[:, None] & self.active(), np.int32(self.pc))
            m = self.m
            self.select(self.rows[~waits], None if m is None else m[~waits])
        return len(self.rows) > 0

    def meet(self, code: Any, names: Any, counts: Any, *, waits: bool) -> None:
        """Let the selected warps arrive at barriers; waits: and wait there."""
        for name in np.unique(names).tolist():
            here = names == name
            rows = self.rows[here]
            programs = self.program[rows, 0]
            np.add.at(self.met[:, name], programs, 1)
            need = self.living()[programs] if counts is None else counts[here]
            known = self.needed[programs, name]
            if counts is not None and ((known != 0) & (known != need)).any():
                s = f"barrier {name} is entered for {need[0]} warps and for {known[known != 0][0]}"
                self.fault("divergence", code, s)
            self.needed[programs, name] = need
            if waits:
                self.waiting[rows], self.barrier[rows], self.counted[rows] = True, name, counts is not None
                for row in rows.tolist():
                    self.why[row] = f"barrier {name} at {code.address:#x}"
            self.release(name)

    def living(self) -> Any:
        """Number of live warps of each program."""
        return self.alive.any(1).reshape(self.count_of, self.programs).sum(0)

    def release(self, name: int) -> bool:
        full = (self.met[:, name] >= self.needed[:, name]) & (self.needed[:, name] > 0)
        if not full.any():
            return False
        rows = np.flatnonzero((self.barrier == name) & full[self.program[:, 0]])
        self.waiting[rows], self.barrier[rows] = False, -1
        self.met[full, name] = self.needed[full, name] = 0
        return True

    def stuck(self) -> bool:
        """Unblock warps if none can run: complete a bulk load, or release barriers that exited warps would have joined.

        Returns False, with a fault, for a deadlock.
        """
        if self.bulk:
            self.bulk.pop().arrive(self)
            return True
        left = self.living()
        for name in np.unique(self.barrier[(self.barrier >= 0) & ~self.counted]).tolist():
            self.needed[:, name] = np.where(self.met[:, name] > 0, np.minimum(self.needed[:, name], left), 0)
            if self.release(name):
                return True
        rows = np.flatnonzero(self.waiting & self.alive.any(1)).tolist()
        told = "; ".join(dict.fromkeys(f"warp {self.warp[row, 0]}: {self.why.get(row, '?')}" for row in rows))
        where = Location(self.launch.name, 0, "machine code")
        self.launch.fault("deadlock", -1, f"warps wait for what never comes: {told[:500]}", where)
        return False
