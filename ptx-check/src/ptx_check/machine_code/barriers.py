"""mbarriers in shared memory, and bulk copies (TMA) that signal them.

A bulk load completes immediately (early), or when no warp can continue without it, youngest first (late); until then
its destination holds NaN. A bulk store reads shared memory immediately, or at its wait. Tensor maps have the format of
bulk_copies.py, in the kernel's parameters or in global memory.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_check.bulk_copies import FILLED, SIZES
from ptx_check.faults import Location
from ptx_check.machine_code.cubin import GENERIC
from ptx_check.machine_code.integers import Step
from ptx_check.machine_code.memory import RESERVED, address
from ptx_check.machine_code.operands import Code, bits, truth
from ptx_check.memory import WORDS

_COUNT = 0x100000
"""An mbarrier's word holds this minus the expected arrivals."""


@dataclass(slots=True)
class Barrier:
    expected: int
    left: int
    bytes: int = 0
    phase: int = 0

    def changed(self, s: Any) -> None:
        """Complete the phase if nothing is pending."""
        if self.left <= 0 and self.bytes == 0:
            self.phase ^= 1
            self.left += self.expected
            s.changed()


def _at(s: Any, code: Code, row: int, place: int) -> Barrier:
    key = int(s.program[row, 0]), place
    if key not in s.barriers:
        s.fault("unwritten", code, f"an mbarrier at {place:#x} that nobody initialised")
        s.barriers[key] = Barrier(1, 1)
    return s.barriers[key]


def synchronise(code: Code) -> Step:
    """SYNCS: initialize an mbarrier, arrive at it, or test the parity of its phase."""
    words = code.words
    if words == ("EXCH", "64"):
        return _initialise(code)
    if words[:2] == ("PHASECHK", "TRANS64"):
        code.only("PHASECHK", "TRANS64", "TRYWAIT")
        return _await(code)
    if words[:2] == ("ARRIVE", "TRANS64"):
        code.only("ARRIVE", "TRANS64", "A1T0")
        return _arrive(code)
    raise code.unknown()


def _initialise(code: Code) -> Step:
    at, value = address(code.operands[1], code), code.operands[2]
    if not code.operands[0].zero or value.file != "UR":
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        low, high = s.UR[value.number][s.w][:, 0], s.UR[value.number + 1][s.w][:, 0]
        for row, place, one, other in zip(s.rows.tolist(), at(s)[:, 0].tolist(), low.tolist(), high.tolist()):
            count = _COUNT - (one >> 1)
            if place % 8 or not 0 < count < _COUNT or other != ((_COUNT - count) << 11) & 0xFFFFFFFF:
                raise code.unknown("of a word that is no new mbarrier is not known")
            s.barriers[int(s.program[row, 0]), place] = Barrier(count, count)
            grain = (place + int(s.program[row, 0]) * s.shared.pitch) >> 4
            s.shared.written[grain], s.shared.writer[grain] = s.count, row

    return step


def _await(code: Code) -> Step:
    put, at, parity = truth(code.operands[0], code), address(code.operands[1], code), bits(code.operands[2], code)

    def step(s: Any) -> None:
        first = s.active().argmax(1)
        places, wanted = at(s), np.broadcast_to(parity(s), s.shape)
        waits = np.zeros(len(s.rows), bool)
        for position, (row, lane) in enumerate(zip(s.rows.tolist(), first.tolist())):
            place, phase = int(places[position, lane]), int(wanted[position, lane]) >> 31
            barrier = _at(s, code, row, place)
            waits[position] = barrier.phase == phase
            if waits[position]:
                missing = f"{barrier.left} arrivals and {barrier.bytes} bytes missing"
                s.why[row] = f"mbarrier {place:#x} at {code.address:#x}, phase {phase}, {missing}"
        if s.go_on_without(waits):
            put(s, np.ones((1, 1), dtype=bool))

    return step


def _arrive(code: Code) -> Step:
    """Arrive once per active lane; without A1T0 also expect bytes."""
    at = address(code.operands[1], code)
    more = None if "A1T0" in code.words else bits(code.operands[2], code)
    if not code.operands[0].zero:
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        lanes, places = s.active(), at(s)
        coming = np.zeros(s.shape, int) if more is None else np.broadcast_to(more(s), s.shape)
        for position, row in enumerate(s.rows.tolist()):
            for lane in np.flatnonzero(lanes[position]).tolist():
                barrier = _at(s, code, row, int(places[position, lane]))
                barrier.bytes += int(coming[position, lane])
                barrier.left -= 1
                if barrier.left < 0:
                    s.fault("deadlock", code, "more arrivals at an mbarrier than its phase expects")
                barrier.changed(s)

    return step


@dataclass(slots=True)
class Tile:
    """Elements moved by one bulk copy."""

    code: Code
    row: int
    size: int
    outside: Any
    """Addresses in global memory."""
    taken: Any
    """Mask of elements inside the tensor."""
    inside: Any
    """Positions in the chunk's shared memory."""
    fill: int
    barrier: int = 0
    group: int = 0
    fenced: int = 0

    def arrive(self, s: Any) -> None:
        """Complete a load."""
        view = s.shared.bytes.view(WORDS[self.size])
        data: Any = np.full(len(self.inside), self.fill, WORDS[self.size])
        for buffer, offsets, here in s.memory.pieces(s, self.code, self.outside, self.taken, self.size):
            places = np.where(here, offsets, 0) // self.size
            s.guess(buffer, places, here, self.size)
            data[here] = buffer.view(self.size)[places[here]]
        view[self.inside // self.size] = data
        s.shared.written[self.inside >> 4] = 0
        barrier = _at(s, self.code, self.row, self.barrier)
        barrier.bytes -= len(self.inside) * self.size
        barrier.changed(s)

    def leave(self, s: Any) -> None:
        """Execute a store."""
        shared = s.shared
        if s.unfenced(self.inside >> 4, np.int64(self.fenced)):
            s.fault("fence", self.code, "a bulk copy reads what was written with no fence.proxy.async in between")
        data = shared.bytes.view(WORDS[self.size])[self.inside // self.size]
        for buffer, offsets, here in s.memory.pieces(s, self.code, self.outside, self.taken, self.size):
            places = offsets[here] // self.size
            buffer.view(self.size)[places] = data[here]
            if buffer.footprint is not None:
                buffer.footprint.note(places, self.size, atomic=False)


def _map(s: Any, code: Code, place: int) -> Any:
    """The 128 bytes of the tensor map at an address; None, with a fault, outside of the launch's memory."""
    start = place - GENERIC + s.launch.first
    if s.launch.first <= start <= len(s.launch.banks[0]) - 128:
        return s.launch.banks[0][start : start + 128]
    for buffer in s.memory.known:
        if buffer.base <= place <= buffer.base + buffer.size - 128:
            return buffer.bytes[place - buffer.base :][:128]
    s.fault("bounds", code, "a tensor map outside of the launch's memory")
    return None


def _tile(s: Any, code: Code, row: int, place: int, to: int, coordinates: list[int]) -> Tile | None:
    image = _map(s, code, place)
    if image is None:
        return None
    words = image.view(np.uint32).astype(np.int64)
    rank, size, swizzle = int(words[2]) + 1, SIZES.get(int(words[18])), int(words[20])
    box = words[3 : 3 + rank].tolist()
    if size is None or rank != len(coordinates) or words[19] or swizzle > 3 or (words[13 : 13 + rank] != 1).any():
        raise code.unknown("of this tensor map is not known")
    strides = [size, *image[88:120].view(np.uint64)[: rank - 1].tolist()]
    base = int(image[:8].view(np.uint64)[0])
    if base % 16 or any(stride % 16 for stride in strides[1:]) or to % 128:
        s.fault("alignment", code, "a bulk copy of a tensor or a stride that 16 bytes, or to a place that 128 do not "
                "divide")  # fmt: skip
    numbers = np.arange(int(np.prod(box)))
    outside: Any = np.full(len(numbers), base, np.int64)
    taken, rest = np.ones(len(numbers), bool), numbers
    for start, extent, bound, stride in zip(coordinates, box, words[8 : 8 + rank].tolist(), strides):
        at = start + rest % extent
        rest = rest // extent
        taken &= (at >= 0) & (at < bound)
        outside = outside + at * stride
    inside = to + numbers * size
    inside = inside ^ (inside >> 7 & (1 << swizzle) - 1) << 4
    if inside.min() < RESERVED or inside.max() + size > s.shared.end:
        s.fault("bounds", code, "a bulk copy outside of the program's shared memory")
        return None
    inside = inside + int(s.program[row, 0]) * s.shared.pitch
    return Tile(code, row, size, outside.view(np.uint64), taken, inside, FILLED.get(size, 0) if words[21] else 0)


def _registers(code: Code, position: int) -> int:
    match = re.match(r"\[UR(\d+)\]$", code.operands[position].text)
    if match is None:
        raise code.unknown("of this form is not known")
    return int(match[1])


def _issued(code: Code, loads: bool) -> Step:
    rank = next((int(word[0]) for word in code.words if re.match(r"[1-5]D$", word)), 0)
    if not rank or code.words != (f"{rank}D",):
        raise code.unknown()
    code.count(2)
    first, where = _registers(code, 0), _registers(code, 1)
    numbers = 1 + loads

    def step(s: Any) -> None:
        values = s.UR[:, s.rows, 0].astype(np.int64)
        for position, row in enumerate(s.rows.tolist()):
            own = values[:, position]
            place = int(own[where]) | int(own[where + 1]) << 32
            coordinates = own[first + numbers : first + numbers + rank].astype(np.int32).tolist()
            tile = _tile(s, code, row, place, int(own[first]), coordinates)
            if tile is None:
                continue
            tile.fenced, tile.group = int(s.fenced[row]), int(s.groups[row])
            if loads:
                tile.barrier = int(own[first + 1])
                s.shared.bytes.view(WORDS[tile.size])[tile.inside // tile.size] = WORDS[tile.size](
                    -1 % (1 << 8 * tile.size)
                )
            if not s.order.copies:
                (tile.arrive if loads else tile.leave)(s)
            else:
                (s.bulk if loads else s.stores).append(tile)

    return step


def load(code: Code) -> Step:
    """UTMALDG: bulk load from global into shared memory."""
    return _issued(code, loads=True)


def store(code: Code) -> Step:
    """UTMASTG: bulk store from shared into global memory."""
    return _issued(code, loads=False)


def commit(code: Code) -> Step:
    """UTMACMDFLUSH: commit the stores so far as a group."""
    code.only()

    def step(s: Any) -> None:
        s.groups[s.rows] += 1

    return step


def stored(s: Any, rows: Any, before: Any) -> None:
    """Complete the stores of these warps with groups below `before`."""
    kept = []
    for tile in s.stores:
        if tile.row in rows and tile.group < before[tile.row]:
            tile.leave(s)
        else:
            kept.append(tile)
    s.stores = kept


def unfinished(s: Any) -> None:
    """At the end of all programs: report loads that were not waited for, and complete stores."""
    if s.bulk:
        where = Location(s.launch.name, 0, "machine code")
        s.launch.fault("unwritten", -2, f"{len(s.bulk)} bulk loads that nobody waited for", where)
    for tile in s.stores:
        tile.leave(s)


MEANINGS = {"UTMALDG": load, "UTMASTG": store, "UTMACMDFLUSH": commit}
CONTROL = {"SYNCS": synchronise}
"""Instructions that end a code segment."""
