"""Instructions of a warp on small matrices: ldmatrix, stmatrix and mma.sync.

Thread l of a warp has, of an 8x8 matrix of 16-bit elements, elements 2 * (l % 4) and the next of row l / 4. mma's
operands are made of such 8x8 pieces (of 8x4 where elements have 32 bits). Products are summed in float32; a device
rounds such sums in its own ways, so the last bits may differ.
Source: NVIDIA, "PTX ISA", chapters 9.7.14.5 (fragments) and 9.7.14.5.15 (ldmatrix).
"""

from __future__ import annotations

import numpy as np

from fasttfm.kernels.proof.ptx.rounding import bf16_to_f32, f16_to_f32


def widened(words: np.ndarray, kind: str) -> np.ndarray:
    """32-bit registers as float32 elements: two of 16 bits along a new last axis, or one of TF32."""
    if kind == "tf32":  # of a float32 the lowest 13 bits do not count
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    pairs = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return (bf16_to_f32 if kind == "bf16" else f16_to_f32)(pairs)


class Matrices:
    def __init__(self, run) -> None:
        self.run = run
        self.warps = run.width // 32

    def rows(self, index: int, address, count: int):
        """The addresses of the rows of each matrix: (programs or 1, warps, matrices, 8)."""
        self.run.together(index)
        return self.firsts(self.run.spread(address), count)

    def mask(self, count: int):
        active = self.run.active
        return active if active is None or active.shape[1] == 1 else self.firsts(active, count)

    def code(self, count: int) -> np.ndarray:
        """Who touches each row: the thread that gave its address stands for the warp."""
        return self.firsts(self.run.code, count)

    def firsts(self, values: np.ndarray, count: int) -> np.ndarray:
        """Of each warp the threads that give the addresses of rows, 8 for a matrix."""
        return values.reshape(len(values), self.warps, 32)[:, :, : 8 * count].reshape(len(values), -1)

    def load(self, index: int, address, count: int, turned: bool):
        """`count` registers; each row's address comes from a thread of its own."""
        run = self.run
        address, mask = self.rows(index, address, count), self.mask(count)
        positions = run.shared.positions(index, address, mask, 16)
        raw = run.shared.flat[16].take(positions + run.shared.rows[16])
        words = np.ascontiguousarray(raw).view(np.uint32).reshape(run.programs, self.warps, count, 8, 4)
        if run.checks:
            run.races.read(index, address, mask, 16, self.code(count))
        run.shared.check_written(index, raw, mask, 4)
        if turned:
            halves = words.view(np.uint16).reshape(run.programs, self.warps, count, 8, 8)
            words = np.ascontiguousarray(halves.swapaxes(3, 4)).view(np.uint32)
        return tuple(words[:, :, i].reshape(run.shape) for i in range(count))

    def store(self, index: int, address, count: int, turned: bool, values) -> None:
        run = self.run
        address, mask = self.rows(index, address, count), self.mask(count)
        words = np.empty((run.programs, self.warps, count, 8, 4), dtype=np.uint32)
        for position, value in enumerate(values):
            words[:, :, position] = run.spread(value).reshape(-1, self.warps, 8, 4)
        if turned:
            halves = words.view(np.uint16).reshape(run.programs, self.warps, count, 8, 8)
            words = np.ascontiguousarray(halves.swapaxes(3, 4)).view(np.uint32)
        packed = words.view(np.complex128).reshape(run.programs, -1)
        run.shared.put(index, address, mask, packed, 16, self.code(count))

    def multiply(self, index: int, kind: str, a, b, c):
        """d = a b + c for 16 rows and 8 columns, a's fragments by rows and b's by columns; d's four registers."""
        self.run.together(index)
        left, right = self.left(a, kind), self.right(b, kind)
        product = np.matmul(left, right)
        tiles = product.reshape(len(product), self.warps, 2, 8, 4, 2)
        shape = (len(product), self.run.width)
        return tuple(tiles[:, :, i // 2, :, :, i % 2].reshape(shape) + c[i] for i in range(4))

    def left(self, registers, kind: str) -> np.ndarray:
        """(programs or 1, warps, 16, depth): registers come first by rows of 8, then by columns."""
        return self.assemble(registers, kind, len(registers) // 2, 2)

    def right(self, registers, kind: str) -> np.ndarray:
        """(programs or 1, warps, depth, 8)."""
        return self.assemble(registers, kind, len(registers), 1).swapaxes(2, 3)

    def assemble(self, registers, kind: str, deep: int, tall: int) -> np.ndarray:
        registers = [self.run.spread(r) for r in registers]
        programs = max(len(r) for r in registers)
        wide = 1 if kind == "tf32" else 2
        whole = np.empty((programs, self.warps, tall, 8, deep, 4, wide), dtype=np.float32)
        for position, register in enumerate(registers):
            elements = widened(register, kind).reshape(-1, self.warps, 8, 4, wide)
            whole[:, :, position % tall, :, position // tall] = elements
        return whole.reshape(programs, self.warps, 8 * tall, deep * 4 * wide)
