"""Dropout: a keep-mask as a function of seed and logical coordinates.

Every random number is a byte of a Philox4x32-7 block (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011; seven rounds are the fewest that pass BigCrush at this width):

    block  = philox(key=seed (64 bits), counter=(column // 16, row, plane, site))      four 32-bit words
    lane   = column % 16: byte lane % 4 of word lane // 4, lowest byte first
    keep   = byte of the lane >= threshold,      threshold = round(p * 256)
    kept values are multiplied by 256 / (256 - threshold), so that the expectation is exact

(row, column) is the index of an element in its logical matrix, plane the index of the matrix in its batch
(batch * H + head for attention weights (B, H, L, S); 0 for activations (M, N)), site the index of the call in the
model. Tiles, strides, padding and packing have no influence, so every kernel, every backward pass and the PyTorch
reference draw the same mask.

The rate is a multiple of 1/256, as in flash-attention: one block serves sixteen elements, and four comparisons of
register halves serve a word. Lanes are not exchanged between threads, because kernels choose the columns of a thread to
match: row-wise kernels take the eight columns of a 16-byte load, and attention loads the keys of a tile in the order of
spread(), in which a thread's scores of a matrix product belong to consecutive keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.parameter import Int64Pointer, Real, Varying

ROUNDS = tl.constexpr(7)  # after four, every word has the full shape
LEVELS = 256
"""Number of values of a lane."""


class Dropout(NamedTuple):
    """Dropout at one place of the model, as a kernel takes it."""

    seed: Int64Pointer
    """(1,) in device memory, so that a captured graph draws anew at each replay; None: nothing is dropped."""
    site: Varying
    threshold: Varying
    keep_scale: Real
    """The factor of kept values."""


def _on_cuda(_semantic: Any = None) -> tl.constexpr:
    """True if the kernel is compiled for an NVIDIA chip, for inline PTX on packed halves; False in the interpreter."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


_on_cuda.__triton_builtin__ = True  # type: ignore[attr-defined]


def _threads(_semantic: Any = None) -> tl.constexpr:
    """Threads of a program; 1 in the interpreter."""
    if _semantic is None:
        return tl.constexpr(1)
    options = _semantic.builder.options
    return tl.constexpr(options.num_warps * options.warp_size)


_threads.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def _two_bytes(word, upper):
    """Two bytes of each word as the halves of another, int32: the lower ones where upper is 0, the upper ones where it
    is 1."""
    if _on_cuda():
        pair = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, 0x4140 + 0x0202 * upper], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = word >> (16 * upper)
        pair = (word & 0xFF) | ((word & 0xFF00) << 8)
    return pair


@triton.constexpr_function
def unit_of(columns):
    """Neighbouring columns that a thread holds of a tile in the order of spread(), in a row."""
    return min(columns, 64) // 4


@triton.jit
def spread(COLUMNS: tl.constexpr):
    """(COLUMNS,): which of a tile's columns lies where, so that threads hold neighbours.

    A matrix unit gives a thread t of four the columns 8 n + 2 t and the next one, for every n. Of 64 columns it shall
    hold 16 t to 16 t + 15, a block of Philox; of 32 columns half a block, of 16 a quarter.
    """
    UNIT: tl.constexpr = unit_of(COLUMNS)
    n = tl.arange(0, COLUMNS)
    return n // (4 * UNIT) * (4 * UNIT) + n // 2 % 4 * UNIT + n % (4 * UNIT) // 8 * 2 + n % 2


@triton.jit
def _words(seed, site, plane, rows, blocks):
    """The four words of each block: (R, 1) rows and (1, .) blocks, int32."""
    # Rows, blocks and scalars are broadcast by the rounds themselves, as late as possible.
    w0, w1, w2, w3 = tl.philox(seed, blocks[None, :], rows[:, None], plane, site, ROUNDS)
    return (
        w0.to(tl.int32, bitcast=True), w1.to(tl.int32, bitcast=True), w2.to(tl.int32, bitcast=True),
        w3.to(tl.int32, bitcast=True),
    )  # fmt: skip


@triton.jit
def lanes(seed, site, plane, rows, first_column, COLUMNS: tl.constexpr):
    """The lanes of a tile, (R, COLUMNS) int16 in [0, 255].

    seed int64 scalar, site and plane int32 scalars; rows (R,) int32; the tile's columns are first_column (a multiple
    of 8) and the COLUMNS - 1 after it. A thread draws the half of a block that eight columns take, because that is what
    it loads of half precision; where it holds others the lanes go through shared memory.
    """
    units = first_column // 8 + tl.arange(0, COLUMNS // 8)
    w0, w1, w2, w3 = _words(seed, site, plane, rows, units // 2)
    lower = (units % 2 == 0)[None, :]
    return _lanes_of_words(tl.where(lower, w0, w2), tl.where(lower, w1, w3))


@triton.jit
def _lanes_of_words(first, second):
    """(R, 8 U) int16 from the two words (R, U) of eight columns."""
    pair = tl.join(first, second)
    pair = tl.join(_two_bytes(pair, 0), _two_bytes(pair, 1))
    lane = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))  # (R, U, word, pair, half)
    return tl.reshape(lane, (first.shape[0], 8 * first.shape[1]))


@triton.jit
def lanes_exchanged(seed, site, plane, rows, first_column, COLUMNS: tl.constexpr):
    """lanes() of a tile that comes from memory; first_column is a multiple of 16.

    A thread that has sixteen elements of the tile has the same eight columns of its lower and its upper half, of rows
    or, of a single row, of columns. It draws the block of one half, its neighbour that of the other, and they exchange
    what each needs.
    """
    R: tl.constexpr = rows.shape[0]
    U: tl.constexpr = COLUMNS // 8
    if 2 * _threads() <= R * U and R * U >= 4 and U >= 2:
        if R > 1:
            drawn = tl.broadcast_to(tl.reshape(rows, (2, R // 2, 1)), (2, R // 2, U // 2))
            drawn = tl.reshape(tl.permute(drawn, (1, 2, 0)), (R // 2, U))
            blocks = tl.arange(0, U) // 2
        else:
            drawn = rows[:, None]
            blocks = tl.arange(0, U // 2) // 2 + tl.arange(0, U // 2) % 2 * (U // 4)
        w0, w1, w2, w3 = tl.philox(seed, (first_column // 16 + blocks)[None, :], drawn, plane, site, ROUNDS)
        lane = _lanes_of_words(_exchanged(w0, w2, R, U), _exchanged(w1, w3, R, U))
    else:
        lane = lanes(seed, site, plane, rows, first_column, COLUMNS)
    return lane


@triton.jit
def _exchanged(lower, upper, R: tl.constexpr, U: tl.constexpr):
    """(R, U) int32: of every block a word of its lower half, at even places, and one of its upper half. Given are both
    of every other block: at even places of the lower half of the tile, at odd ones of the upper half."""
    # The compiler does not look behind a reduction: else it would have each thread draw all blocks that it reads.
    lower = tl.reduce(tl.expand_dims(lower, 2), 2, _either)
    upper = tl.reduce(tl.expand_dims(upper, 2), 2, _either)
    words = tl.reshape(tl.join(lower, upper), (R * U // 4, 2, 2))  # (., the tile's half, the block's half)
    return tl.reshape(tl.permute(words, (1, 0, 2)), (R, U)).to(tl.int32, bitcast=True)


@triton.jit
def lanes_spread(dropout, plane, rows, first_column, COLUMNS: tl.constexpr):
    """lanes() in the order of spread(), of a Dropout that with_seed() returned and that drops something.

    first_column is a multiple of COLUMNS. What a thread holds of a block is chosen by comparisons with numbers of
    columns. Where a thread holds neighbours these are known when compiling, and cost nothing; tl.join before a product
    would give the product another layout.
    """
    UNIT: tl.constexpr = unit_of(COLUMNS)
    PARTS: tl.constexpr = 16 // UNIT
    R: tl.constexpr = rows.shape[0]
    units = tl.arange(0, COLUMNS // UNIT)
    w0, w1, w2, w3 = _words(dropout.seed, dropout.site, plane, rows, first_column // 16 + units // PARTS)
    # (R, sets of four threads, pairs of a thread, threads, halves of a pair), of which words have no pairs
    w0 = tl.reshape(w0, (R, COLUMNS // (4 * UNIT), 1, 4))
    w1 = tl.reshape(w1, (R, COLUMNS // (4 * UNIT), 1, 4))
    w2 = tl.reshape(w2, (R, COLUMNS // (4 * UNIT), 1, 4))
    w3 = tl.reshape(w3, (R, COLUMNS // (4 * UNIT), 1, 4))
    pairs = tl.arange(0, UNIT // 2)[None, None, :, None]
    part = tl.reshape(units % PARTS, (1, COLUMNS // (4 * UNIT), 1, 4))
    if UNIT == 4:
        word = tl.where(part < 2, tl.where(part == 0, w0, w1), tl.where(part == 2, w2, w3))
    elif UNIT == 8:
        word = tl.where(pairs < 2, tl.where(part == 0, w0, w2), tl.where(part == 0, w1, w3))
    else:
        word = tl.where(pairs < 4, tl.where(pairs < 2, w0, w1), tl.where(pairs < 6, w2, w3))
    pair = _two_bytes(word, pairs % 2)
    half = tl.arange(0, 2)[None, None, None, None, :]
    lane = (tl.expand_dims(pair, 4) >> (16 * half)).to(tl.int16)
    return tl.reshape(lane, (R, COLUMNS))


@triton.jit
def select(values, lane, threshold):
    """values where lane keeps them, else zero; lane as lanes() makes it, threshold int32."""
    BITS: tl.constexpr = values.dtype.primitive_bitwidth
    if _on_cuda() and BITS == 16:
        # Lanes are compared as halves, which as small numbers they are.
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 keep; set.ge.u32.f16x2 keep, $2, $3; and.b32 $0, $1, keep; }", "=r,r,r,r,r",
            [values.to(tl.int16, bitcast=True), lane, threshold * 65537], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        kept = bits.to(values.dtype, bitcast=True)
    elif _on_cuda() and BITS == 32:
        kept = tl.inline_asm_elementwise(
            "{ .reg .pred a, b; setp.ge.f16x2 a|b, $4, $5; selp.f32 $0, $2, 0f00000000, a; "
            "selp.f32 $1, $3, 0f00000000, b; }", "=r,=r,r,r,r,r,r",
            [values, lane, threshold * 65537], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        kept = tl.where(lane >= threshold, values, 0.0)
    return kept


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _upper_bits(word, lower, below, any_kept):
    """The upper bit of each byte of word: whether the byte is at least threshold. lower: its lower seven bits, in every
    byte; below: all bits where its upper one is 0; any_kept: the upper bit of every byte, 0 where threshold is 256."""
    rest = (word | 0x80808080) - lower
    return ((word & rest) | ((word | rest) & below)) & any_kept


@triton.jit
def byte_bits(w0, w1, w2, w3, threshold):
    """Sixteen bits of each block, uint32: of lane l bit 8 (l % 4) + 7 - l // 4, whether it is at least threshold."""
    lower = (threshold & 127) * 0x01010101
    below = tl.where(threshold < 128, -1, 0).to(tl.uint32, bitcast=True)
    any_kept = tl.where(threshold < 256, 0x80808080, 0).to(tl.uint32)
    lower = lower.to(tl.uint32, bitcast=True)
    bits = _upper_bits(w0, lower, below, any_kept)
    bits |= _upper_bits(w1, lower, below, any_kept) >> 1
    bits |= _upper_bits(w2, lower, below, any_kept) >> 2
    bits |= _upper_bits(w3, lower, below, any_kept) >> 3
    return bits


@triton.jit
def keep_transposed(dropout, plane, rows, first_column, COLUMNS: tl.constexpr):
    """keep_mask() transposed, (COLUMNS, R) int1, for scores that a matrix product gives transposed.

    There a thread holds columns of as many blocks as it has rows. So that it need not draw them all, whoever has a
    block sends its sixteen bits as one word: a thirty-second of what the lanes would be. first_column is a multiple
    of 16.
    """
    blocks = first_column // 16 + tl.arange(0, COLUMNS // 16)
    w0, w1, w2, w3 = tl.philox(dropout.seed, blocks[None, :], rows[:, None], plane, dropout.site, ROUNDS)
    bits = byte_bits(w0, w1, w2, w3, dropout.threshold)
    # The compiler does not look behind a reduction: else it would have each thread draw all blocks that it reads.
    bits = tl.trans(tl.reduce(tl.expand_dims(bits.to(tl.int32, bitcast=True), 2), 2, _either))
    R: tl.constexpr = rows.shape[0]
    bits = tl.reshape(tl.broadcast_to(bits[:, None, :], (COLUMNS // 16, 16, R)), (COLUMNS, R))
    lane = tl.arange(0, COLUMNS) % 16
    bit = 1 << (lane % 4 * 8 + 7 - lane // 4)
    return (bits & bit[:, None]) != 0


@triton.jit
def keep_mask(seed, site, plane, rows, first_column, threshold, COLUMNS: tl.constexpr):
    """True where dropout keeps the element: (R, COLUMNS) int1. threshold int32 in [0, 256] = round(p * 256)."""
    return lanes(seed, site, plane, rows, first_column, COLUMNS) >= threshold


@triton.jit
def with_seed(dropout):
    """A Dropout that drops something with the seed's value for its pointer: a kernel reads it once. (No function of
    Triton's before 3.7 returns a tuple that holds None.)"""
    return Dropout(tl.load(dropout.seed), dropout.site, dropout.threshold, dropout.keep_scale)


@triton.jit
def dropped(values, dropout, plane, rows, first_column, COLUMNS: tl.constexpr):
    """values (R, COLUMNS) after dropout, of a Dropout that with_seed() returned and that drops something."""
    lane = lanes(dropout.seed, dropout.site, plane, rows, first_column, COLUMNS)
    return select(values, lane, dropout.threshold) * dropout.keep_scale


@triton.jit
def drop(values, dropout, rows, first_column, COLUMNS: tl.constexpr):
    """values (R, COLUMNS) of activations after dropout, if there is any."""
    if dropout.seed is not None:
        values = dropped(values, with_seed(dropout), 0, rows, first_column, COLUMNS)
    return values


@triton.jit
def drop_loaded(values, dropout, rows, first_column, COLUMNS: tl.constexpr):
    """drop() of values as they came from memory. Those of 16 bits are chosen in pairs, before they become float32."""
    if dropout.seed is not None:
        lane = lanes_exchanged(tl.load(dropout.seed), dropout.site, 0, rows, first_column, COLUMNS)
        values = select(values, lane, dropout.threshold).to(tl.float32) * dropout.keep_scale
    return values.to(tl.float32)


NOTHING_DROPPED = Dropout(None, 0, 0, 1.0)


def dropout_rate(dropout_p: float) -> tuple[int, float]:
    """Threshold and keep_scale of a Dropout; threshold 0 drops nothing."""
    threshold = round(dropout_p * LEVELS)
    return threshold, LEVELS / (LEVELS - threshold) if threshold < LEVELS else 0.0


def dropout_arguments(dropout_p: float = 0.0, seed: Tensor | None = None, site: int = 0) -> Dropout:
    """The Dropout of this rate; seed None drops nothing."""
    threshold, keep_scale = dropout_rate(dropout_p)
    if seed is None or threshold == 0:
        return Dropout(None, site, 0, 1.0)
    return Dropout(seed, site, threshold, keep_scale)
