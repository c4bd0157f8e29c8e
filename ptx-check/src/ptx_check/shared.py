"""Shared memory of a running chunk of programs: loads, stores, and asynchronous copies into it.

Every byte has marks of undefined bits (undefined.py). The bytes of a copy arrive at the wait for its group; until then
its destination counts as unwritten, so that early reads are detected.
Source: NVIDIA, "PTX ISA", chapter 9.7.9.25 (asynchronous copies) and 8.10 (proxies).
"""

from typing import NamedTuple

import numpy as np

from ptx_check.allocations import POISON
from ptx_check.atomics import TYPES, take_turns
from ptx_check.faults import Unsupported
from ptx_check.memory import WORDS, join, split, spread, stored_alike


class Shared:
    name = "shared memory"

    def __init__(self, run, size: int) -> None:
        self.run, self.size = run, size
        self.pitch = -(-max(size, 16) // 16) * 16
        self.flat = _views(np.full(run.programs * (self.pitch // 4), POISON[4], dtype=np.uint32))
        self.marks = _views(np.full(run.programs * (self.pitch // 4 if run.checks else 4), 0xFFFFFFFF, dtype=np.uint32))
        """Memory and undefined bits, viewed as words of every width."""
        proxies = run.checks and run.launch.facts.asynchronous and not run.launch.facts.specialised
        self.proxies = Proxies(run, self.pitch) if proxies else None
        self.rows = {width: np.arange(run.programs, dtype=np.int64)[:, None] * (self.pitch // width) for width in WORDS}

    def positions(self, index, address, mask, width) -> np.ndarray:
        """Positions of words of `width` bytes in their program's row; out-of-bounds ones are reported and clamped."""
        shift = np.uint32(width.bit_length() - 1)
        turned = address if width == 1 else (address >> shift) | (address << (np.uint32(32) - shift))
        last = np.uint32(max(self.size - width, 0)) >> shift
        wrong = turned > last  # out of bounds, or misaligned: the rotation made its lowest bits the highest
        if wrong.any() or self.size < width:
            self.complain(index, address, mask, width)
            turned = np.minimum(address >> shift, last)
        return turned.astype(np.int64)

    def complain(self, index, address, mask, width) -> None:
        lanes = np.ones((1, 1), dtype=bool) if mask is None else mask
        if (((address & np.uint32(width - 1)) != 0) & lanes).any():
            self.run.fault("alignment", index, f"an address in {self.name} that {width} bytes do not divide")
        if ((address.astype(np.int64) + width > self.size) & lanes).any():
            self.run.fault("bounds", index, f"{width} bytes outside of {self.size} bytes of {self.name}")

    def load(self, index, address, guard, size, count, kept):
        mask, width = self.run.where(guard), size * count
        positions = self.positions(index, address, mask, width) + self.rows[width]
        if self.run.checks:
            self.note("read", index, address, mask, width)
            marks = self.unwritten(positions, width, mask)
            if marks is not None:
                self.run.undefined.loaded(index, split(marks, size, count))
        parts = split(self.flat[width].take(positions), size, count)
        if mask is None or not kept:
            return parts
        return tuple(np.where(mask, part, old) for part, old in zip(parts, kept))

    def fence(self) -> None:
        """Execute fence.proxy.async."""
        for each in (self.proxies, self.run.orders):
            if each is not None:
                each.fence()

    def note(self, kind: str, *access) -> None:
        """Record accesses for race detection."""
        getattr(self.run.races, kind)(*access)

    def unwritten(self, positions, width, mask) -> np.ndarray | None:
        """Marks of words read by threads in the mask; None if there are none."""
        marks, words = self.marks[width].take(positions), WORDS[min(width, 8)]
        if not marks.view(words).any():
            return None
        if mask is not None:
            shape = np.broadcast_shapes(marks.shape, mask.shape)
            marks = np.where(spread(mask, shape), spread(marks, shape), marks.dtype.type(0))
        return marks if marks.view(words).any() else None

    def store(self, index, address, guard, size, values, marks=None) -> None:
        mask, width = self.run.where(guard), size * len(values)
        shape = self.run.shape
        unknown = None if marks is None else join(marks, shape, size)
        self.put(index, address, mask, join(values, shape, size), width, marks=unknown, size=size)

    def exchange(self, index, address, guard, form: tuple[str, str], orders, value, compared, wanted: bool):
        """Execute an atomic operation. Returns the old values if used."""
        run, size = self.run, np.dtype(TYPES[form[1]]).itemsize
        mask, shape = run.where(guard), run.shape
        data = [spread(each, shape) for each in (run.threads, value, *([] if compared is None else [compared]))]
        positions, threads, given, *other = self.chosen(index, address, mask, size, *data)
        result = np.zeros(shape, WORDS[size])
        if run.checks:
            if self.marks[size][positions].any():
                run.fault("unwritten", index, "an atomic operation on shared memory that nobody wrote")
            self.note("exchange", index, address, mask, size)
        found = take_turns(self.flat[size], positions, *form, given, *other, wanted=wanted)
        if wanted:
            result.reshape(-1)[threads] = found.view(WORDS[size])
        return result

    def chosen(self, index, address, mask, width, *data) -> list[np.ndarray]:
        """Word positions and data of the threads in the mask."""
        shape = data[0].shape if data else self.run.shape
        places = spread(self.positions(index, address, mask, width) + self.rows[width], shape)
        if mask is None:
            return [each.ravel() for each in (places, *data)]
        within = spread(mask, shape)
        return [each[within] for each in (places, *data)]

    def put(self, index, address, mask, packed, width, code=None, marks=None, size=2) -> None:
        """Store words of elements of `size` bytes. packed and marks (None: defined) cover all programs and threads."""
        data = (packed,) if marks is None else (packed, marks)
        positions, packed, *unknown = self.chosen(index, address, mask, width, *data)
        self.flat[width][positions] = packed
        if self.run.checks:
            if ("bounds", index) not in self.run.launch.faults:
                stored_alike(self.run, index, self.flat[width][positions], packed, size, "shared")
            self.marks[width][positions] = unknown[0] if unknown else 0
            if self.proxies is not None:
                self.proxies.written(positions, width)
            self.note("write", index, address, mask, width, code)

    def claim(self, index, address, mask, width) -> None:
        """Mark the destination of a pending copy as unwritten."""
        (positions,) = self.chosen(index, address, mask, width)
        self.flat[width][positions] = self.flat[width].dtype.type(0)
        if self.run.checks:
            self.marks[width][positions] = np.full(16, 0xFF, np.uint8).view(WORDS[width])[0]
            self.run.races.write(index, address, mask, width)


def _views(words: np.ndarray) -> dict[int, np.ndarray]:
    return {width: words.view(dtype) for width, dtype in WORDS.items()}


class Local(Shared):
    """Local memory of threads."""

    name = "a thread's own memory"

    def __init__(self, run, size: int) -> None:
        self.run, self.size = run, size
        self.pitch = -(-size // 16) * 16
        words = run.programs * run.width * self.pitch // 4
        self.flat = _views(np.full(words, POISON[4], dtype=np.uint32))
        self.marks = _views(np.full(words, 0xFFFFFFFF, dtype=np.uint32))
        self.proxies = None
        self.rows = {width: run.threads * (self.pitch // width) for width in WORDS}

    def note(self, kind: str, *access) -> None:
        """Do nothing: no other thread accesses local memory."""


class Copy(NamedTuple):
    """A pending cp.async."""

    issued: int
    destination: np.ndarray
    mask: np.ndarray | None
    packed: np.ndarray
    width: int
    group: np.ndarray
    unknown: np.ndarray | None
    low: int
    """Its byte range, end exclusive."""
    high: int


class Copies:
    """Pending cp.async by group. Groups are counted per program, whose threads execute together."""

    def __init__(self, run) -> None:
        self.run = run
        self.committed = np.zeros((run.programs, 1), dtype=np.int64)
        self.pending: list[Copy] = []

    def issue(self, index, destination, source, guard, width, count) -> None:
        run = self.run
        if run.launch.facts.specialised:
            location = run.launch.code.instructions[index].location
            raise Unsupported("cp.async in a warp-specialised kernel", location)
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return
        if count is None:
            count = run.zero + np.uint32(width)
        wanted = count != 0
        reading = wanted if mask is None else wanted & mask
        packed = np.zeros(run.shape, dtype=WORDS[width])
        unknown = None
        whole = mask is None and wanted.all()
        if reading.any():
            pieces = run.memory.locate(index, source, None if whole else reading, width)
            for buffer, offsets, lanes in pieces:
                raw, marks = run.memory.gather(index, buffer, offsets, lanes, min(width, 4), width // min(width, 4))
                words = join(raw, run.shape, min(width, 4))
                packed = words if lanes is None else np.where(np.broadcast_to(lanes, run.shape), words, packed)
                if marks is not None:
                    marks = join(marks, run.shape, min(width, 4))
                    before = np.zeros(run.shape, WORDS[width]) if unknown is None else unknown
                    unknown = marks if lanes is None else np.where(np.broadcast_to(lanes, run.shape), marks, before)
        partial = (count != 0) & (count != width)
        if partial.any():
            packed = _shortened(packed, count, width, run.shape)
            unknown = None if unknown is None else _shortened(unknown, count, width, run.shape)
        if run.checks:
            self.check_order(index, destination, mask, width)
        run.shared.claim(index, destination, mask, width)
        unknown = None if unknown is None else np.ascontiguousarray(unknown)
        packed = np.ascontiguousarray(packed)
        low, high = int(destination.min()), int(destination.max()) + width
        group = self.committed.copy()
        self.pending.append(Copy(index, destination, mask, packed, width, group, unknown, low, high))

    def check_order(self, index, destination, mask, width) -> None:
        """Report a copy to the destination of a pending copy of the same thread: the two are unordered. Copies of
        different threads are ordinary races."""
        low, high = int(destination.min()), int(destination.max()) + width
        for copy in self.pending:
            if low >= copy.high or copy.low >= high:
                continue
            meet = (copy.destination.astype(np.int64) < destination.astype(np.int64) + width) & (
                destination < copy.destination.astype(np.int64) + copy.width
            )
            for part in (mask, copy.mask):
                meet = meet if part is None else meet & part
            if meet.any():
                byte = int(np.broadcast_to(destination, meet.shape)[meet][0])
                message = f"shared memory at byte {byte} is copied to while an earlier copy to it is on its way"
                return self.run.fault("race", index, message, copy.issued)
        return None

    def commit(self, index) -> None:
        arrived = self.run.rows(index)
        self.committed = self.committed + (1 if arrived is None else arrived.astype(np.int64))

    def wait(self, index, allowed: int) -> None:
        """Complete all but the `allowed` youngest groups."""
        arrived = self.run.rows(index)
        remaining = []
        for copy in self.pending:
            mask, done = copy.mask, copy.group < self.committed - allowed
            if arrived is not None:
                done = done & arrived
            if done.any():
                whole = done.all()
                part = mask if whole else (done if mask is None else done & mask)
                self.run.shared.put(copy.issued, copy.destination, part, copy.packed, copy.width, marks=copy.unknown)
            if not done.all():
                rest = ~done if mask is None else ~done & mask
                if rest.any():
                    remaining.append(copy._replace(mask=rest) if done.any() else copy)
        self.pending = remaining

    def remember(self) -> None:
        """After a barrier: pending copies may still write in the new barrier interval."""
        for copy in self.pending:
            self.run.races.write(copy.issued, copy.destination, copy.mask, copy.width)


def _shortened(packed, count, width, shape) -> np.ndarray:
    """Zero the bytes of words from `count` on."""
    step = np.arange(width, dtype=np.uint32)
    lanes = np.ascontiguousarray(packed).view(np.uint8).reshape(*shape, width)
    lanes = np.where(step < np.broadcast_to(count, shape)[..., None], lanes, 0).astype(np.uint8)
    return lanes.view(WORDS[width])[..., 0]


class Proxies:
    """The async proxy's view of shared memory: threads' writes are visible to it after fence.proxy.async."""

    def __init__(self, run, pitch: int) -> None:
        self.run = run
        self.stamps = _views(np.zeros(run.programs * (pitch // 4), dtype=np.uint32))
        self.now = 1
        """Current interval; a fence begins the next. `stamps` has the interval of the last write to each byte."""
        self.passed: np.ndarray | None = None
        """Threads that have passed a fence before the others."""

    def stamp(self, width: int) -> np.ndarray:
        return np.full(16, self.now, np.uint8).view(WORDS[width])[0]

    def written(self, positions, width) -> None:
        self.stamps[width][positions] = self.stamp(width)

    def fence(self) -> None:
        """Record fence.proxy.async of the running threads, which orders their own writes.

        In divergent code not all threads pass it together: the next interval begins once all have passed.
        """
        active = self.run.active
        if active is not None and active.shape[1] != 1 and not (active | self.run.ended()).all():
            self.passed = active if self.passed is None else self.passed | active
            if not (self.passed | self.run.ended()).all():
                return
        self.passed = None
        self.now += 1
        if self.now > 255:
            self.stamps[4][:] = 0
            self.now = 1

    def check(self, index, positions, width, mask) -> None:
        """Report words read by a product that threads have written since the last fence."""
        fresh = self.stamps[width].take(positions) == self.stamp(width)
        if fresh.any() and (mask is None or (fresh & mask).any()):
            message = (
                "a product or bulk copy reads what threads wrote into shared memory with no fence.proxy.async between"
            )
            self.run.fault("fence", index, message)
