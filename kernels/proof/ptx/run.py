"""Runs a translated kernel: all threads of many programs at once, block by block, the lowest block first.

Threads that part at a branch wait in the block that they go to; the lowest waiting block runs next with all that wait
there, so that what parted comes together again where the compiler's layout joins it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fasttfm.kernels.proof.ptx.faults import Fault, Unsupported
from fasttfm.kernels.proof.ptx.matrices import Matrices
from fasttfm.kernels.proof.ptx.memory import Buffer, Global
from fasttfm.kernels.proof.ptx.parse import Kernel
from fasttfm.kernels.proof.ptx.races import SharedRaces, Traffic, grain_of
from fasttfm.kernels.proof.ptx.shared import Copies, Shared
from fasttfm.kernels.proof.ptx.translate import PARAMETER, translate
from fasttfm.kernels.proof.ptx.warpgroup import Groups

LANES = 16384
"""Threads that run at once: their registers are arrays of some 64 KB, which caches hold."""
_MOST_BLOCKS = 5_000_000


class Code:
    """A kernel, ready to run."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.functions = translate(kernel)
        self.instructions = [i for block in kernel.blocks for i in block.instructions]
        self.shared_grain = grain_of(self._widths("shared"))
        self.global_grain = grain_of(self._widths("global"))

    def _widths(self, space: str) -> list[int]:
        widths = [4]
        for i in self.instructions:
            if i.words[0] in ("ld", "st") and i.words[1].split("::")[0] == space:
                widths.append(int("".join(c for c in i.words[-1] if c.isdigit())) // 8)
        return widths


class Launch:
    """One launch: its grid, its arguments and what goes wrong."""

    def __init__(self, code: Code, grid, threads: int, shared: int, parameters, known: list[Buffer], checks=True):
        self.code, self.grid, self.threads, self.shared, self.checks = code, grid, threads, shared, checks
        self.parameters, self.known = parameters, known
        self.faults: dict[tuple, Fault] = {}
        self.traffic = Traffic(self, code.global_grain)
        self.run: Run | None = None

    def execute(self) -> list[Fault]:
        """Runs every program; what went wrong, one for each kind and instruction."""
        total = self.grid[0] * self.grid[1] * self.grid[2]
        step = max(1, LANES // self.threads)
        with np.errstate(all="ignore"):
            for first in range(0, total, step):
                self.run = Run(self, np.arange(first, min(total, first + step), dtype=np.int64)[:, None])
                self.run.execute()
            if self.checks:
                self.traffic.end()
        return list(self.faults.values())

    def fault(self, kind: str, index: int, message: str, other: int | None) -> None:
        location = self.code.instructions[index].location
        second = None if other is None else self.code.instructions[other].location
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
        self.ntid = np.full((1, 1), self.width, u32)
        self.parameters = launch.parameters
        self.active: np.ndarray | None = None
        """Which threads run; None: all."""
        self.alive: np.ndarray | None = None
        """Which have not ended; None: none has."""
        self.code = self.tid.astype(np.int64)
        """(1 or programs, threads): the thread, and warp barriers passed << 10."""
        self.barriers = np.zeros((1, 1), dtype=np.int64)
        self.memory = Global(self, launch.known)
        self.shared = Shared(self, launch.shared)
        self.copies = Copies(self)
        self.matrices = Matrices(self)
        self.groups = Groups(self)
        self.races = SharedRaces(self, self.shared.pitch, launch.code.shared_grain)
        self.traffic = launch.traffic

    # -------------------------------------------------------------------------------------------------- control

    def execute(self) -> None:
        functions = self.launch.code.functions
        registers: list = [None] * (4 + len(self.launch.code.kernel.registers))
        waiting: dict[int, np.ndarray | None] = {0: None}
        for _ in range(_MOST_BLOCKS):
            block = min(waiting)
            mask = waiting.pop(block)
            if block >= len(functions):
                break
            merge = mask if waiting else None
            self.active = mask if mask is not None else self.alive
            end = functions[block](self, registers, merge)
            if isinstance(end, int):
                self.enter(waiting, end, mask)
            else:
                self.branch(waiting, mask, *end)
            if not waiting:
                break
        else:
            raise Unsupported(f"kernel {self.launch.code.kernel.name} runs for {_MOST_BLOCKS} blocks: it may never end")
        if self.checks:
            self.races.barrier(None)

    def branch(self, waiting, mask, taken, target: int, following: int) -> None:
        if taken.size == 1 or taken.all() or not taken.any():
            return self.enter(waiting, target if taken.flat[0] else following, mask)
        if taken.shape[1] != 1:
            same = taken[:, :1]
            if (taken == same).all():
                taken = same
        live = self.active
        for destination, part in ((target, taken), (following, ~taken)):
            part = part if live is None else part & live
            if part.any():
                self.enter(waiting, destination, part)
        return None

    def enter(self, waiting, block: int, mask) -> None:
        """Threads (None: all) wait in a block with those that wait there already; they end where its number is -1."""
        if block >= 0:
            others = waiting.get(block)
            waiting[block] = mask if mask is None or others is None else others | mask
        elif mask is not None:
            self.alive = ~mask if self.alive is None else self.alive & ~mask

    # ------------------------------------------------------------------------------------- what blocks call upon

    def fault(self, kind: str, index: int, message: str, other: int | None = None) -> None:
        self.launch.fault(kind, index, message, other)

    def where(self, guard) -> np.ndarray | None:
        """The threads that run and pass the guard; None: all of them."""
        if guard is None:
            return self.active
        if self.active is not None:
            return guard & self.active
        return None if guard.all() else guard

    def rows(self, index: int) -> np.ndarray | None:
        """(programs, 1): the programs that run, all their living threads together; None: all."""
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

    def parameter(self, address) -> np.ndarray:
        """What lies at an address that the kernel computed of its parameters."""
        table = np.array([int(value.flat[0]) for value in self.parameters], dtype=np.uint64)
        return table.take((address // np.uint64(PARAMETER)).astype(np.int64), mode="clip")

    def barrier(self, index: int, name) -> None:
        arrived = self.rows(index)
        if self.checks:
            self.races.barrier(arrived)
            self.barriers = self.barriers + (1 if arrived is None else arrived.astype(np.int64))
            self.copies.remember()
            self.groups.remember()

    def warp_barrier(self, index: int) -> None:
        self.together(index)
        if self.checks:
            step = np.int64(1 << 10)
            self.races.met = True
            self.code = self.code + (step if self.active is None else self.active * step)

    def together(self, index: int) -> None:
        """The threads of a warp must be here together."""
        if self.active is not None and self.active.shape[1] != 1:
            warps = self.active.reshape(self.active.shape[0], -1, 32)
            if (warps.any(2) & ~warps.all(2)).any():
                self.fault("divergence", index, "not all threads of a warp come here together")

    def spread(self, value) -> np.ndarray:
        """With all threads, though perhaps for one program only."""
        return value if value.shape[1] == self.width else np.broadcast_to(value, (value.shape[0], self.width))

    def shuffle(self, index: int, mode: str, value, lane, clamp: int) -> np.ndarray:
        """The value of another thread of the warp."""
        self.together(index)
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
        elif mode == "idx":
            source = (lane & ~segment) | (self.lane & segment)
        else:
            raise Unsupported(f"shfl of mode {mode}", self.launch.code.instructions[index].location)
        source = source.astype(np.int64)
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, self.lane) + (self.warp.astype(np.int64) << 5)
        source = self.spread(source)
        if source.shape[0] == 1:
            return value.take(source[0], axis=1)
        return np.take_along_axis(np.broadcast_to(value, (self.programs, self.width)), source, 1)

    def vote(self, index: int, mode: str, value) -> np.ndarray:
        """any, all or ballot over the running threads of a warp."""
        value = self.spread(value)
        if self.active is not None:
            value = value | ~self.active if mode == "all" else value & self.active
        warps = value.reshape(value.shape[0], -1, 32)
        if mode in ("any", "all"):
            votes = warps.any(2) if mode == "any" else warps.all(2)
        elif mode == "ballot":
            votes = (warps.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(2).astype(np.uint32)
        else:
            raise Unsupported(f"vote of mode {mode}", self.launch.code.instructions[index].location)
        return np.repeat(votes, 32, axis=1)


def parameters_of(kernel: Kernel, values: Sequence[int | float]) -> list[np.ndarray]:
    """Launch arguments as the bits that ld.param reads."""
    made = []
    for (_, kind), value in zip(kernel.parameters, values, strict=True):
        bits = int("".join(c for c in kind if c.isdigit()))
        if kind[0] == "f":
            real = np.full((1, 1), value, {16: np.float16, 32: np.float32, 64: np.float64}[bits])
            made.append(real.view({16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]))
        else:
            kept = int(value) & ((1 << bits) - 1)
            made.append(np.full((1, 1), kept, {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]))
    return made
