"""wgmma: four warps multiply a tile of 64 rows, with operands in shared memory and accumulators in registers.

A descriptor describes an operand in shared memory: start, two strides, and the swizzle of its 16-byte pieces.

    K-major                  a row of the tile has 32, 64 or 128 consecutive bytes along the depth K; eight rows are
                             consecutive; the next eight are `stride` bytes away
    MN-major (transposed)    eight steps of K are consecutive, each with 16, 32 or 64 elements along the rows; the next
                             eight steps are `stride` bytes away, the next elements along the rows `leading` bytes

A swizzle XORs address bits 4 to 6 with the bits three positions higher.

Until wgmma.wait_group a product may read its operands, and its accumulators are pending: using them earlier is
reported, and overwriting the operands earlier is a race. wgmma.fence must precede the first product, and separate every
product from other instructions that touch its registers (fragments that are computed after the fence, for which the
assembler injects another fence, are a note: control.py). fence.proxy.async must separate threads' writes from the
product that reads them (shared.py).
Source: NVIDIA, "PTX ISA", chapters 9.7.15.5 (layouts and descriptors) and 9.7.15.5.2 (fragments).
"""

import functools

import numpy as np

from ptx_check.faults import Unsupported
from ptx_check.matrices import IN_FOURS, SIZES, elements, in_registers, marked, sum_marks, summed

_SWIZZLES = {1: 128, 2: 64, 3: 32}
"""The descriptor's two highest bits -> bytes per row of the swizzle pattern."""
LOADED = 1 << 60
"""Pseudo-group of registers being loaded from tensor memory."""
_PERIOD = 1024
"""Period of all patterns, in bytes."""


def positions(descriptor: np.ndarray, rows: int, depth: int, size: int, turned: bool) -> np.ndarray:
    """Byte addresses (..., rows, depth) of the elements of an operand; descriptor (...) uint64. Raises ValueError for
    a layout without swizzle, or descriptors that differ in more than their start."""
    d = descriptor.astype(np.uint64)
    start = ((d & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)
    leading, stride = (int((int(d.flat[0]) >> bit & 0x3FFF) << 4) for bit in (16, 32))
    mode, base = int(d.flat[0]) >> 62, int(d.flat[0]) >> 49 & 7
    if mode not in _SWIZZLES or base or ((d ^ d.flat[0]) >> np.uint64(14)).any():
        raise ValueError(f"a matrix descriptor {int(d.flat[0]):#x} without swizzle, or of several kinds")
    return pattern_of(start, leading, stride, _SWIZZLES[mode], rows, depth, size, turned)


def pattern_of(start, leading: int, stride: int, swizzle: int, rows: int, depth: int, size: int, turned: bool):
    """Addresses (..., rows, depth) of the elements of operands at `start` (...)."""
    form = leading, stride, swizzle, rows, depth, size, turned
    low = int(start.flat[0]) % _PERIOD
    if (start % _PERIOD != low).any():
        each = [pattern_of(one, *form) for one in start.reshape(-1, 1)]
        return np.stack(each).reshape(*start.shape, rows, depth)
    return (start - low)[..., None, None] + _pattern(low, *form)


@functools.lru_cache(maxsize=256)
def _pattern(start, leading, stride, swizzle, rows, depth, size, turned) -> np.ndarray:
    """Addresses of the elements of an operand that starts below _PERIOD."""
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if turned:
        across = swizzle // size
        offset = row % across * size + row // across * leading + k % 8 * swizzle + k // 8 * stride
    else:
        offset = row % 8 * swizzle + row // 8 * stride + k * size
    address = start + offset
    return address ^ (address >> 3 & (swizzle // 16 - 1) << 4)


def read_operand(run, index, address, mask, size):
    """Read the elements of an operand in shared memory; returns them and their marks or None."""
    inside = run.shared.positions(index, address, mask, size) + run.shared.rows[size]
    marks = None
    if run.checks:
        if run.shared.proxies is not None:
            run.shared.proxies.check(index, inside, size, mask)
        marks = run.shared.unwritten(inside, size, mask)
    return run.shared.flat[size].take(inside), marks


@functools.lru_cache(maxsize=64)
def _order(count: int, *, across: bool) -> np.ndarray:
    """Order in which rows (across: columns) of the accumulators are computed, so that in_registers() can move four
    columns as one."""
    if across:
        return (np.arange(0, count, 8)[:, None] + IN_FOURS).ravel()
    return np.arange(count).reshape(-1, 2, 8).swapaxes(0, 1).ravel()


class Groups:
    """Pending products, by group."""

    def __init__(self, run) -> None:
        self.run = run
        self.here = np.zeros(0, np.int64)
        """Warpgroups that execute the current product."""
        self.committed = 0
        self.open: dict[str, int] = {}
        """Register with a pending result -> its group."""
        self.reading: list[tuple] = []
        """(group, instruction, addresses, mask) of operands that pending products read."""
        self.touched: set[str] = set()
        """Registers accessed by other instructions since the last wgmma.fence."""
        self.late: set[str] = set()
        """Accessed fragments for which the assembler injects another fence."""
        self.fenced = False

    def fence(self) -> None:
        self.touched, self.late, self.fenced = set(), set(), True

    def check_fence(self, index: int, names) -> None:
        """Check that a fence separates a product from earlier accesses to its registers."""
        if self.run.checks and (not self.fenced or not self.touched.isdisjoint(names)):
            message = "a product takes registers that others touched with no wgmma.fence in between"
            self.run.fault("fence", index, message)
        elif self.run.checks and not self.late.isdisjoint(names):
            self.run.fault("fenced", index, "fragments of a product are computed behind its wgmma.fence")

    def commit(self, index: int) -> None:
        self.committed += 1

    def wait(self, index: int, allowed: int) -> None:
        done = self.committed - allowed
        self.open = {name: group for name, group in self.open.items() if group >= done}
        for entry in self.reading:
            self.log(entry)
        self.reading = [entry for entry in self.reading if entry[0] >= done]
        if self.run.orders is not None:
            self.run.orders.finished(done)

    def check(self, index: int, names: list[str]) -> None:
        """Report reads of registers with pending results."""
        groups = [self.open[name] for name in names if name in self.open]
        if LOADED in groups:
            self.run.fault("unwritten", index, "what is loaded from tensor memory is used before tcgen05.wait::ld")
        elif groups:
            self.run.fault("unwritten", index, "the sums of a product are used before wgmma.wait_group")

    def loading(self, names: tuple[str, ...]) -> None:
        """Record registers that tcgen05.ld writes as pending."""
        self.open.update(dict.fromkeys(names, LOADED))

    def loaded(self) -> None:
        """Execute tcgen05.wait::ld."""
        self.open = {name: group for name, group in self.open.items() if group != LOADED}

    def move(self, results: tuple[str, ...], sources: tuple[str, ...]) -> None:
        """Let the results of a mov inherit the pending state of its sources."""
        groups = [self.open[name] for name in sources if name in self.open]
        for name in results:
            if groups:
                self.open[name] = max(groups)
            else:
                self.open.pop(name, None)

    def remember(self) -> None:
        """After a barrier: pending products still read their operands in the new barrier interval."""
        for entry in self.reading:
            self.log(entry)

    def log(self, entry) -> None:
        group, index, address, mask = entry
        if self.run.checks:
            self.run.races.product(index, address, mask, 2, group)

    def multiply(
        self, index, kinds, held, columns, depth, from_registers, left, right, scale, turned, old, names, marks
    ):
        """Return the new accumulators, columns / 2 registers per thread: (64, columns) for each warpgroup.

        marks: marks of the left operand's registers, or None.
        """
        run = self.run
        self.here = self.running(index)
        unknown: list[np.ndarray] = []
        """Masks of undefined elements of the product: (programs, groups, 64 or 1, columns or 1)."""
        if from_registers:
            a = self.fragments(left, kinds[0])
            if marks is not None:
                found = self.fragments([marked(r, kinds[0]) for r in map(run.spread, marks)], kinds[0])
                unknown.append(found.any(-1, keepdims=True))
        else:
            a = self.operand(index, left[0], 64, depth, kinds[0], bool(turned[0]), unknown)
        b = self.operand(index, right, columns, depth, kinds[1], bool(turned[1]), unknown, across=True)
        product = np.matmul(a, b.swapaxes(-1, -2))  # (programs, groups, 64, columns)
        before = old if scale.all() else [np.where(scale, each, np.uint32(0)) for each in old]
        made = summed(self.pieces(product), before, kinds[2], held)
        self.open.update(dict.fromkeys(names, self.committed))
        if unknown:
            shape = (run.programs, len(self.here), 64, columns)
            found = functools.reduce(np.logical_or, (np.broadcast_to(each, shape) for each in unknown))
            none = [np.zeros((1, 1), np.uint32)] * len(old)
            run.undefined.loaded(index, sum_marks(self.pieces(found), none, kinds[2]))
        return made

    def running(self, index: int) -> np.ndarray:
        """Indices of the running warpgroups."""
        run = self.run
        if run.width % 128:
            raise Unsupported("wgmma needs groups of four warps", run.launch.code.instructions[index].location)
        if not run.launch.facts.specialised:
            return np.arange(run.width // 128)
        threads = run.everyone()[0].reshape(-1, 128)
        if (threads.any(1) != threads.all(1)).any():
            run.fault("divergence", index, "not all threads of a warp group come here together")
        return np.flatnonzero(threads.any(1))

    def pieces(self, sums: np.ndarray) -> list[np.ndarray]:
        """Distribute sums (programs, groups, 64, columns), in _order, to each thread's registers."""
        if len(self.here) < self.run.width // 128:
            every = np.zeros((len(sums), self.run.width // 128, *sums.shape[2:]), sums.dtype)
            every[:, self.here] = sums
            sums = every
        shape = (len(sums), sums.shape[1], 2, 32, sums.shape[-1] // 8, 2)
        return in_registers(sums, shape, (4, 2, 5, 0, 1, 3), self.run.width)

    def fragments(self, registers, kind) -> np.ndarray:
        """Operand a from registers: (programs, groups, 64, depth), 16 rows per warp as in mma, in _order."""
        matrices = self.run.matrices
        warps = matrices.left(registers, kind)
        groups = warps.reshape(len(warps), -1, 64, warps.shape[-1])[:, self.here]
        return groups[:, :, _order(64, across=False)]

    def operand(self, index, descriptor, rows, depth, kind, turned, unknown, *, across=False) -> np.ndarray:
        """(programs, groups, rows in _order, depth) elements of an operand in shared memory.

        unknown: collects the mask of its rows with undefined elements, as columns of the product if across.
        """
        run, size = self.run, SIZES[kind]
        descriptor = run.spread(descriptor).reshape(descriptor.shape[0], -1, 128)[:, self.here]
        if (descriptor != descriptor[:, :, :1]).any():
            run.fault("divergence", index, "the threads of a warpgroup have different matrix descriptors")
        try:
            address = positions(descriptor[:, :, 0], rows, depth, size, turned)
        except ValueError as error:
            raise Unsupported(str(error), run.launch.code.instructions[index].location) from None
        address = address[:, :, _order(rows, across=across)]
        flat = address.reshape(len(address), -1).astype(np.uint32)
        mask = run.active if run.active is None or run.active.shape[1] == 1 else run.active.any(1, keepdims=True)
        raw, marks = read_operand(run, index, flat, mask, size)
        shape = (run.programs, len(self.here), rows, depth)
        if marks is not None:
            found = marks.reshape(shape).any(-1)
            unknown.append(found[:, :, None, :] if across else found[..., None])
        entry = (self.committed, index, flat, mask)
        self.log(entry)
        self.reading.append(entry)
        return elements(raw.reshape(shape), kind)
