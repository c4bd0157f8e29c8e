"""Dropout: a keep-mask as a function of seed and logical coordinates.

Every random number is a byte of a Philox4x32-7 block (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011; seven rounds are the fewest that pass BigCrush at this width):

    block  = philox(key=seed (64 bits), counter=(column // 16, row, plane, site))      four 32-bit words
    lane   = column % 16: byte lane % 4 of word lane // 4, lowest byte first
    keep   = byte of the lane >= threshold,      threshold = round(p * 256)
    kept values are multiplied by 256 / (256 - threshold): the expectation is exact

(row, column) is the index of an element in its logical matrix, plane the index of the matrix in its batch
(batch * H + head for attention weights (B, H, L, S); 0 for activations (M, N)), site the index of the call in the
model. Tiles, strides, padding and packing have no influence: all kernels, forward and backward, and the PyTorch
reference draw the same mask.

The rate is a multiple of 1/256, as in flash-attention: one block serves sixteen elements, and the bytes of a word are
compared as halves of packed registers. Kernels choose the columns of a thread so that it draws its own lanes: row-wise
kernels take the eight columns of a 16-byte load, and attention loads the keys of a tile in the order of spread(), in
which a thread's scores of a matrix product belong to consecutive keys. Where threads would draw the same blocks,
lanes_exchanged() and keep_transposed() exchange words instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.parameter import Int64Pointer, Real, Varying

ROUNDS = tl.constexpr(7)  # from four on, every word has the full broadcast shape
LEVELS = 256
"""Values of a lane, and denominator of the rate."""


class Dropout(NamedTuple):
    """Dropout at one site of the model, as a kernel parameter."""

    seed: Int64Pointer
    """(1,) in device memory, so that a captured graph draws anew at each replay; None: no dropout."""
    site: Varying
    threshold: Varying
    """round(p * 256); lanes below it are dropped."""
    keep_scale: Real
    """Factor of kept values."""


def on_cuda(_semantic: Any = None) -> tl.constexpr:
    """Return whether the kernel compiles for an NVIDIA chip and may use inline PTX; False in the interpreter."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


on_cuda.__triton_builtin__ = True  # type: ignore[attr-defined]


def _threads(_semantic: Any = None) -> tl.constexpr:
    """Return the threads of a program; 1 in the interpreter."""
    if _semantic is None:
        return tl.constexpr(1)
    options = _semantic.builder.options
    return tl.constexpr(options.num_warps * options.warp_size)


_threads.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def _two_bytes(word, upper):
    """Unpack two bytes of each word into the halves of an int32: the lower two where upper is 0, the upper where 1."""
    if on_cuda():
        pair = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, 0x4140 + 0x0202 * upper], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = word >> (16 * upper)
        pair = (word & 0xFF) | ((word & 0xFF00) << 8)
    return pair


@triton.constexpr_function
def unit_of(columns):
    """Return how many consecutive columns a thread holds per row of a tile in the order of spread()."""
    return min(columns, 64) // 4


@triton.jit
def spread(COLUMNS: tl.constexpr):
    """Return the permutation (COLUMNS,) of a tile's columns that gives each thread consecutive ones after a product.

    In the accumulator, thread t of four holds positions 8 n + 2 t and 8 n + 2 t + 1 for every n. The permutation puts
    columns 16 t to 16 t + 15 of 64 there, one Philox block; of 32 columns half a block, of 16 a quarter.
    """
    UNIT: tl.constexpr = unit_of(COLUMNS)
    n = tl.arange(0, COLUMNS)
    return n // (4 * UNIT) * (4 * UNIT) + n // 2 % 4 * UNIT + n % (4 * UNIT) // 8 * 2 + n % 2


@triton.jit
def spread_columns(x):
    """Return x (R, COLUMNS) with its columns in the order of spread()."""
    R: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    UNIT: tl.constexpr = unit_of(COLUMNS)
    x = tl.reshape(x, (R * COLUMNS // (4 * UNIT), 4, UNIT // 2, 2))
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), (R, COLUMNS))


@triton.jit
def _words(seed, site, plane, rows, blocks):
    """Return the four words of each block, int32 (R, U); rows (R,), blocks (U,)."""
    # The rounds themselves broadcast rows, blocks and scalars, as late as possible.
    w0, w1, w2, w3 = tl.philox(seed, blocks[None, :], rows[:, None], plane, site, ROUNDS)
    return (
        w0.to(tl.int32, bitcast=True), w1.to(tl.int32, bitcast=True), w2.to(tl.int32, bitcast=True),
        w3.to(tl.int32, bitcast=True),
    )  # fmt: skip


@triton.jit
def lanes(seed, site, plane, rows, first_column, COLUMNS: tl.constexpr):
    """Return the lanes of a tile, (R, COLUMNS) int16 in [0, 255].

    seed int64 scalar, site and plane int32 scalars, rows (R,) int32; columns begin at first_column, a multiple of 8. A
    thread takes eight columns of a block, a 16-byte load in half precision; for other layouts the lanes go through
    shared memory.
    """
    units = first_column // 8 + tl.arange(0, COLUMNS // 8)
    w0, w1, w2, w3 = _words(seed, site, plane, rows, units // 2)
    lower = (units % 2 == 0)[None, :]
    return _lanes_of_words(tl.where(lower, w0, w2), tl.where(lower, w1, w3))


@triton.jit
def _lanes_of_words(first, second):
    """Return the lanes (R, 8 U) int16 from the two words (R, U) of every eight columns."""
    pair = tl.join(first, second)
    pair = tl.join(_two_bytes(pair, 0), _two_bytes(pair, 1))
    lane = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))  # (R, U, word, pair, half)
    return tl.reshape(lane, (first.shape[0], 8 * first.shape[1]))


@triton.jit
def lanes_exchanged(seed, site, plane, rows, first_column, COLUMNS: tl.constexpr):
    """Return lanes() for a tile loaded from memory; first_column is a multiple of 16.

    A thread with sixteen elements of the tile holds eight columns in its lower half and the same in its upper half:
    halves of the rows, or of the columns of a single row. It draws the whole block of one half, its neighbour that of
    the other, and they exchange words.
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
    """Return (R, U) int32: at even positions a word of a block's lower half, at odd ones of its upper. lower, upper:
    these words of the drawn blocks, which are of the tile's lower half at even positions, of its upper at odd ones."""
    # A no-op reduction stops rematerialization, in which each thread would draw all blocks that it reads.
    lower = tl.reduce(tl.expand_dims(lower, 2), 2, _either)
    upper = tl.reduce(tl.expand_dims(upper, 2), 2, _either)
    words = tl.reshape(tl.join(lower, upper), (R * U // 4, 2, 2))  # (., half of the tile, half of the block)
    return tl.reshape(tl.permute(words, (1, 0, 2)), (R, U)).to(tl.int32, bitcast=True)


@triton.jit
def lanes_spread(dropout, plane, rows, first_column, COLUMNS: tl.constexpr):
    """Return lanes() in the order of spread(); dropout: from with_seed().

    first_column is a multiple of COLUMNS. Comparisons of column indices select the part of a block that a thread holds.
    They are known at compile time where a thread holds consecutive columns, and then cost nothing; tl.join before a
    product would change the layout of the product.
    """
    UNIT: tl.constexpr = unit_of(COLUMNS)
    PARTS: tl.constexpr = 16 // UNIT
    R: tl.constexpr = rows.shape[0]
    units = tl.arange(0, COLUMNS // UNIT)
    w0, w1, w2, w3 = _words(dropout.seed, dropout.site, plane, rows, first_column // 16 + units // PARTS)
    # (R, groups of four threads, pairs of a thread, threads, halves of a pair); words have size 1 along pairs
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
    """Return values where lane >= threshold, else zero; lane: from lanes(), threshold int32."""
    BITS: tl.constexpr = values.dtype.primitive_bitwidth
    if on_cuda() and BITS == 16:
        # Lanes are compared as float16 bit patterns: subnormals, which order like the integers.
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 keep; set.ge.u32.f16x2 keep, $2, $3; and.b32 $0, $1, keep; }", "=r,r,r,r,r",
            [values.to(tl.int16, bitcast=True), lane, threshold * 65537], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        kept = bits.to(values.dtype, bitcast=True)
    elif on_cuda() and BITS == 32:
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
    """Return whether each byte of word is at least threshold, in its upper bit. lower: threshold's lower seven bits, in
    every byte; below: all ones if threshold < 128, else 0; any_kept: every byte's upper bit, 0 if threshold is 256."""
    rest = (word | 0x80808080) - lower
    return ((word & rest) | ((word | rest) & below)) & any_kept


@triton.jit
def byte_bits(w0, w1, w2, w3, threshold):
    """Return sixteen bits per block, uint32: bit 8 (l % 4) + 7 - l // 4 tells whether lane l is at least threshold."""
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
    """Return keep_mask() transposed, (COLUMNS, R) int1, for transposed scores of a matrix product.

    There a thread holds columns of as many blocks as it has rows. Instead of drawing them all, threads draw a block
    each and send its sixteen bits as one word, an eighth of the bytes of its lanes. first_column is a multiple of 16.
    """
    blocks = first_column // 16 + tl.arange(0, COLUMNS // 16)
    w0, w1, w2, w3 = tl.philox(dropout.seed, blocks[None, :], rows[:, None], plane, dropout.site, ROUNDS)
    bits = byte_bits(w0, w1, w2, w3, dropout.threshold)
    # A no-op reduction stops rematerialization, in which each thread would draw all blocks that it reads.
    bits = tl.trans(tl.reduce(tl.expand_dims(bits.to(tl.int32, bitcast=True), 2), 2, _either))
    R: tl.constexpr = rows.shape[0]
    bits = tl.reshape(tl.broadcast_to(bits[:, None, :], (COLUMNS // 16, 16, R)), (COLUMNS, R))
    lane = tl.arange(0, COLUMNS) % 16
    bit = 1 << (lane % 4 * 8 + 7 - lane // 4)
    return (bits & bit[:, None]) != 0


@triton.jit
def keep_mask(seed, site, plane, rows, first_column, threshold, COLUMNS: tl.constexpr):
    """Return the keep-mask (R, COLUMNS) int1; threshold int32 in [0, 256], round(p * 256)."""
    return lanes(seed, site, plane, rows, first_column, COLUMNS) >= threshold


@triton.jit
def with_seed(dropout):
    """Return a Dropout with the seed's value in place of its pointer, so that a kernel loads it once. Not for None:
    before Triton 3.7 no function returns a tuple that holds None."""
    return Dropout(tl.load(dropout.seed), dropout.site, dropout.threshold, dropout.keep_scale)


@triton.jit
def dropped(values, dropout, plane, rows, first_column, COLUMNS: tl.constexpr):
    """Return values (R, COLUMNS) after dropout; dropout: from with_seed()."""
    lane = lanes(dropout.seed, dropout.site, plane, rows, first_column, COLUMNS)
    return select(values, lane, dropout.threshold) * dropout.keep_scale


@triton.jit
def drop(values, dropout, rows, first_column, COLUMNS: tl.constexpr):
    """Return activations (R, COLUMNS) after dropout, unchanged if there is none."""
    if dropout.seed is not None:
        values = dropped(values, with_seed(dropout), 0, rows, first_column, COLUMNS)
    return values


@triton.jit
def drop_loaded(values, dropout, rows, first_column, COLUMNS: tl.constexpr):
    """Return drop() of loaded values in float32. 16-bit values are selected in pairs, before their conversion."""
    if dropout.seed is not None:
        lane = lanes_exchanged(tl.load(dropout.seed), dropout.site, 0, rows, first_column, COLUMNS)
        values = select(values, lane, dropout.threshold).to(tl.float32) * dropout.keep_scale
    return values.to(tl.float32)


NOTHING_DROPPED = Dropout(None, 0, 0, 1.0)


def dropout_rate(dropout_p: float) -> tuple[int, float]:
    """Return threshold and keep_scale of a Dropout; threshold 0 drops nothing."""
    threshold = round(dropout_p * LEVELS)
    return threshold, LEVELS / (LEVELS - threshold) if threshold < LEVELS else 0.0


def dropout_arguments(dropout_p: float = 0.0, seed: Tensor | None = None, site: int = 0) -> Dropout:
    """Return the Dropout of this rate; seed None drops nothing."""
    threshold, keep_scale = dropout_rate(dropout_p)
    if seed is None or threshold == 0:
        return Dropout(None, site, 0, 1.0)
    return Dropout(seed, site, threshold, keep_scale)
