"""Matrix product for kernels with an epilogue (the feed-forward network): a tile of a b in float32, and its launch.

The grid is swizzled in groups of ROW_GROUP row tiles, so that a and b are read from the L2 cache. Epilogues write sums
over rows, such as bias gradients, as partial sums per program, which partial_sums.py adds in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.launch import ceil_div, chip, precision, product_kind
from fasttfm.kernels.parameter import Float32Pointer, Size, Varying
from fasttfm.kernels.tiles.feed_forward import PRODUCT, ROUTE, of_two_results, size_class
from fasttfm.kernels.tiles.rows import COLUMN_SUMS


class ProductSizes(NamedTuple):
    """Sizes of the product a (M, K) by b (K, N)."""

    M: Varying
    N: Size
    K: Size


class BiasParts(NamedTuple):
    """Partial sums of two bias gradients, one row per row tile; None: not requested."""

    first: Float32Pointer
    """(row tiles, N), of the epilogue's result."""
    second: Float32Pointer
    """(row tiles, K), of a."""


ROW_GROUP: tl.constexpr = tl.constexpr(8)


@triton.jit
def tile_of_product(
    a,  # (M, K)
    b,  # (K, N), or (N, K) when B_TRANSPOSED
    sizes,  # ProductSizes
    B_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,  # DEPTH divides K
    NEIGHBOURS: tl.constexpr,  # give each thread 8 consecutive columns: needs_neighbours()
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,  # tf32, ieee or upcast: the interpreter's tl.dot is wrong for bfloat16
):
    """Return row tile, column tile, rows and columns of this program, and its (ROWS, COLUMNS) of a b in float32."""
    M, N, K = sizes
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, ROWS)
    tiles_n = tl.cdiv(N, COLUMNS)
    group = program // (ROW_GROUP * tiles_n)
    first = group * ROW_GROUP
    height = tl.minimum(tiles_m - first, ROW_GROUP)
    within = program % (ROW_GROUP * tiles_n)
    tile_m, tile_n = first + within % height, within // height
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    taken = columns
    if NEIGHBOURS:
        # Thread t of four holds accumulator columns 8 n + 2 t and 8 n + 2 t + 1, for every n, and warps alternate every
        # 8 columns. Columns of b are permuted so that a thread's 8 are consecutive, and so are a warp's 32.
        WARPS: tl.constexpr = min(COLUMNS // 32, 4)
        place = tl.arange(0, COLUMNS)
        group = place // (32 * WARPS) * WARPS + place // 8 % WARPS
        taken = tile_n * COLUMNS + group * 32 + place // 2 % 4 * 8 + place // (8 * WARPS) % 4 * 2 + place % 2

    depth = tl.arange(0, DEPTH)
    row_inside = (rows < M)[:, None]
    column_inside = (taken < N)[None, :]
    a = a + rows.to(tl.int64)[:, None] * K + depth[None, :]
    if B_TRANSPOSED:
        b = b + taken[None, :] * K + depth[:, None]
    else:
        b = b + depth[:, None] * N + taken[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN_K:
            left = tl.load(a, mask=row_inside, other=0.0)
            right = tl.load(b, mask=column_inside, other=0.0)
        else:
            depth_inside = start + depth < K
            left = tl.load(a, mask=row_inside & depth_inside[None, :], other=0.0)
            right = tl.load(b, mask=column_inside & depth_inside[:, None], other=0.0)
        if PRECISION == "upcast":
            total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total, input_precision=PRECISION)
        a += DEPTH
        b += DEPTH if B_TRANSPOSED else DEPTH * N
    if NEIGHBOURS:  # inverse permutation; no element moves to another thread
        total = tl.reshape(total, (ROWS, COLUMNS // (32 * WARPS), 4, WARPS, 4, 2))
        total = tl.reshape(tl.permute(total, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))
    return tile_m, tile_n, rows, columns, total


def needs_neighbours(chip: Chip, kind: str) -> bool:
    """Return whether matrix units scatter a product's columns over threads (NVIDIA); kind: from product_kind().

    Elsewhere threads hold consecutive columns already, and the order must stay: Triton 3.7.1 computes wrong column sums
    across lanes with gaps, as executing its PTX shows.
    """
    return chip.capability >= 80 and kind != "fp32"


@triton.jit
def tile_offsets(rows, columns, M, N):
    """Return the mask of elements inside (M, N), and their offsets."""
    return (rows < M)[:, None] & (columns < N)[None, :], rows.to(tl.int64)[:, None] * N + columns[None, :]


@triton.jit
def row_sums(a, out, rows, M, K, DEPTH: tl.constexpr):
    """Write the sum of these rows of a (M, K) to out (K,) float32."""
    for start in range(0, K, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = (rows < M)[:, None] & (depth < K)[None, :]
        part = tl.load(a + rows.to(tl.int64)[:, None] * K + depth[None, :], mask=inside, other=0.0)
        tl.store(out + depth, tl.sum(part.to(tl.float32), axis=0), mask=depth < K)


def product_launch(
    dtype: torch.dtype, device: torch.device, M: int, N: int, K: int, *, two_results: bool = False
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return grid and options of a product (M, K) by (K, N); two_results: the epilogue has another input and output."""
    target = chip(device)
    kind = product_kind(dtype, target)
    tile = PRODUCT(target, kind, size_class(target, M, N, K))
    tile = of_two_results(tile) if two_results else tile
    return (ceil_div(M, tile.rows) * ceil_div(N, tile.columns),), {
        "EVEN_K": K % tile.depth == 0,
        "PRECISION": precision(kind),
        **tile.options(),
    }


def route_of(product: str, dtype: torch.dtype, device: torch.device, route: str) -> str:
    """Return route, fused or cublas, or the choice of ROUTE if it is table; product: a key of ROUTE."""
    target = chip(device)
    return ROUTE(target, product_kind(dtype, target), product) if route == "table" else route


def gate_programs(chip: Chip, M: int) -> int:
    """Return the programs that split the rows of a column block: they fill the chip at a hidden width of 512."""
    return min(ceil_div(M, COLUMN_SUMS(chip).rows), chip.processors)
