"""wgmma: four warps multiply a tile of 64 rows, operands in shared memory, the sums in registers.

An operand in shared memory is told by a descriptor: where it begins, two strides, and how its 16-byte pieces are
swizzled. Along the depth K ("K-major") a row of the tile lies in 32, 64 or 128 bytes, eight rows follow each other and
`stride` bytes lead to the next eight; the other way ("MN-major", transposed) eight steps of K follow each other, each
with 16, 32 or 64 elements of the rows, `stride` bytes lead to the next eight of K and `leading` bytes to the next
elements of the rows. A swizzle exchanges address bits 4 to 6 by those that lie three higher.

A product may read its operands, and its sums be unfinished, until wgmma.wait_group: sums that are used before are
reported, and memory that is written before is a race.
Source: NVIDIA, "PTX ISA", chapters 9.7.15.5 (layouts and descriptors) and 9.7.15.5.2 (fragments).
"""

from __future__ import annotations

import numpy as np

from fasttfm.kernels.proof.ptx.faults import Unsupported
from fasttfm.kernels.proof.ptx.matrices import widened
from fasttfm.kernels.proof.ptx.races import COLLECTIVE

_SWIZZLES = {1: 128, 2: 64, 3: 32}
"""The descriptor's two highest bits -> bytes that a row of the pattern has."""


def positions(descriptor: np.ndarray, rows: int, depth: int, size: int, turned: bool) -> np.ndarray:
    """Byte addresses (..., rows, depth) of the elements of an operand; descriptor (...) uint64. Raises ValueError for
    a layout without swizzle, or descriptors that differ in more than where they begin."""
    d = descriptor.astype(np.uint64)
    start = ((d & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)
    leading, stride = (int((int(d.flat[0]) >> bit & 0x3FFF) << 4) for bit in (16, 32))
    mode, base = int(d.flat[0]) >> 62, int(d.flat[0]) >> 49 & 7
    if mode not in _SWIZZLES or base or ((d ^ d.flat[0]) >> np.uint64(14)).any():
        raise ValueError(f"a matrix descriptor {int(d.flat[0]):#x} without swizzle, or of several kinds")
    pattern = _SWIZZLES[mode]
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if turned:
        across = pattern // size
        offset = row % across * size + row // across * leading + k % 8 * pattern + k // 8 * stride
    else:
        offset = row % 8 * pattern + row // 8 * stride + k * size
    address = start[..., None, None] + offset
    return address ^ (address >> 3 & (pattern // 16 - 1) << 4)


class Groups:
    """Products on their way, by group."""

    def __init__(self, run) -> None:
        self.run = run
        self.count = run.width // 128
        self.committed = 0
        self.open: dict[str, int] = {}
        """Registers whose product was not waited for, and its group."""
        self.reading: list[tuple] = []
        """(group, instruction, addresses) of operands that may still be read."""

    def commit(self, index: int) -> None:
        self.committed += 1

    def wait(self, index: int, allowed: int) -> None:
        done = self.committed - allowed
        self.open = {name: group for name, group in self.open.items() if group >= done}
        for entry in self.reading:
            self.log(entry)
        self.reading = [entry for entry in self.reading if entry[0] >= done]

    def check(self, index: int, names: list[str]) -> None:
        """An instruction reads registers: none may be on its way."""
        if any(name in self.open for name in names):
            self.run.fault("unwritten", index, "the sums of a product are used before wgmma.wait_group")

    def move(self, names: list[str]) -> None:
        """mov: the first register becomes as unfinished, or finished, as the second."""
        destination, source = names
        if source in self.open:
            self.open[destination] = self.open[source]
        else:
            self.open.pop(destination, None)

    def remember(self) -> None:
        """After a barrier: operands of unfinished products are still read in the new stretch."""
        for entry in self.reading:
            self.log(entry)

    def log(self, entry) -> None:
        _, index, address, mask = entry
        if self.run.checks:
            self.run.races.read(index, address, mask, 2, np.full((1, 1), COLLECTIVE, np.int64))

    def multiply(self, index, kind, columns, depth, from_registers, left, right, scale, turned, old, names):
        """The new sums, columns / 2 registers a thread: (64, columns) for each of the program's warpgroups."""
        run = self.run
        if not self.count or run.width % 128:
            raise Unsupported("wgmma needs groups of four warps", run.launch.code.instructions[index].location)
        if from_registers:
            a = self.fragments(left, kind)
        else:
            a = self.operand(index, left[0], 64, depth, kind, bool(turned[0]))
        b = self.operand(index, right, columns, depth, kind, bool(turned[1]))
        product = np.matmul(a, b.swapaxes(-1, -2))  # (programs, groups, 64, columns)
        tiles = product.reshape(len(product), self.count, 4, 2, 8, columns // 8, 4, 2)
        shape = (len(product), run.width)
        made = []
        for position, before in enumerate(old):
            piece = tiles[:, :, :, position // 2 % 2, :, position // 4, :, position % 2].reshape(shape)
            made.append(np.where(scale, before + piece, piece))
            self.open[names[position]] = self.committed
        return made

    def fragments(self, registers, kind) -> np.ndarray:
        """Operand a from registers, (programs, groups, 64, depth): as mma's, 16 rows a warp."""
        matrices = self.run.matrices
        warps = matrices.left(registers, kind)
        return warps.reshape(len(warps), self.count, 64, warps.shape[-1])

    def operand(self, index, descriptor, rows, depth, kind, turned) -> np.ndarray:
        """(programs, groups, rows, depth) float32, from shared memory."""
        run, size = self.run, 4 if kind == "tf32" else 2
        descriptor = run.spread(descriptor).reshape(descriptor.shape[0], self.count, 128)
        if (descriptor != descriptor[:, :, :1]).any():
            run.fault("divergence", index, "the threads of a warpgroup have different matrix descriptors")
        try:
            address = positions(descriptor[:, :, 0], rows, depth, size, turned)
        except ValueError as error:
            raise Unsupported(str(error), run.launch.code.instructions[index].location) from None
        flat = address.reshape(len(address), -1).astype(np.uint32)
        mask = run.active if run.active is None or run.active.shape[1] == 1 else run.active.any(1, keepdims=True)
        inside = run.shared.positions(index, flat, mask, size)
        raw = run.shared.flat[size].take(inside + run.shared.rows[size])
        run.shared.check_written(index, raw, mask, size)
        entry = (self.committed, index, flat, mask)
        self.log(entry)
        self.reading.append(entry)
        raw = raw.reshape(run.programs, self.count, rows, depth)
        if kind == "tf32":
            return widened(raw, kind)[..., 0]
        return widened(np.ascontiguousarray(raw).view(np.uint32), kind).reshape(raw.shape)
