"""Rotary position embedding: rotate pairs of elements of each head by an angle proportional to the position.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin),      cos, sin of position * base^(-2i / R) for pair i of R / 2

Scores of rotated queries and keys depend only on the difference of their positions. Pairs are (i, i + R / 2), as in
LLaMA and GPT-NeoX, or, interleaved, (2i, 2i + 1), as in the paper and GPT-J; elements from R on are copied. The inverse
is the rotation by -sin, so backward is the same kernel and needs no saved tensors.
Reads x and writes y, 2 * B * H * L * D elements; a program's rows are the heads of a few tokens of one sequence, which
read the same table rows from cache. Source: Su et al. 2021, equation 34.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Int64Pointer, ParameterPointer, Pointer, Real, Size, Strides, Varying, Varyings
from fasttfm.kernels.tiles.rows import ROTARY
from fasttfm.kernels.tiles.table import Tile
from fasttfm.kernels.wide import divided, wide

_FEWEST = 16


class Sizes(NamedTuple):
    """Sizes of x and of the tables."""

    H: Varying
    L: Varying
    P: Varying
    D: Size
    PAIRS: Size


@jit
def _rotate(
    x: Pointer,  # (B, H, L, D) through its strides, unit stride in D
    cos: ParameterPointer,  # (P, PAIRS)
    sin: ParameterPointer,  # (P, PAIRS)
    positions: Int64Pointer,  # (B, L) through its strides, each below P; None: 0, 1, ... in every sequence
    out: Pointer,  # (B, L, H, D) out
    sign: Real,  # 1, or -1 for the inverse
    sizes: Sizes,
    strides: Strides,  # of x: batch, head, row
    position_strides: Varyings,  # sequence, row; 0 where sequences share positions
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    H, L, P, D, PAIRS = sizes
    # A program's rows belong to one sequence, so that a row takes one division. Row numbers are uint32, which holds
    # those of a last tile past 2^31, too: 64-bit divisions took half of all instructions. The quotients are small; as
    # int32 they are multiplied to 64 bits in one instruction.
    tiles = (L.to(tl.uint32) * H.to(tl.uint32) + (ROWS - 1)) // ROWS
    b = tl.program_id(0).to(tl.uint32) // tiles
    first_row = (tl.program_id(0).to(tl.uint32) - b * tiles) * ROWS
    rows = first_row + tl.arange(0, ROWS).to(tl.uint32)
    pairs = tl.arange(0, COLUMNS)
    line, h = divided(rows, H)
    inside = rows < L.to(tl.uint32) * H
    line = line.to(tl.int32).to(tl.int64)
    h = h.to(tl.int32).to(tl.int64)
    b = b.to(tl.int32).to(tl.int64)
    if positions is not None:
        position = tl.load(positions + b * position_strides[0] + line * position_strides[1], mask=inside, other=0)
    else:
        position = line
    x += (b * strides[0] + h * strides[1] + line * strides[2])[:, None]
    # 64-bit start of the tile: offsets within it fit 32 bits.
    out += (b * L * H + first_row.to(tl.int64)) * D + tl.arange(0, ROWS)[:, None] * D
    if tl.program_id(1) > 0:
        # Copy the elements from R on. Interleaved, a copy tile as wide as the tables' would make the compiler load as
        # many elements of the tables as of x per thread: other pairs than the thread rotates.
        WIDTH: tl.constexpr = 2 * COLUMNS if INTERLEAVED else COLUMNS
        columns = 2 * PAIRS + (tl.program_id(1) - 1) * WIDTH + tl.arange(0, WIDTH)
        rest = inside[:, None] & (columns < D)[None, :]
        tl.store(out + columns[None, :], tl.load(x + columns[None, :], mask=rest, other=0.0), mask=rest)
        return
    known = inside & (position.to(tl.uint64) < P.to(tl.uint64))  # no position reads outside the tables
    angle = tl.minimum(position.to(tl.uint32), (P - 1).to(tl.uint32)).to(tl.int32)  # int32: 32-bit multiply, too
    angle = angle.to(tl.int64)[:, None] * PAIRS + pairs[None, :]
    turned = known[:, None] & (pairs < PAIRS)[None, :]
    c = tl.load(cos + angle, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32) * sign
    if INTERLEAVED:
        elements = tl.arange(0, 2 * COLUMNS)
        both = inside[:, None] & (elements < 2 * PAIRS)[None, :]
        tile = wide(tl.load(x + elements[None, :], mask=both, other=0.0))
        first, second = tl.split(tl.reshape(tile, (ROWS, COLUMNS, 2)))
        tile = tl.reshape(tl.join(first * c - second * s, second * c + first * s), (ROWS, 2 * COLUMNS))
        tl.store(out + elements[None, :], tile.to(out.dtype.element_ty), mask=both)
    else:
        both = inside[:, None] & (pairs < PAIRS)[None, :]
        first = wide(tl.load(x + pairs[None, :], mask=both, other=0.0))
        second = wide(tl.load(x + PAIRS + pairs[None, :], mask=both, other=0.0))
        tl.store(out + pairs[None, :], (first * c - second * s).to(out.dtype.element_ty), mask=both)
        tl.store(out + PAIRS + pairs[None, :], (second * c + first * s).to(out.dtype.element_ty), mask=both)


def tile(chip: Chip, pairs: int) -> Tile:
    """Return a tile of 1,024 pairs: the heads of a few tokens."""
    return ROTARY(chip, max(_FEWEST, power_of_two(pairs)))


class Rotation:
    """The rotation for one signature: x (B, H, L, D), or packed (T, H, D), with unit stride in D; cos, sin (P, pairs)
    contiguous; positions int64 (B or 1, L), packed (T,), None for 0, 1, ... in every sequence."""

    def __init__(
        self, x: Tensor, cos: Tensor, positions: Tensor | None, *, interleaved: bool = False, inverse: bool = False
    ) -> None:
        """inverse: rotate by the negative angles."""
        by_head = x if x.dim() == 4 else x.transpose(0, 1)[None]
        (batch, heads, length, width), pairs = by_head.shape, cos.shape[1]
        block = tile(chip(x.device), pairs)
        parts = 1 + ceil_div(width - 2 * pairs, block.columns * (2 if interleaved else 1))
        grid = batch * ceil_div(length * heads, block.rows), parts
        self.launch = Launch(_rotate, grid, {"INTERLEAVED": interleaved, **block.options()})
        places = (0, 0) if positions is None else positions.expand(batch, length).stride()
        sizes = heads, length, cos.shape[0], width, pairs
        self.numbers = -1.0 if inverse else 1.0, sizes, by_head.stride()[:3], places
        token = heads * width
        self.out = x.shape, (length * token, width, token, 1) if x.dim() == 4 else (token, width, 1)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
        """Return x rotated, in its shape, contiguous as (B, L, H, D)."""
        out = x.new_empty_strided(*self.out)
        self.launch(x, cos, sin, positions, out, *self.numbers)
        return out
