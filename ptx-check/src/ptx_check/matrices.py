"""Instructions of a warp on small matrices: ldmatrix, stmatrix and mma.sync.

Thread l of a warp has, of an 8x8 matrix of 16-bit elements, elements 2 * (l % 4) and the next of row l / 4. mma's
operands are made of such 8x8 pieces (of 8x4 where elements have 32 bits, 8x16 where they have 8). Products are summed
in float32, whole numbers exactly; a device rounds such sums in its own ways, so the last bits may differ.
Source: NVIDIA, "PTX ISA", chapters 9.7.14.5 (fragments) and 9.7.14.5.15 (ldmatrix).
"""

from __future__ import annotations

import numpy as np

from ptx_check.rounding import (
    bf16_to_f32,
    clamped,
    e4m3_to_f32,
    e5m2_to_f32,
    f16_to_f32,
    f32_to_f16,
    halves,
    pack,
)

SIZES = {"tf32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "f64": 8}
"""Bytes of an element."""


def elements(raw: np.ndarray, kind: str) -> np.ndarray:
    """Numbers whose bits are given: float32, or float64 of whole numbers and of float64."""
    if kind == "tf32":  # of a float32 the lowest 13 bits do not count
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in ("s8", "u8"):
        return raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    if kind == "f64":
        return raw.view(np.float64)
    return {"bf16": bf16_to_f32, "f16": f16_to_f32, "e4m3": e4m3_to_f32, "e5m2": e5m2_to_f32}[kind](raw)


def widened(words: np.ndarray, kind: str) -> np.ndarray:
    """Registers as numbers, those of a register along a new last axis."""
    size = SIZES[kind]
    return elements(np.ascontiguousarray(words)[..., None].view(f"u{size}"), kind)


def marked(marks: np.ndarray, kind: str) -> np.ndarray:
    """Registers of elements that are some number where the element has a mark, else 0."""
    size = SIZES[kind]
    some = {1: 0x38, 2: 0x3C00, 4: 0x3F800000, 8: 0x3FF0000000000000}[size]
    parts = np.ascontiguousarray(marks).view(f"u{size}")
    return np.where(parts != 0, parts.dtype.type(some), parts.dtype.type(0)).view(marks.dtype)


def summed(products: list[np.ndarray], registers, kind: str, held: bool) -> tuple[np.ndarray, ...]:
    """Registers of sums plus products, one for every element; held: whole numbers stay in their range."""
    if kind == "f16":
        pairs = zip(products[::2], products[1::2], registers)
        return tuple(pack(*(f32_to_f16(part + f16_to_f32(old)) for part, old in zip((low, high), halves(both))))
                     for low, high, both in pairs)  # fmt: skip
    if kind == "s32":
        totals = (part.astype(np.int64) + old.view(np.int32) for part, old in zip(products, registers))
        return tuple((clamped(each, np.int32) if held else each.astype(np.int32)).view(np.uint32) for each in totals)
    real, bits = (np.float64, np.uint64) if kind == "f64" else (np.float32, np.uint32)
    return tuple((part + old.view(real)).view(bits) for part, old in zip(products, registers))


def sum_marks(found: list[np.ndarray], registers, kind: str) -> tuple[np.ndarray, ...]:
    """Marks of sums: where a product's are, or the register has any."""
    if kind == "f16":
        pairs = zip(found[::2], found[1::2], registers)
        return tuple(pack(*(np.where(new | (old != 0), np.uint16(0xFFFF), np.uint16(0))
                            for new, old in zip((low, high), halves(both)))) for low, high, both in pairs)  # fmt: skip
    return tuple(
        np.where(new | (old != 0), ~old.dtype.type(0), old.dtype.type(0)) for new, old in zip(found, registers)
    )


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
        """Return who touches each row: the thread that gave its address stands for the warp."""
        return self.firsts(self.run.code, count)

    def firsts(self, values: np.ndarray, count: int) -> np.ndarray:
        """The threads of each warp that give the addresses of rows, 8 for a matrix."""
        return values.reshape(len(values), self.warps, 32)[:, :, : 8 * count].reshape(len(values), -1)

    def load(self, index: int, address, count: int, turned: bool):
        """`count` registers; each row's address comes from a thread of its own."""
        run = self.run
        address, mask = self.rows(index, address, count), self.mask(count)
        positions = run.shared.positions(index, address, mask, 16) + run.shared.rows[16]
        if run.checks:
            run.races.read(index, address, mask, 16, self.code(count))
            marks = run.shared.unwritten(positions, 16)
            if marks is not None:
                run.undefined.loaded(index, self.dealt(marks, count, turned))
        return self.dealt(run.shared.flat[16].take(positions), count, turned)

    def dealt(self, raw: np.ndarray, count: int, turned: bool) -> tuple[np.ndarray, ...]:
        """Rows of matrices as the registers of threads."""
        run = self.run
        words = np.ascontiguousarray(raw).view(np.uint32).reshape(run.programs, self.warps, count, 8, 4)
        if turned:
            words = self.transposed(words)
        return tuple(words[:, :, i].reshape(run.shape) for i in range(count))

    def collected(self, values, count: int, turned: bool) -> np.ndarray:
        """The inverse."""
        run = self.run
        words = np.empty((run.programs, self.warps, count, 8, 4), dtype=np.uint32)
        for position, value in enumerate(values):
            words[:, :, position] = run.spread(value).reshape(-1, self.warps, 8, 4)
        if turned:
            words = self.transposed(words)
        return words.view(np.complex128).reshape(run.programs, -1)

    def transposed(self, words: np.ndarray) -> np.ndarray:
        halves = words.view(np.uint16).reshape(*words.shape[:3], 8, 8)
        return np.ascontiguousarray(halves.swapaxes(3, 4)).view(np.uint32)

    def store(self, index: int, address, count: int, turned: bool, values, marks=None) -> None:
        run = self.run
        address, mask = self.rows(index, address, count), self.mask(count)
        unknown = None if marks is None else self.collected(marks, count, turned)
        run.shared.put(index, address, mask, self.collected(values, count, turned), 16, self.code(count), unknown)

    def multiply(self, index: int, kinds: tuple[str, str, str], held: bool, a, b, c):
        """d = a b + c for 8 columns, a's fragments by rows and b's by columns; d's registers. kinds: of a, b and c."""
        self.run.together(index)
        left, right = self.left(a, kinds[0], len(a) // len(b)), self.right(b, kinds[1])
        return summed(self.pieces(np.matmul(left, right)), c, kinds[2], held)

    def unknown(self, kinds: tuple[str, str, str], a, b, c):
        """Marks of the sums: of rows and columns in which an operand has any; a, b and c are the operands' marks."""
        rows = self.left([marked(r, kinds[0]) for r in a], kinds[0], len(a) // len(b)).any(-1, keepdims=True)
        columns = self.right([marked(r, kinds[1]) for r in b], kinds[1]).any(-2, keepdims=True)
        return sum_marks(self.pieces(np.logical_or(rows, columns)), c, kinds[2])

    def pieces(self, product: np.ndarray) -> list[np.ndarray]:
        """Each thread's elements of products (programs, warps, 8 or 16 rows, 8 columns), in the order of registers."""
        tall = product.shape[2] // 8
        tiles = product.reshape(len(product), self.warps, tall, 8, 4, 2)
        shape = (len(product), self.run.width)
        return [tiles[:, :, i // 2, :, :, i % 2].reshape(shape) for i in range(2 * tall)]

    def left(self, registers, kind: str, tall: int = 2) -> np.ndarray:
        """(programs or 1, warps, 8 tall, depth): registers come first by rows of 8, then by columns."""
        return self.assemble(registers, kind, len(registers) // tall, tall)

    def right(self, registers, kind: str) -> np.ndarray:
        """(programs or 1, warps, depth, 8)."""
        return self.assemble(registers, kind, len(registers), 1).swapaxes(2, 3)

    def assemble(self, registers, kind: str, deep: int, tall: int) -> np.ndarray:
        registers = [self.run.spread(r) for r in registers]
        programs = max(len(r) for r in registers)
        wide = registers[0].dtype.itemsize // SIZES[kind]
        real = np.float64 if kind in ("s8", "u8", "f64") else np.float32
        whole = np.empty((programs, self.warps, tall, 8, deep, 4, wide), dtype=real)
        for position, register in enumerate(registers):
            numbers = widened(register, kind).reshape(-1, self.warps, 8, 4, wide)
            whole[:, :, position % tall, :, position // tall] = numbers
        return whole.reshape(programs, self.warps, 8 * tall, deep * 4 * wide)
