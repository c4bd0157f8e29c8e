"""The one dropout convention: a keep-mask from a seed and logical coordinates.

Every random number is a 16-bit lane of a Philox4x32-7 block (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011; seven rounds are the fewest that pass BigCrush at this width):

    block  = philox(key=seed (64 bits), counter=(column // 8, row, plane, site))      four 32-bit words
    lane   = column % 8: word lane // 2, its low half for an even lane, its high half for an odd one
    keep   = int16(lane's bits) >= threshold - 32768,      threshold = round(p * 65536)
    kept values are multiplied by 65536 / (65536 - threshold), so that the expectation is exact

(row, column) is the element's place in its logical matrix, plane the matrix's place in its batch (batch * H + head for
attention weights (B, H, L, S); 0 for activations (M, N)), site the call's place in the model. Nothing depends on
tiles, strides, padding or packing, so any kernel, any backward pass and the plain PyTorch reference draw the same mask.
One block serves eight elements, where tl.rand would throw three of its four words away; and because the rows, columns
and planes stay unbroadcast until Philox mixes them, its first two rounds cost next to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.parameter import Int64Pointer, Real, Varying

ROUNDS = tl.constexpr(7)  # after four, every word has the full shape


class Dropout(NamedTuple):
    """Dropout at one place of the model, as a kernel takes it."""

    seed: Int64Pointer
    """(1,) in device memory, so that a captured graph draws anew at each replay; None: nothing is dropped."""
    site: Varying
    threshold: Varying
    keep_scale: Real
    """The factor of kept values."""


@triton.jit
def random_lanes(seed, site, plane, rows, first_column, COLUMNS: tl.constexpr):
    """The signed 16-bit lanes of a tile, as (R, COLUMNS) int32 in [-32768, 32767].

    seed int64 scalar, site and plane int32 scalars; rows (R,) int32; the tile's columns are first_column (a multiple
    of 8) and the COLUMNS - 1 after it; COLUMNS is a power of two of at least 8.
    """
    blocks = first_column // 8 + tl.arange(0, COLUMNS // 8)
    # (1, C/8), (R, 1) and scalars: broadcast by the rounds themselves, as late as possible.
    w0, w1, w2, w3 = tl.philox(seed, blocks[None, :], rows[:, None], plane, site, ROUNDS)
    w0 = w0.to(tl.int32, bitcast=True)
    w1 = w1.to(tl.int32, bitcast=True)
    w2 = w2.to(tl.int32, bitcast=True)
    w3 = w3.to(tl.int32, bitcast=True)
    # join appends an axis, so the flattened order is word bit 1, word bit 0, half: lane = 2 * word + half. Each thread
    # holds the eight lanes of its block, hence nothing moves between threads here.
    low = tl.join(tl.join((w0 << 16) >> 16, (w2 << 16) >> 16), tl.join((w1 << 16) >> 16, (w3 << 16) >> 16))
    high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
    return tl.reshape(tl.join(low, high), (rows.shape[0], COLUMNS))


@triton.jit
def keep_mask(seed, site, plane, rows, first_column, threshold, COLUMNS: tl.constexpr):
    """True where dropout keeps the element: (R, COLUMNS) int1. threshold int32 in [0, 65536] = round(p * 65536)."""
    return random_lanes(seed, site, plane, rows, first_column, COLUMNS) >= threshold - 32768


@triton.jit
def with_seed(dropout):
    """A Dropout that drops something with the seed's value for its pointer: a kernel reads it once. (No function of
    Triton's before 3.7 returns a tuple that holds None.)"""
    return Dropout(tl.load(dropout.seed), dropout.site, dropout.threshold, dropout.keep_scale)


@triton.jit
def keep_tile(dropout, plane, rows, first_column, COLUMNS: tl.constexpr):
    """keep_mask() of a Dropout that with_seed() returned and that drops something."""
    return keep_mask(dropout.seed, dropout.site, plane, rows, first_column, dropout.threshold, COLUMNS)


@triton.jit
def drop(values, dropout, rows, first_column, COLUMNS: tl.constexpr):
    """values (R, COLUMNS) of activations after dropout, if there is any. Loops call keep_mask() as they are: there an
    inner function makes other machine code."""
    if dropout.seed is not None:
        keep = keep_tile(with_seed(dropout), 0, rows, first_column, COLUMNS)
        values = tl.where(keep, values * dropout.keep_scale, 0.0)
    return values


def dropout_arguments(p: float, seed: Tensor | None, site: int) -> Dropout:
    """Dropout with rate p; seed None drops nothing."""
    threshold = round(p * 65536)
    if seed is None or threshold == 0:
        return Dropout(None, site, 0, 1.0)
    return Dropout(seed, site, threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0)
