"""Tiles of the feed-forward network's products, and where cuBLAS computes them.

kind is how they are computed (launch.product_kind).
"""

from __future__ import annotations

from dataclasses import replace

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.tiles.table import Table, Tile, tiles

# fused: a Triton product with the epilogue in it; cublas: cuBLAS and a pass of its own for what remains.
# From a model on paper: a Triton product costs about a fifth more than cuBLAS's where it uses matrix units, less than
# the passes that it saves; bias and ReLU alone are free in cuBLASLt's own epilogue. Without matrix units in reach (sm_60
# to sm_75, and float32 proper) nothing makes up for cuBLAS. An H100 confirmed it forward, and backward where bits tell
# what ReLU and dropout closed (1.14x to 1.33x of PyTorch); without them (0.90x to 1.00x) and with GELU (0.75x to 0.87x)
# fused was slower than PyTorch's passes, of which cublas has fewer. That has not been timed.
# product: forward, forward+dropout, forward+gelu, backward, backward+bits or backward+gelu.
ROUTE = Choice(
    "feed_forward.route",
    Table(
        """
        kind  product                 | interpreter  simt    sm_90   *
        fp32  *                       | fused        cublas  cublas  cublas
        *     forward                 | fused        cublas  cublas  cublas
        *     backward,backward+gelu  | fused        cublas  cublas  fused
        *     *                       | fused        cublas  fused   fused
        """,
        str,
    ),
    lambda chip, kind, product: ("cublas", "fused"),
)


def _tile_alternatives(chip: Chip, kind: str, size: str) -> list[Tile]:
    """The same number of elements a thread in other shapes, and the other size's tile."""
    if not chip.matrix_units or kind == "fp32":
        return []
    stages = 4 if chip.capability else 2
    if size == "small":
        return [Tile(32, 64, 4, stages, 32)]
    wide = [] if kind == "tf32" else [Tile(64, 128, 4, stages, 32), Tile(128, 64, 4, stages, 32)]
    return [PRODUCT.shipped(chip, kind, "small"), *wide]


# Rows x columns, a multiple of 32 for the words of the mask, x depth. 64 sums a thread at most, so that dropout and the
# packing of the mask still find registers. sm_100: with two stages backward spills, and four warps do. size:
# size_class()'s.
PRODUCT: Choice[Tile] = Choice(
    "feed_forward.tile",
    tiles("""
    kind  size  | interpreter  simt          amd            sm_90           sm_100          sm_80+
    fp32  *     | 32x64x32w4   64x64x16w8s2  64x64x16w8s2   64x64x16w8s2    64x64x16w8s3    64x64x16w8s2
    *     small | 32x64x32w4   64x64x16w8s2  64x64x32w4s2   64x64x32w4s3    64x64x32w8s3    64x64x32w4s3
    tf32  large | 32x64x32w4   64x64x16w8s2  -              128x64x32w8s3   128x64x32w8s3   128x64x32w8s3
    *     large | 32x64x32w4   64x64x16w8s2  128x128x32w8s2 128x128x64w8s3  128x128x64w8s3  128x128x32w8s3
    """),
    _tile_alternatives,
)


def size_class(chip: Chip, M: int, N: int, K: int) -> str:
    """large when 128 x 128 tiles give every processor work and K divides by 64, else small."""
    tiles = ceil_div(M, 128) * ceil_div(N, 128)
    return "large" if tiles >= chip.processors and K % 64 == 0 else "small"


def of_two_results(tile: Tile) -> Tile:
    """The tile for an epilogue that reads another tile and writes two: 32 sums a thread, with 64 it spills.

    As many rows: a bias's gradient has a part for each tile of rows, whichever epilogue sums it.
    """
    columns = tile.columns
    while columns > 32 and tile.rows * columns > 32 * 32 * tile.warps:
        columns //= 2
    return replace(tile, columns=columns)
