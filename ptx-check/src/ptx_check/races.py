"""Race detection: unordered conflicting accesses by two threads.

Within a program only barriers order accesses, and bar.warp.sync those of a warp's threads. Programs are unordered,
except by atomic operations (atomics.py).
Accesses are recorded per instruction, not per byte, and compared per barrier interval: for shared memory at each
barrier, for global memory at each store and at the end of the launch. Stores of equal values by one instruction are how
a compiler broadcasts a value, not a race.
"""

from collections.abc import Iterator

import numpy as np

from ptx_check.atomics import Clocks
from ptx_check.memory import WORDS, Buffer, spread

_THREAD, _WARP, _EPOCH = 0x3FF, 0x3E0, 10
COLLECTIVE = 1 << 30
"""Pseudo-thread that stands for the matrix instructions that read shared memory."""
COLLECTIVE_CODE, WRITING, READING = (np.full((1, 1), COLLECTIVE | number, np.int64) for number in range(3))
"""Pseudo-threads of products, copies into shared memory and copies out of it."""


def conflicting(one, other):
    """Mask of code pairs (thread, warp barriers passed << 10) of unordered threads."""
    differ = one ^ other
    warp = (differ & ~np.int64(_THREAD) & np.int64(COLLECTIVE)) | (differ & _WARP)
    return ((differ & (_THREAD | COLLECTIVE)) != 0) & ((warp != 0) | ((differ >> _EPOCH) == 0))


class SharedRaces:
    """Race detector for the shared memory of a chunk of programs, since their last barrier."""

    def __init__(self, run, size: int, grain: int) -> None:
        self.run, self.grain = run, grain
        self.shift = grain.bit_length() - 1
        self.writers = np.zeros((run.programs, -(-size // grain // 16) * 16 + 16), dtype=np.int64)
        self.events: list[tuple] = []
        self.written = self.exchanged = False
        self.met = False
        """Whether any bar.warp.sync was executed since the last barrier."""

    def read(self, index, address, mask, width, code=None) -> None:
        self.events.append(("read", index, address, mask, width, self.run.code if code is None else code))

    def write(self, index, address, mask, width, code=None) -> None:
        self.events.append(("write", index, address, mask, width, self.run.code if code is None else code))
        self.written = True

    def product(self, index, address, mask, width, group) -> None:
        self.read(index, address, mask, width, COLLECTIVE_CODE)

    def copying(self, index, address, mask, width, *arrival) -> None:
        self.write(index, address, mask, width, WRITING)

    def storing(self, index, address, mask, width, *group) -> None:
        self.read(index, address, mask, width, READING)

    def exchange(self, index, address, mask, width) -> None:
        """Record an atomic operation, which is ordered with other atomic operations only."""
        self.events.append(("exchange", index, address, mask, width, self.run.code))
        self.exchanged = True

    def barrier(self, arrived: np.ndarray | None) -> None:
        """Compare and clear the accesses of programs that have arrived at a barrier (None: all)."""
        if self.written or self.exchanged:
            self.compare(arrived)
        self.events = [] if arrived is None else list(_without(self.events, arrived))
        self.written = any(event[0] == "write" for event in self.events)
        self.exchanged = any(event[0] == "exchange" for event in self.events)
        self.met = self.met and bool(self.events)

    def forget(self, code) -> bool:
        """Compare the accesses so far and drop those with this code; pending ones must be recorded again."""
        if self.written or self.exchanged:
            self.compare(None)
        self.events = [event for event in self.events if event[5] is not code]
        return True

    def compare(self, arrived) -> None:
        events = meeting(self.events)
        lone = arrived is None and all(
            a.shape[0] == 1 and (m is None or m.shape[0] == 1) and c.shape[0] == 1 for _, _, a, m, _, c in events
        )  # accesses that are the same in all programs are compared for one program
        rows = 1 if lone else self.run.programs
        table = self.writers[:rows].reshape(-1)
        if self.met:  # after bar.warp.sync a warp's later write may hide an earlier one: also compare in program order
            _clear(self.follow(table, arrived, rows, events))  # cleared: a write must not be compared with itself
        touched = self.follow(table, arrived, rows, [event for event in events if event[0] == "write"])
        _clear(self.follow(table, arrived, rows, [event for event in events if event[0] != "write"], touched))
        if self.exchanged:
            atomic = [event for event in events if event[0] == "exchange"]
            touched = self.follow(table, arrived, rows, [("written", *event[1:]) for event in atomic])
            _clear(self.follow(table, arrived, rows, [event for event in events if event[0] == "read"], touched))

    def follow(self, table, arrived, rows, events, touched=None) -> list[tuple]:
        """Compare each access with the table and record writers in it. Returns the recorded positions."""
        touched = [] if touched is None else touched
        for kind, index, address, mask, width, code in events:
            words, slots, codes = self.cells(table, address, mask, width, code, arrived, rows)
            before = words.take(slots, axis=0)
            if before.any() and kind != "written":
                what = "written and read" if kind == "read" else "written twice"
                self.judge(index, before, slots, codes, touched, what)
            if kind in ("write", "written"):
                words[slots] = codes + 1
                touched.append((words, slots, index))
        return touched

    def cells(self, table, address, mask, width, code, arrived, rows):
        """The table at the accesses' word size, their positions in it, and their thread codes."""
        if arrived is not None:
            mask = arrived if mask is None else mask & arrived
        span = max(1, width // self.grain)
        words = table.reshape(-1, span)
        shift = max(self.shift, width.bit_length() - 1)
        slots = (address >> np.uint32(shift)).astype(np.int64)
        np.minimum(slots, self.writers.shape[1] // span - 1, out=slots)
        if rows > 1:
            slots = slots + np.arange(rows, dtype=np.int64)[:, None] * (self.writers.shape[1] // span)
        if mask is not None:
            parts = (slots, code, mask)
            shape = (max(part.shape[0] for part in parts), max(part.shape[1] for part in parts))
            chosen = spread(mask, shape)
            slots, code = spread(slots, shape)[chosen], spread(code, shape)[chosen]
        elif code.shape[1] != slots.shape[1]:
            slots, code = np.broadcast_arrays(slots, code)
        return words, slots, code[..., None]

    def judge(self, index, before, slots, codes, touched, what) -> None:
        wrong = (before != 0) & conflicting(before - 1, codes)
        if wrong.any():
            whole = np.broadcast_to(slots[..., None], wrong.shape) * before.shape[-1] + np.arange(before.shape[-1])
            self.report(index, whole[wrong], touched, what)

    def report(self, index, slots, touched, what) -> None:
        others = (i for w, p, i in reversed(touched) if np.isin(slots[:1] // w.shape[1], p).any())
        other = next(others, None)
        byte = int(slots[0]) % self.writers.shape[1] * self.grain
        self.run.fault("race", index, f"shared memory at byte {byte} is {what} with no barrier between", other)


def meeting(events: list[tuple]) -> list[tuple]:
    """Accesses whose byte ranges overlap, in groups of which at least one writes."""
    spans = [(int(e[2].min()), int(e[2].max()) + e[4], position) for position, e in enumerate(events)]
    kept: list[int] = []
    near: list[int] = []
    end = -1
    for low, high, position in [*sorted(spans), (1 << 60, 0, -1)]:
        if low >= end:
            if len(near) > 1 and any(events[n][0] != "read" for n in near):
                kept += near
            near = []
        near.append(position)
        end = max(end, high)
    return [events[n] for n in sorted(kept)]


def _clear(touched) -> None:
    for words, slots, _ in touched:
        words[slots] = 0


def _without(accesses, arrived) -> Iterator[tuple]:
    for kind, index, address, mask, width, code in accesses:
        rest = ~arrived if mask is None else mask & ~arrived
        if rest.any():
            yield kind, index, address, rest, width, code


_PROGRAM, _BARRIERS = 41, 20
_HELD = 1 << 24
_SEVERAL = np.int64(((1 << 22) - 1) << _PROGRAM)


class Traffic:
    """Race detector for global memory of a launch: last writers and readers of each address."""

    def __init__(self, launch, grain: int) -> None:
        self.launch, self.grain = launch, grain
        self.writers: dict[int, np.ndarray] = {}
        self.instructions: dict[int, np.ndarray] = {}
        self.added: dict[int, np.ndarray] = {}
        """Program that used atomics at each address; _SEVERAL: more than one."""
        self.atomic: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        """Atomic operations on a buffer: addresses and threads; bounded in number."""
        self.held_atomic = 0
        self.clocks = Clocks(launch.grid[0] * launch.grid[1] * launch.grid[2])
        self.reads: list[tuple] = []
        self.held = 0
        self.made: tuple | None = None
        """Key and result of the last codes()."""

    def codes(self, run) -> np.ndarray:
        """(programs, threads): program, barriers passed, warp barriers passed, thread; never 0."""
        made = self.made
        if made is None or made[0] is not run or made[1] is not run.barriers or made[2] is not run.code:
            codes = ((run.numbers + 1) << _PROGRAM) | (run.barriers << _BARRIERS) | run.code
            made = self.made = run, run.barriers, run.code, codes
        return made[3]

    def read(self, index, buffer: Buffer, offsets, mask, width) -> None:
        run = self.launch.run
        entry = (index, buffer, offsets, mask, width, self.codes(run), run.shape)
        if buffer.base in self.writers:
            self.check_read(entry)
        self.reads.append(entry)
        self.held += offsets.size
        if self.held > _HELD:
            self.end()

    def check_read(self, entry, *, late: bool = False) -> None:
        index, buffer, offsets, mask, width, codes, shape = entry
        tables = [t[buffer.base] for t in (self.writers, self.added) if buffer.base in t]
        if not tables:
            return
        offsets, codes = spread(offsets, shape), spread(codes, shape)
        if mask is not None:
            chosen = spread(mask, shape)
            offsets, codes = offsets[chosen], codes[chosen]
        first = (offsets.ravel() // np.uint64(self.grain)).view(np.int64)
        codes = codes.ravel()
        for step in range(max(1, width // self.grain)):
            for table in tables:
                slots = np.minimum(first + step, len(table) - 1)
                before = table[slots]
                written = before != 0
                if not written.any():
                    continue
                others, kind = self.unordered(before, codes, late=late)
                wrong = self.untold(buffer, slots, before, codes, written & others)
                if wrong.any():
                    self.report(index, buffer, slots, before, codes, wrong, kind, late)

    def unordered(self, before, codes, *, late: bool = False):
        """Return masks of unordered pairs, and of unordered pairs in different programs.

        late: the access of `codes` may be the earlier one.
        """
        foreign = (before >> _PROGRAM) != (codes >> _PROGRAM)
        if foreign.any():
            told = self.told(before, codes)
            foreign = foreign & ~(told | self.told(codes, before) if late else told)
        low = np.int64((1 << _BARRIERS) - 1)
        same_stretch = ((before ^ codes) >> _BARRIERS) == 0
        return foreign | (same_stretch & conflicting(before & low, codes & low)), foreign

    def told(self, before, codes) -> np.ndarray:
        """Mask of pairs that are ordered by atomic operations between programs."""
        stretch = (before >> _BARRIERS) & ((1 << (_PROGRAM - _BARRIERS)) - 1)
        later = np.where(codes >= _SEVERAL, 0, (codes >> _PROGRAM) - 1)
        return self.clocks.ordered((before >> _PROGRAM) - 1, stretch, before & _THREAD, later) & (codes < _SEVERAL)

    def untold(self, buffer, slots, before, codes, wrong) -> np.ndarray:
        """Remove plain accesses that are ordered after all atomic operations at their address from a mask of races."""
        several = wrong & (before == _SEVERAL)
        if self.clocks.known is not None and several.any():
            for lane in np.flatnonzero(several).tolist():
                program = (int(codes[lane]) >> _PROGRAM) - 1
                place = int(slots[lane])
                if self.clocks.all_told(buffer.base, place, program) or self.all_ordered(buffer, place, codes[lane]):
                    wrong[lane] = False
        return wrong

    def all_ordered(self, buffer, place: int, code) -> bool:
        """Whether all atomics at an address happened before a thread's current access."""
        if self.held_atomic > _HELD:
            return False
        for slots, codes in self.atomic[buffer.base]:
            before = codes[slots == place]
            if before.size and self.unordered(before, np.full(before.shape, code))[0].any():
                return False
        return True

    def report(self, index, buffer, slots, before, codes, wrong, foreign, late) -> None:
        run = self.launch.run
        kind = "programs" if (foreign & wrong).any() else "race"
        cell = int(slots[wrong][0])
        other = int(self.instructions[buffer.base][cell])
        if late and kind == "race":
            pairs = set(zip(slots.tolist(), codes.tolist()))
            low = np.int64((1 << _BARRIERS) - 1)
            touching = zip(slots[wrong].tolist(), before[wrong].tolist(), codes[wrong].tolist())
            if all((cell, (code & ~low) | (writer & low)) in pairs for cell, writer, code in touching):
                kind = "redundant"  # the writing thread has also read the value; the others have unused copies of it
        byte = cell * self.grain
        run.fault(kind, index, f"global memory ({buffer.size} bytes) at byte {byte} is written and read", other)

    def write(self, index, buffer: Buffer, offsets, threads, width) -> None:
        run = self.launch.run
        table = self.table(self.writers, buffer)
        codes = spread(self.codes(run), run.shape).reshape(-1)[threads]
        first = (offsets // np.uint64(self.grain)).view(np.int64)
        for step in range(max(1, width // self.grain)):
            slots = first + step
            self.compare(index, buffer, table, slots, codes)
            self.compare(index, buffer, self.added.get(buffer.base), slots, codes)
            table[slots] = codes
            after = table[slots]
            if (after != codes).any():  # several threads store here; only those of one program may (equal values)
                foreign = ((after ^ codes) >> _PROGRAM) != 0
                if foreign.any():
                    self.report(index, buffer, slots, after, codes, foreign, foreign, False)
            self.instructions[buffer.base][slots] = index

    def accumulate(self, index, buffer: Buffer, offsets, threads, width, orders) -> None:
        """Compare atomics with other accesses; they are ordered with each other only."""
        run = self.launch.run
        table = self.table(self.added, buffer)
        codes = spread(self.codes(run), run.shape).reshape(-1)[threads]
        first = (offsets // np.uint64(self.grain)).view(np.int64)
        for step in range(max(1, width // self.grain)):
            slots = first + step
            self.compare(index, buffer, self.writers.get(buffer.base), slots, codes)
            self.held_atomic += slots.size
            if self.held_atomic <= _HELD:
                self.atomic.setdefault(buffer.base, []).append((slots, codes))
            before = table[slots]
            table[slots] = np.where((before != 0) & ((before >> _PROGRAM) != (codes >> _PROGRAM)), _SEVERAL, codes)
            foreign = (table[slots] >> _PROGRAM) != (codes >> _PROGRAM)
            table[slots[foreign]] = _SEVERAL
            self.instructions[buffer.base][slots] = index
        programs = (codes >> _PROGRAM) - 1
        stretches = (codes >> _BARRIERS) & ((1 << (_PROGRAM - _BARRIERS)) - 1)
        self.clocks.exchange(buffer.base, first, programs, codes & _THREAD, stretches, *orders)

    def table(self, tables: dict[int, np.ndarray], buffer: Buffer) -> np.ndarray:
        if buffer.base not in tables:
            cells = -(-len(buffer.bytes) // self.grain)
            tables[buffer.base] = np.zeros(cells, dtype=np.int64)
            self.instructions.setdefault(buffer.base, np.zeros(cells, dtype=np.int32))
        return tables[buffer.base]

    def compare(self, index, buffer, table, slots, codes) -> None:
        """Compare with a table's entries, if there is a table."""
        if table is None or not (before := table[slots]).any():
            return
        others, foreign = self.unordered(before, codes)
        wrong = self.untold(buffer, slots, before, codes, (before != 0) & others)
        if wrong.any():
            self.report(index, buffer, slots, before, codes, wrong, foreign, False)

    def end(self) -> None:
        """Compare reads with later writes."""
        for entry in self.reads:
            self.check_read(entry, late=True)
        self.reads, self.held = [], 0


def grain_of(widths) -> int:
    """Bytes per table entry: the narrowest access."""
    return min((w for w in widths if w in WORDS), default=4)
