"""Tensor memory of sm_100: 128 lanes of 512 32-bit columns per program, for the accumulators of tcgen05.mma.

A product is issued by one thread and completes later: tcgen05.commit signals an mbarrier, and after waiting there the
accumulator may be used and the operands overwritten. Each warp loads and stores its quarter of the lanes; stores are
visible after tcgen05.wait::st, and to the multiplying thread after a barrier (between teams: tensor_orders.py).
An accumulator of 128 rows has row r in lane r; one of 64 rows has 16 rows in the lower or upper half of each quarter.
Source: NVIDIA, "PTX ISA", chapter 9.7.16 (tcgen05).
"""

import numpy as np

from ptx_check.allocations import POISON
from ptx_check.faults import Unsupported
from ptx_check.matrices import SIZES, elements, marked
from ptx_check.mbarriers import issuing
from ptx_check.memory import spread
from ptx_check.races import COLLECTIVE_CODE
from ptx_check.rounding import f16_to_f32, f32_to_f16, halves, pack
from ptx_check.tensor_orders import TensorOrders
from ptx_check.warpgroup import pattern_of, read_operand

LANES, COLUMNS = 128, 512
_KINDS = {
    "kind::f16": (16, {0: "f16", 1: "bf16"}),
    "kind::tf32": (8, {2: "tf32"}),
    "kind::f8f6f4": (32, {0: "e4m3", 1: "e5m2"}),
    "kind::i8": (32, {0: "u8", 1: "s8"}),
}
"""Kind of product -> depth, and types by their code in the instruction descriptor."""
_HALVES = ("kind::f16", "kind::f8f6f4")
"""Kinds whose accumulators may be float16, one in the lower half of a column."""
_SWIZZLES = {2: 128, 4: 64, 6: 32}
"""The descriptor's three highest bits -> bytes per row of the swizzle pattern."""


class TensorMemory:
    """The tensor memory of a running chunk of programs."""

    def __init__(self, run, columns: int) -> None:
        self.run, self.columns = run, min(columns, COLUMNS)
        shape = (run.programs, LANES, self.columns)
        self.words = np.full(shape, POISON[4], dtype=np.uint32)
        self.marks = np.full(shape, 0xFFFFFFFF, dtype=np.uint32)
        self.used = 0
        by_column = (run.programs, 2, self.columns)
        self.storing = np.zeros(by_column, dtype=bool)
        """Columns with pending stores, until tcgen05.wait::st; separately for lower and upper halves of quarters."""
        self.touched = np.zeros(by_column, dtype=bool)
        """Columns accessed by threads since the last barrier."""
        self.products = np.zeros(by_column, dtype=np.int64)
        """Commit that completes the last product of each column."""
        self.commit_number = 1
        self.done = np.zeros((run.programs, 1, 1), dtype=np.int64)
        self.reading: list[tuple] = []
        """(commit, instruction, addresses, programs) of operands that pending products read."""
        apart = run.checks and run.launch.facts.specialised
        self.orders = TensorOrders(run, self.columns) if apart else None
        """Replaces the checks by barriers in a warp-specialized kernel."""
        self.issuer = 0
        """Warp that issues the current product."""

    # -------------------------------------------------------------------------------- what all threads of a warp do

    def allocate(self, index, address, guard, columns: int) -> None:
        base, self.used = self.used, self.used + columns
        if self.used > COLUMNS:
            self.run.fault("bounds", index, f"more than {COLUMNS} columns of tensor memory are allocated")
        self.run.shared.store(index, address, guard, 4, (np.full((1, 1), base, np.uint32),))

    def places(self, index, address, mask, shape: str, split: int, count: int):
        """Position of each thread's first word, and the columns accessed by each program."""
        run = self.run
        run.together(index)
        address = run.spread(address)
        if mask is not None:  # other threads may have other values in this register
            mask = run.spread(mask)
            first = np.take_along_axis(np.broadcast_to(address, (len(mask), run.width)), mask.argmax(1)[:, None], 1)
            address = np.where(mask, address, first)
        lane, column = (address >> np.uint32(16)).astype(np.int64), (address & np.uint32(0xFFFF)).astype(np.int64)
        within = run.lane.astype(np.int64)
        sides = np.ones((1, 2, 1), dtype=bool)
        if shape == "16x32bx2":
            sides = np.arange(2)[:, None] == (lane[:, :1, None] // 16 % 2)
            column = column + split * (within >= 16)
            within = within % 16
        lane = lane + within
        wrong = (lane // 32 != run.warp % 4) | (column + count > self.used)
        if (wrong if mask is None else wrong & mask).any():
            run.fault("bounds", index, "tensor memory of another warp, or beyond what is allocated")
        lane, column = lane % LANES, np.minimum(column, self.columns - count)
        every = np.arange(self.columns)
        within_row = (every >= column.min(1, keepdims=True)) & (every < column.max(1, keepdims=True) + count)
        touched = within_row[:, None] & sides
        if mask is not None:
            touched = touched & mask.any(1)[:, None, None]
        first = np.arange(run.programs, dtype=np.int64)[:, None] * (LANES * self.columns)
        return first + lane * self.columns + column, np.broadcast_to(touched, self.storing.shape)

    def load(self, index, address, shape: str, split: int, count: int, narrow: bool) -> tuple[np.ndarray, ...]:
        """Load registers. narrow: each register has the lower halves of two columns."""
        run = self.run
        positions, touched = self.places(index, address, run.active, shape, split, count << narrow)
        if run.checks:
            self.access(index, run.active, touched, stores=False)
            marks = self.taken(self.marks, positions, count, narrow)
            if run.active is not None:
                marks = tuple(np.where(run.active, each, np.uint32(0)) for each in marks)
            if any(each.any() for each in marks):
                run.undefined.loaded(index, marks)
        return self.taken(self.words, positions, count, narrow)

    def taken(self, words, positions, count: int, narrow: bool) -> tuple[np.ndarray, ...]:
        columns = [words.take(positions + i) for i in range(count << narrow)]
        if narrow:
            return tuple(pack(*(c.astype(np.uint16) for c in pair)) for pair in zip(columns[::2], columns[1::2]))
        return tuple(columns)

    def store(self, index, address, guard, shape: str, split: int, values, marks, narrow: bool) -> None:
        """Store registers, the inverse of load()."""
        run = self.run
        if narrow:
            values, marks = (each and tuple(half.astype(np.uint32) for register in each for half in halves(register))
                             for each in (values, marks))  # fmt: skip
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return
        positions, touched = self.places(index, address, mask, shape, split, len(values))
        self.access(index, mask, touched, stores=True)
        chosen = slice(None) if mask is None else spread(mask, positions.shape)
        for i, value in enumerate(values):
            at = positions[chosen] + i
            self.words.reshape(-1)[at] = spread(value, run.shape)[chosen]
            self.marks.reshape(-1)[at] = 0 if marks is None else spread(marks[i], run.shape)[chosen]

    def access(self, index, mask, touched, *, stores: bool) -> None:
        """Check and record loads or stores of columns."""
        if self.orders is not None:
            return self.orders.access(index, self.run.everyone() if mask is None else mask, touched[0], stores=stores)
        self.settled(index, touched & ~self.storing if stores else touched)
        self.touched |= touched
        if stores:
            self.storing |= touched
        return None

    def settled(self, index, touched) -> None:
        """Report columns with pending products or stores."""
        if (touched & (self.products > self.done)).any():
            message = "the sums of a product are used before the mbarrier of its tcgen05.commit is waited for"
            self.run.fault("unwritten", index, message)
        if (touched & self.storing).any():
            self.run.fault("unwritten", index, "what is stored in tensor memory is used before tcgen05.wait::st")

    def wait(self) -> None:
        """Execute tcgen05.wait::st."""
        if self.orders is not None:
            return self.orders.wait()
        active = self.run.active
        self.storing &= False if active is None else ~active.any(1)[:, None, None]
        return None

    def barrier(self, arrived) -> None:
        self.touched &= False if arrived is None else ~arrived[..., None]
        for entry in self.reading:
            self.log(entry)

    # ------------------------------------------------------------------------------------- what one thread does

    def multiply(self, index, kind: str, guard, sums, left, right, form, adding, in_tensor_memory: bool) -> None:
        """d = a b + d (adding) or a b; left: the descriptor of a, or its address in tensor memory."""
        run = self.run
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return
        if mask is None or (spread(mask, run.shape).sum(1) > 1).any():
            run.fault("divergence", index, "more than one thread issues a tensor product")
        self.issuer = int(spread(mask, run.shape)[0].argmax()) // 32
        programs, *given = issuing(run, mask, sums, left, right, form, adding)
        sums, left, right, form, adding = given
        alike = np.unique(np.concatenate([sums, form, adding], 1, dtype=np.int64), axis=0)
        for place, type_of, add in alike.tolist():
            some = ((sums == place) & (form == type_of) & (adding == add))[:, 0]
            self.product(index, kind, programs[some], place, type_of, add, left[some], right[some], in_tensor_memory)

    def product(self, index, kind, programs, sums: int, form: int, adding: int, left, right, in_tensor_memory) -> None:
        run = self.run
        depth, types = _KINDS[kind]
        height, width, of_sums = (form >> 24 & 31) << 4, (form >> 17 & 63) << 3, form >> 4 & 3
        names = types.get(form >> 7 & 7), types.get(form >> 10 & 7)
        location = run.launch.code.instructions[index].location
        if (
            None in names
            or (of_sums == 0 and kind not in _HALVES)
            or height not in (64, 128)
            or form & 0b11000000000111
            or form >> 29
        ):
            raise Unsupported(f"a tensor product of form {form:#x}", location)
        lane, column = sums >> 16, sums & 0xFFFF
        if lane not in (0, 16 * (height == 64)) or column + width > self.used:
            return run.fault("bounds", index, "a tensor product outside of what is allocated")
        lanes = lane + (np.arange(height) if height == 128 else np.arange(64) % 16 + np.arange(64) // 16 * 32)
        sides = slice(None) if height == 128 else lane // 16
        self.ordered(index, programs, sides, slice(column, column + width), reads=False)
        if in_tensor_memory:
            a, a_marks = self.fragments(index, programs, lanes - lane, sides, left, depth, names[0])
        else:
            a, a_marks = self.operand(index, programs, left, height, depth, names[0], bool(form >> 15 & 1))
        b, b_marks = self.operand(index, programs, right, width, depth, names[1], bool(form >> 16 & 1))
        made = np.matmul(a, b.swapaxes(-1, -2))
        at = np.ix_(programs, lanes, np.arange(column, column + width))
        if of_sums == 0:
            before = f16_to_f32(self.words[at].astype(np.uint16)) if adding else np.float32(0)
            self.words[at] = f32_to_f16(before + made)
        else:
            real = np.int32 if of_sums == 2 else np.float32
            made = made.astype(np.int64).astype(np.int32) if of_sums == 2 else made
            self.words[at] = ((self.words[at].view(real) + made) if adding else made).view(np.uint32)
        if run.checks:
            unknown = a_marks.any(-1)[:, :, None] | b_marks.any(-1)[:, None, :]
            self.marks[at] = (self.marks[at] if adding else 0) | np.where(unknown, np.uint32(0xFFFFFFFF), np.uint32(0))
        self.products[programs, sides, column : column + width] = self.commit_number
        return None

    def ordered(self, index, programs, sides, columns, *, reads: bool) -> None:
        """Report sums, or a left operand (reads), that threads accessed since the last barrier."""
        if not self.run.checks:
            return
        if self.orders is not None:
            sides = sides if isinstance(sides, slice) else slice(sides, sides + 1)
            self.orders.product(index, self.issuer, sides, columns, self.commit_number, reads=reads)
        elif self.storing[programs, sides, columns].any():
            self.run.fault("unwritten", index, "what is stored in tensor memory is used before tcgen05.wait::st")
        elif self.touched[programs, sides, columns].any():
            message = "a tensor product takes tensor memory that threads touched with no barrier in between"
            self.run.fault("race", index, message)

    def operand(self, index, programs, descriptor, rows, depth, kind, turned):
        """(programs, rows, depth) elements of an operand in shared memory, and the mask of undefined ones."""
        run = self.run
        try:
            address = positions(descriptor[:, 0], rows, depth, SIZES[kind], turned)
        except ValueError as error:
            raise Unsupported(str(error), run.launch.code.instructions[index].location) from None
        whole = np.zeros((run.programs, rows * depth), np.uint32)
        whole[programs] = address.reshape(len(address), -1)
        mask = np.zeros((run.programs, 1), dtype=bool)
        mask[programs] = True
        raw, marks = read_operand(run, index, whole, mask, SIZES[kind])
        if self.orders is not None:
            run.orders.product(index, address.astype(np.uint32), None, 2, self.commit_number, self.issuer)
        else:
            entry = (self.commit_number, index, whole, mask)
            self.log(entry)
            self.reading.append(entry)
        shape = (len(programs), rows, depth)
        unknown = np.zeros((1, 1, 1), dtype=bool) if marks is None else marks[programs].reshape(shape) != 0
        return elements(np.ascontiguousarray(raw[programs]).reshape(shape), kind), unknown

    def fragments(self, index, programs, lanes, sides, address, depth, kind):
        """(programs, rows, depth) elements of an operand in tensor memory, consecutive in each row, and the mask of
        undefined ones."""
        run, count = self.run, depth * SIZES[kind] // 4
        if (address != address[0]).any():
            raise Unsupported("operands in several places", run.launch.code.instructions[index].location)
        lane, column = int(address[0, 0]) >> 16, int(address[0, 0]) & 0xFFFF
        lanes, sides = lanes + lane, sides if isinstance(sides, slice) else lane // 16
        self.ordered(index, programs, sides, slice(column, column + count), reads=True)
        at = np.ix_(programs, lanes, np.arange(column, column + count))
        size = f"u{SIZES[kind]}"
        unknown = np.ascontiguousarray(marked(self.marks[at], kind)).view(size) != 0
        return elements(np.ascontiguousarray(self.words[at]).view(size), kind), unknown

    def commit(self, index, address, guard) -> None:
        mask = self.run.where(guard)
        if mask is None or mask.any():
            self.run.barriers_of_memory.arrive(index, address, guard, self.commit_number)
            self.commit_number += 1

    def finished(self, programs, commits) -> None:
        """Record that programs have waited for all products up to these commits."""
        self.done[programs, 0, 0] = np.maximum(self.done[programs, 0, 0], commits)
        if self.run.checks and self.reading:
            self.run.races.forget(COLLECTIVE_CODE)  # their operands may be overwritten from here on
            self.reading = [entry for entry in self.reading if (entry[3] & (self.done[..., 0] < entry[0])).any()]
            for entry in self.reading:
                self.log(entry)

    def log(self, entry) -> None:
        group, index, address, mask = entry
        if self.run.checks:
            going = mask & (self.done[..., 0] < entry[0])
            self.run.races.product(index, address, going, 2, group)


def positions(descriptor: np.ndarray, rows: int, depth: int, size: int, turned: bool) -> np.ndarray:
    """Byte addresses (programs, rows, depth) of the elements of an operand; descriptor (programs,) uint64."""
    first = int(descriptor.flat[0])
    swizzle = _SWIZZLES.get(first >> 61)
    alike = not ((descriptor ^ descriptor[0]) >> np.uint64(14)).any()
    if swizzle is None or first >> 46 & 7 != 1 or first >> 49 & 7 or not alike:
        raise ValueError(f"a matrix descriptor {first:#x} without swizzle, or of several kinds")
    start = ((descriptor & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)
    leading, stride = (first >> bit & 0x3FFF for bit in (16, 32))
    return pattern_of(start, leading << 4, stride << 4, swizzle, rows, depth, size, turned)
