"""Executes a translated kernel block by block (teams.py), all threads of many programs at once.

Warp-specialized kernels run one program at a time. Kernels whose programs may wait for each other run them in turns.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes

from ptx_check import sample
from ptx_check.atomics import UFUNCS
from ptx_check.bulk_copies import BulkCopies
from ptx_check.calls import Calls
from ptx_check.code import Code, Facts
from ptx_check.faults import Fault, Unsupported
from ptx_check.matrices import Matrices
from ptx_check.mbarriers import MOST, Barriers
from ptx_check.memory import Buffer, Global, buffers
from ptx_check.operands import PARAMETER
from ptx_check.orders import Orders
from ptx_check.races import SharedRaces, Traffic
from ptx_check.shared import Copies, Local, Shared
from ptx_check.teams import Teams
from ptx_check.tensor_memory import TensorMemory
from ptx_check.undefined import Undefined
from ptx_check.warpgroup import Groups

LANES = 16384
"""Threads executed at once: registers are arrays of about 64 KB, which fit in caches."""
_RESIDENT = 64
"""Programs in flight if one may wait for another; a device runs hundreds."""
_PATIENCE = 200
"""Turns per program in flight within which one must end or change memory."""


_GUESSED = "unless it comes of what programs that were left out would have written, which this launch reads"


class Launch:
    """One launch: grid, arguments and faults. Each block of a cluster counts as a program."""

    def __init__(
        self, code: Code, grid, threads: int, shared: int, parameters, known: list[Buffer], checks=True,
        programs: int | None = None, cluster: int = 1, seed: int | None = None,
    ):  # fmt: skip
        self.code, self.grid, self.cluster = code, grid, cluster
        self.threads, self.shared, self.checks, self.seed = threads, shared, checks, seed
        self.facts: Facts = code.facts
        self.parameters, self.known = parameters, [*known, *buffers(code.tables.values())]
        self.faults: dict[tuple, Fault] = {}
        self.traffic = Traffic(self, code.facts.global_grain)
        self.run: Run | None = None
        self.changed = False
        """Whether global memory was written since the last turn."""
        total = grid[0] * grid[1] * grid[2]
        self.numbers = sample.chosen(total, None if self.facts.waiting else programs)
        """Programs to run: the sample, or all if they may wait for each other."""
        self.left_out = total - len(self.numbers)
        self.guessed = False
        """Whether the launch has read memory that skipped programs of an earlier launch may have written."""

    def execute(self) -> list[Fault]:
        """Run all chosen programs. Returns one fault per kind and instruction."""
        step = 1 if self.facts.waiting or self.facts.specialised else max(1, LANES // self.threads)
        chunks = (self.numbers[first : first + step, None] for first in range(0, len(self.numbers), step))
        sampled = self.left_out > 0 or any(buffer.unknown is not None for buffer in self.known)
        if sampled:
            for buffer in self.known:
                buffer.footprint = sample.Footprint(buffer.size)
        with np.errstate(all="ignore"), _disable_current_modes():
            self.in_turns(chunks)
            if self.checks:
                self.traffic.end()
        if sampled:
            sample.after(self.known, left_out=self.left_out > 0, guessed=self.guessed)
        return list(self.faults.values())

    def in_turns(self, chunks: Iterator[np.ndarray]) -> None:
        """Run chunks of programs sequentially, or in turns (lower numbers first) if they may wait for each other."""
        running: deque[tuple[Run, Iterator[None]]] = deque()
        turns = 0
        while True:
            while len(running) < (_RESIDENT if self.facts.waiting else 1):
                if (numbers := next(chunks, None)) is None:
                    break
                run = Run(self, numbers)
                running.append((run, run.teams.steps()))
            if not running:
                return
            self.run, steps = running.popleft()
            self.changed = False
            ended = next(steps, True) is not None
            if not ended:
                running.append((self.run, steps))
            turns = 0 if ended or self.changed else turns + 1
            if turns > _PATIENCE * len(running) and self.facts.waiting:
                raise Unsupported(f"programs of kernel {self.facts.name} wait for each other: it may never end")

    def fault(self, kind: str, index: int, message: str, other: int | None) -> None:
        location = self.code.instructions[index].location
        second = None if other is None else self.code.instructions[other].location
        if self.guessed:
            message += f" ({_GUESSED})"
        self.faults.setdefault((kind, index), Fault(kind, message, location, second))


class Run:
    """A chunk of a launch's programs."""

    def __init__(self, launch: Launch, numbers: np.ndarray) -> None:
        self.launch, self.numbers, self.checks = launch, numbers, launch.checks
        self.programs, self.width = len(numbers), launch.threads
        self.shape = (self.programs, self.width)
        u32 = np.uint32
        self.zero = np.zeros((1, 1), u32)
        self.tid = np.arange(self.width, dtype=u32)[None, :]
        self.lane, self.warp = self.tid & u32(31), self.tid >> u32(5)
        self.threads = np.arange(self.programs * self.width).reshape(self.shape)
        x, y, _ = launch.grid
        self.ctaid = [part.astype(u32) for part in (numbers % x, numbers // x % y, numbers // (x * y))]
        self.nctaid = [np.full((1, 1), n, u32) for n in launch.grid]
        self.cluster = np.full((1, 1), launch.cluster, u32)
        self.ntid = np.full((1, 1), self.width, u32)
        self.parameters = launch.parameters
        self.active: np.ndarray | None = None
        """Running threads; None: all."""
        self.alive: np.ndarray | None = None
        """Threads that have not exited; None: all."""
        self.code = self.tid.astype(np.int64)
        """(1 or programs, threads): thread code, thread | warp barriers passed << 10."""
        self.barriers = np.zeros((1, 1), dtype=np.int64)
        self.undefined = Undefined(self, launch.facts.never)
        self.memory = Global(self, launch.known)
        self.shared = Shared(self, launch.shared)
        self.local = Local(self, launch.facts.local) if launch.facts.local else None
        self.copies = Copies(self)
        self.matrices = Matrices(self)
        self.groups = Groups(self)
        self.groups_of = {0: self.groups}
        """Pending products, by first warp of the issuing team."""
        self.leader = 0
        self.tensor = TensorMemory(self, launch.facts.tensor_columns)
        self.barriers_of_memory = Barriers(self)
        self.bulk = BulkCopies(self)
        self.calls = Calls(self)
        grain, pitch = launch.facts.shared_grain, self.shared.pitch
        apart = self.checks and launch.facts.specialised
        self.orders = Orders(self, pitch, grain, MOST + 1) if apart else None
        self.races = self.orders or SharedRaces(self, pitch, grain)
        self.teams = Teams(self)
        self.traffic = launch.traffic

    def end_threads(self, threads: np.ndarray | None) -> None:
        """Record that threads (None: all) exit."""
        gone = np.ones((1, 1), dtype=bool) if threads is None else threads
        self.alive = ~gone if self.alive is None else self.alive & ~gone

    def lead(self, warp: int) -> None:
        """Switch to the team with this first warp."""
        self.leader = warp
        self.groups = self.groups_of.setdefault(warp, self.groups if warp == 0 else Groups(self))

    # ------------------------------------------------------------------------------------- what blocks call upon

    def fault(self, kind: str, index: int, message: str, other: int | None = None) -> None:
        self.launch.fault(kind, index, message, other)

    def where(self, guard) -> np.ndarray | None:
        """Running threads that pass the guard; None: all."""
        if guard is None:
            return self.active
        if self.active is not None:
            return guard & self.active
        return None if guard.all() else guard

    def rows(self, index: int) -> np.ndarray | None:
        """(programs, 1) mask of programs with running threads; None: all. Reports programs of which only some run."""
        if self.active is None:
            return None
        if self.active.shape[1] == 1:
            return self.active
        some: Any = self.active.any(1, keepdims=True)
        every: Any = (self.active | self.ended()).all(1, keepdims=True)
        if (some & ~every).any():
            self.fault("divergence", index, "not all threads of a program come here together")
        return some

    def ended(self) -> np.ndarray:
        return np.zeros((1, 1), dtype=bool) if self.alive is None else ~self.alive

    def parameter_part(self, number: int, offset: int, kind) -> np.ndarray:
        """Bytes of a parameter from an offset."""
        value = self.parameters[number]
        return value.astype(kind) if not offset else (value >> value.dtype.type(8 * offset)).astype(kind)

    def parameter(self, address) -> np.ndarray:
        """Parameter at a computed parameter address."""
        table = np.array([int(value.flat[0]) for value in self.parameters], dtype=np.uint64)
        return table.take((address // np.uint64(PARAMETER)).astype(np.int64), mode="clip")

    def own(self, index: int, address) -> np.ndarray:
        """Local-memory offsets of generic addresses. Raises Unsupported for addresses outside of local memory."""
        inside = address < np.uint64(self.launch.facts.local)
        if not (inside if self.active is None else inside | ~self.active).all():
            location = self.launch.code.instructions[index].location
            raise Unsupported("a generic address beyond a thread's own memory", location)
        return address.astype(np.uint32)

    def clock(self) -> np.ndarray:
        return np.full((1, 1), time.perf_counter_ns(), np.uint64)

    def everyone(self) -> np.ndarray:
        """(programs or 1, threads): running threads."""
        return self.spread(np.ones((1, 1), dtype=bool) if self.active is None else self.active)

    def barrier(self, index: int, number, count) -> None:
        """bar.sync of `count` threads; None: all."""
        if self.launch.facts.specialised:
            return self.teams.meet(index, int(number.flat[0]), None if count is None else int(count.flat[0]))
        arrived = self.rows(index)
        if self.checks:
            self.races.barrier(arrived)
            self.barriers = self.barriers + (1 if arrived is None else arrived.astype(np.int64))
            self.copies.remember()
            self.groups.remember()
            self.tensor.barrier(arrived)
            self.bulk.remember()
        return None

    def warp_barrier(self, index: int, members) -> None:
        self.together(index, members)
        self.warps_met(self.active if members is None else self.named(members))

    def warps_met(self, taking) -> None:
        """Record that threads (None: all) passed bar.warp.sync."""
        if self.checks:
            step = np.int64(1 << 10)
            self.races.met = True
            self.code = self.code + (step if taking is None else taking * step)

    def named(self, members) -> np.ndarray:
        """Threads whose lane is in the mask."""
        return (members >> self.lane & np.uint32(1)) != 0

    def together(self, index: int, members=None) -> None:
        """Check that exactly the threads in `members` (None: all) of each warp are here."""
        active = np.ones((1, 1), dtype=bool) if self.active is None else self.active
        if members is None and active.shape[1] == 1:
            return
        here = self.spread(active)
        if members is None:
            warps = here.reshape(len(here), -1, 32)
            wrong = warps.any(2) & ~warps.all(2)
        else:
            present = np.repeat(_ballot(here), 32, axis=1)
            wrong = here & (((members & ~present) != 0) | ~self.named(members))
        if wrong.any():
            self.fault("divergence", index, "not all threads of a warp that must be come here together")

    def spread(self, value) -> np.ndarray:
        """Broadcast over threads; programs may stay 1."""
        return value if value.shape[1] == self.width else np.broadcast_to(value, (value.shape[0], self.width))

    def shuffle(self, index: int, mode: str, value, lane, clamp: int, members=None) -> np.ndarray:
        """Shuffle: the value of another thread of the warp."""
        self.together(index, members)
        if value.shape[1] == 1:
            return value
        segment = np.uint32((clamp >> 8) & 31)
        last = (self.lane & segment) | (np.uint32(clamp & 31) & ~segment)
        lane = lane & np.uint32(31)
        if mode == "bfly":
            source = self.lane ^ lane
        elif mode == "up":
            source = (self.lane.astype(np.int64) - lane).astype(np.int64)
        elif mode == "down":
            source = self.lane + lane
        else:  # idx
            source = (lane & ~segment) | (self.lane & segment)
        source = source.astype(np.int64)
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, self.lane) + (self.warp.astype(np.int64) << 5)
        source = self.spread(source)
        self.lanes_elsewhere(index, source, members)
        if source.shape[0] == 1:
            return value.take(source[0], axis=1)
        return np.take_along_axis(np.broadcast_to(value, (self.programs, self.width)), source, 1)

    def lanes_elsewhere(self, index: int, source, members) -> None:
        """Mark results of a shuffle from lanes that are inactive or not in the mask as undefined."""
        if not self.checks or (members is None and self.active is None):
            return
        taking = np.ones((1, 1), dtype=bool) if self.active is None else self.active
        taking = self.spread(taking if members is None else taking & self.named(members))
        rows = np.broadcast_shapes(taking.shape, source.shape)
        taken = np.take_along_axis(np.broadcast_to(taking, rows), np.broadcast_to(source, rows), 1)
        missing = ~taken if self.active is None else ~taken & self.active
        if missing.any():
            self.undefined.loaded(index, (np.where(missing, np.uint32(0xFFFFFFFF), np.uint32(0)),))

    def vote(self, index: int, mode: str, value, members=None) -> np.ndarray:
        """any, all or ballot over the running threads of a warp in the mask."""
        value = self.spread(value)
        self.together(index, members)
        for taking in (self.active, None if members is None else self.named(members)):
            if taking is not None:
                value = value | ~taking if mode == "all" else value & taking
        warps = value.reshape(value.shape[0], -1, 32)
        votes = _ballot(value) if mode == "ballot" else warps.any(2) if mode == "any" else warps.all(2)
        return np.repeat(votes, 32, axis=1)

    def reduce(self, index: int, operation: str, value, members=None) -> np.ndarray:
        """redux: reduction over the threads of a warp in the mask."""
        value = self.spread(value)
        self.together(index, members)
        if members is not None or self.active is not None:
            neutral = _NEUTRAL[operation](value.dtype)
            for taking in (self.active, None if members is None else self.named(members)):
                if taking is not None:
                    value = np.where(taking, value, value.dtype.type(neutral))
        warps = _REDUCED[operation].reduce(value.reshape(len(value), -1, 32), axis=2, dtype=value.dtype)
        return np.repeat(warps, 32, axis=1)

    def elect(self, index: int, members) -> tuple[np.ndarray, np.ndarray]:
        """elect.sync: the lowest running lane of each warp, and the mask of elected threads."""
        self.together(index, members)
        here = np.ones((1, 1), dtype=bool) if self.active is None else self.active
        first = self.spread(here).reshape(len(here), -1, 32).argmax(2).astype(np.uint32)
        lanes = np.repeat(first, 32, axis=1)
        return lanes, lanes == self.lane

    def running(self) -> np.ndarray:
        """activemask: bit mask of the running lanes of each warp."""
        here = np.ones((1, 1), dtype=bool) if self.active is None else self.active
        return np.repeat(_ballot(self.spread(here)), 32, axis=1)


_NEUTRAL: dict[str, Callable] = {
    "add": lambda kind: 0, "or": lambda kind: 0, "xor": lambda kind: 0, "min": lambda kind: np.iinfo(kind).max,
    "max": lambda kind: np.iinfo(kind).min, "and": lambda kind: np.iinfo(kind).max,
    "min.f32": lambda kind: np.nan, "max.f32": lambda kind: np.nan, "minimum.f32": lambda kind: np.inf,
    "maximum.f32": lambda kind: -np.inf,
}  # fmt: skip
_REDUCED = UFUNCS | {"min.f32": np.fmin, "max.f32": np.fmax, "minimum.f32": np.minimum, "maximum.f32": np.maximum}
"""Reductions over lanes; float32 minimum and maximum with .NaN propagate NaN."""


def _ballot(value: np.ndarray) -> np.ndarray:
    """(programs, warps) bit masks of the lanes in which a predicate (programs, threads) holds."""
    warps = value.reshape(value.shape[0], -1, 32).astype(np.uint64)
    return (warps << np.arange(32, dtype=np.uint64)).sum(2).astype(np.uint32)
