"""Instructions of a warp on small matrices: ldmatrix, stmatrix and mma.sync.

Of an 8x8 matrix of 16-bit elements, thread l of a warp holds elements 2 * (l % 4) and 2 * (l % 4) + 1 of row l / 4. mma
operands consist of such 8x8 pieces (8x4 for 32-bit elements, 8x16 for 8-bit ones). Products are accumulated in float32,
integers exactly; a device rounds sums differently, so the last bits may differ.
Source: NVIDIA, "PTX ISA", chapters 9.7.14.5 (fragments) and 9.7.14.5.15 (ldmatrix).
"""

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
"""Bytes per element."""


def elements(raw: np.ndarray, kind: str) -> np.ndarray:
    """Numbers from their bits: float32, or float64 for integers and float64."""
    if kind == "tf32":  # the lowest 13 bits of a float32 are ignored
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in ("s8", "u8"):
        return raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    if kind == "f64":
        return raw.view(np.float64)
    return {"bf16": bf16_to_f32, "f16": f16_to_f32, "e4m3": e4m3_to_f32, "e5m2": e5m2_to_f32}[kind](raw)


def marked(marks: np.ndarray, kind: str) -> np.ndarray:
    """Registers with 1.0 for marked elements and 0 for others."""
    size = SIZES[kind]
    some = {1: 0x38, 2: 0x3C00, 4: 0x3F800000, 8: 0x3FF0000000000000}[size]
    parts = np.ascontiguousarray(marks).view(f"u{size}")
    return np.where(parts != 0, parts.dtype.type(some), parts.dtype.type(0)).view(marks.dtype)


def summed(products: list[np.ndarray], registers, kind: str, held: bool) -> tuple[np.ndarray, ...]:
    """Registers of accumulators plus products, one per element. held: integers saturate."""
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
    """Marks of accumulators: from the product's marks, or the register's own."""
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
        """Addresses of the rows of each matrix: (programs or 1, warps * matrices * 8)."""
        self.run.together(index)
        return self.firsts(self.run.spread(address), count)

    def mask(self, count: int):
        active = self.run.active
        return active if active is None or active.shape[1] == 1 else self.firsts(active, count)

    def code(self, count: int) -> np.ndarray:
        """Thread code of each row access: the thread that supplies the row's address."""
        return self.firsts(self.run.code, count)

    def firsts(self, values: np.ndarray, count: int) -> np.ndarray:
        """Values of the threads that supply row addresses: the first 8 per matrix of each warp."""
        return values.reshape(len(values), self.warps, 32)[:, :, : 8 * count].reshape(len(values), -1)

    def load(self, index: int, address, count: int, turned: bool):
        """Load `count` registers; each row's address is supplied by one thread."""
        run = self.run
        address, mask = self.rows(index, address, count), self.mask(count)
        positions = run.shared.positions(index, address, mask, 16) + run.shared.rows[16]
        if run.checks:
            run.races.read(index, address, mask, 16, self.code(count))
            marks = run.shared.unwritten(positions, 16, mask)
            if marks is not None:
                run.undefined.loaded(index, self.dealt(marks, count, turned))
        return self.dealt(run.shared.flat[16].take(positions), count, turned)

    def dealt(self, raw: np.ndarray, count: int, turned: bool) -> tuple[np.ndarray, ...]:
        """Distribute rows of matrices to the registers of threads."""
        run = self.run
        rows = np.ascontiguousarray(raw).reshape(run.programs, self.warps, count, 8)
        if turned:
            words = rows.view(np.uint32).reshape(run.programs, self.warps, count, 8, 4)
            rows = self.transposed(words).view(rows.dtype)[..., 0]
        return tuple(rows[:, :, i].reshape(run.programs, -1).view(np.uint32) for i in range(count))

    def collected(self, values, count: int, turned: bool) -> np.ndarray:
        """Collect registers of threads to rows of matrices, the inverse of dealt()."""
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

    def multiply(self, index: int, kinds: tuple[str, str, str], held: bool, tiles: tuple[int, int, int], a, b, c):
        """Return the registers of d = a b + c, with row fragments of a and column fragments of b.

        kinds: types of a, b and c. tiles: number of row pieces, column pieces and depth steps that neighbouring
        instructions multiply together (products.py).
        """
        self.run.together(index)
        rows, columns, steps = tiles
        left = self.left(a, kinds[0], len(a) * columns // (len(b) * rows), rows, steps)
        return summed(self.pieces(np.matmul(left, self.right(b, kinds[1], columns, steps)), rows), c, kinds[2], held)

    def unknown(self, kinds: tuple[str, str, str], a, b, c):
        """Marks of d: rows and columns with marked operands. a, b, c: the operands' marks."""
        rows = self.left([marked(r, kinds[0]) for r in a], kinds[0], len(a) // len(b)).any(-1, keepdims=True)
        columns = self.right([marked(r, kinds[1]) for r in b], kinds[1]).any(-2, keepdims=True)
        return sum_marks(self.pieces(np.logical_or(rows, columns)), c, kinds[2])

    def pieces(self, product: np.ndarray, rows: int = 1) -> list[np.ndarray]:
        """Each thread's elements of products (programs, warps, rows, columns), piece by piece along the columns, in
        register order within a piece. Row pieces have 8 or 16 rows, column pieces 8 columns."""
        programs, _, height, width = product.shape
        shape = (programs, self.warps, rows, height // (8 * rows), 8, width // 8, 2)
        return in_registers(product, shape, (2, 5, 3, 6, 0, 1, 4), self.run.width)

    def left(self, registers, kind: str, tall: int = 2, rows: int = 1, steps: int = 1) -> np.ndarray:
        """(programs or 1, warps, 8 * tall * rows, depth); registers are ordered by pieces of 8 rows, then by depth."""
        return self.assemble(registers, kind, tall, rows, steps)

    def right(self, registers, kind: str, columns: int = 1, steps: int = 1) -> np.ndarray:
        """(programs or 1, warps, depth, 8 * columns), columns in the order IN_FOURS."""
        return self.assemble(registers, kind, 1, columns, steps, in_fours=True).swapaxes(2, 3)

    def assemble(self, registers, kind: str, tall: int, rows: int, steps: int, *, in_fours: bool = False) -> np.ndarray:
        registers = [self.run.spread(r) for r in registers]
        programs, each = max(len(r) for r in registers), len(registers) // (rows * steps)
        kind_of_four = np.complex128 if registers[0].itemsize == 4 else np.dtype((np.void, 32))  # moved as one
        fours: np.ndarray = np.empty((programs, self.warps, rows, tall, 8, steps, each // tall), dtype=kind_of_four)
        for position, register in enumerate(registers):
            piece, inner = divmod(position, each)
            row, step = divmod(piece, steps)
            lines = np.ascontiguousarray(register).view(kind_of_four).reshape(-1, self.warps, 8)
            place = fours[:, :, row, inner % tall, :, step, inner // tall]
            if in_fours:
                place[:, :, :4], place[:, :, 4:] = lines[:, :, ::2], lines[:, :, 1::2]
            else:
                place[...] = lines
        words = fours.view(registers[0].dtype)
        numbers = elements(words.view(f"u{SIZES[kind]}"), kind)
        return numbers.reshape(programs, self.warps, 8 * tall * rows, -1)


IN_FOURS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Order of eight columns in which the columns that four threads hold in the same register are adjacent."""


def in_registers(product: np.ndarray, shape: tuple[int, ...], order: tuple[int, ...], width: int) -> list[np.ndarray]:
    """Distribute sums (programs, ..., columns), columns in the order IN_FOURS, to the registers of `width` threads.

    shape: shape of the sums with four columns as one element. order: permutation of its axes, register axes first.
    """
    product = np.ascontiguousarray(product)
    four = {1: np.uint32, 4: np.complex128}.get(product.itemsize)  # four elements move as one, which is faster
    if four is None:
        parts = product.reshape(*shape, 4).transpose(*order, len(shape))
    else:
        parts = product.view(four).reshape(shape).transpose(order)
    return list(np.ascontiguousarray(parts).view(product.dtype).reshape(-1, len(product), width))
