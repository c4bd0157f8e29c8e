"""Tiles of the feed-forward products, and the choice between Triton and cuBLAS; kind: launch.product_kind()."""

from __future__ import annotations

from dataclasses import replace

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.tiles.table import Table, Tile, tiles

# fused: a Triton product with an epilogue; cublas: cuBLAS and a separate pass for the rest.
# Estimate: with matrix units a Triton product takes about a fifth longer than cuBLAS, less than the passes that it
# saves; bias and ReLU alone are free in the epilogue of cuBLASLt. Without matrix units for Triton (sm_60 to sm_75, IEEE
# float32) cuBLAS wins. An H100 confirmed this in forward, and in backward with bits (1.14x to 1.33x of PyTorch);
# without bits (0.90x to 1.00x) and with GELU (0.75x to 0.87x) fused was slower than PyTorch. cublas, with fewer passes
# than PyTorch, has not been timed there.
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
    """Return other shapes with as many elements per thread, and the tile of the other size."""
    if not chip.matrix_units or kind == "fp32":
        return []
    stages = 4 if chip.capability else 2
    if size == "small":
        return [Tile(32, 64, 4, stages, 32)]
    wide = [] if kind == "tf32" else [Tile(64, 128, 4, stages, 32), Tile(128, 64, 4, stages, 32)]
    return [PRODUCT.shipped(chip, kind, "small"), *wide]


# Rows x columns x depth; columns are a multiple of 32, the bits of a mask word. At most 64 accumulators per thread
# leave registers for dropout and for packing the mask. sm_100: backward spills with two stages or four warps. size:
# size_class().
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
    """Return large if there is a 128 x 128 tile for every processor and K is a multiple of 64, else small."""
    tiles = ceil_div(M, 128) * ceil_div(N, 128)
    return "large" if tiles >= chip.processors and K % 64 == 0 else "small"


def of_two_results(tile: Tile) -> Tile:
    """Return the tile for an epilogue with one more input and output: 32 accumulators per thread, as 64 would spill.

    Rows are kept, because partial sums of bias gradients are per tile of rows.
    """
    columns = tile.columns
    while columns > 32 and tile.rows * columns > 32 * 32 * tile.warps:
        columns //= 2
    return replace(tile, columns=columns)
