"""Tiles of the feed-forward network's products, and where cuBLAS computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import choice
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.tiles.table import Table, Tile


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    """A multiple of 32, for the words of the mask."""
    depth: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """A launch's constants and options."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


# fused: a Triton product with the epilogue in it; cublas: cuBLAS and a pass of its own for what remains.
# From a model on paper, not yet measured: a Triton product costs about a fifth more than cuBLAS's where it uses matrix
# units, less than the passes that it saves; bias and ReLU alone are free in cuBLASLt's own epilogue. Without matrix
# units in reach (sm_60 to sm_75, and float32 proper) nothing makes up for cuBLAS.
_ROUTE = Table(
    str,
    """
    chips        kind  product | route
    interpreter  *     *       | fused
    simt         *     *       | cublas
    *            fp32  *       | cublas
    *            *     forward | cublas
    *            *     *       | fused
    """,
)

# 64 sums a thread at most, so that dropout and the packing of the mask still find registers.
_PRODUCT = Table(
    ProductTile,
    """
    chips         kind  size   | rows columns depth warps stages
    interpreter   *     *      | 32   64      32    4     1
    simt          *     *      | 64   64      16    8     2
    sm_100        fp32  *      | 64   64      16    8     3       # with two stages backward spills
    *             fp32  *      | 64   64      16    8     2
    amd           *     small  | 64   64      32    4     2
    sm_100        *     small  | 64   64      32    8     3       # four warps spill
    *             *     small  | 64   64      32    4     3
    amd           *     large  | 128  128     32    8     2
    *             tf32  large  | 128  64      32    8     3
    sm_90,sm_100  *     large  | 128  128     64    8     3
    *             *     large  | 128  128     32    8     3
    """,
)

# Of the pass that does what remains of backward after cuBLAS; 16 elements a thread.
GATE = Table(
    Tile,
    """
    chips | rows columns warps
    amd   | 16   128     2
    *     | 16   128     4
    """,
)


def size_class(chip: Chip, M: int, N: int, K: int) -> str:
    """large when 128 x 128 tiles give every processor work and K divides by 64, else small."""
    tiles = ceil_div(M, 128) * ceil_div(N, 128)
    return "large" if tiles >= chip.processors and K % 64 == 0 else "small"


def _route_alternatives(chip: Chip, kind: str, product: str) -> tuple[str, ...]:
    return ("cublas", "fused")


@choice("feed_forward.route", alternatives=_route_alternatives)
def epilogue_route(chip: Chip, kind: str, product: str) -> str:
    """fused or cublas; kind as launch.product_kind() tells; product forward, forward+dropout or backward."""
    return _ROUTE(chip, kind, product)


def _tile_alternatives(chip: Chip, kind: str, size: str) -> tuple[ProductTile, ...]:
    """The same number of elements a thread in other shapes, and the other size's tile."""
    if not chip.matrix_units or kind == "fp32":
        return ()
    stages = 4 if chip.capability else 2
    if size == "small":
        return (ProductTile(32, 64, 32, 4, stages),)
    wide = () if kind == "tf32" else (ProductTile(64, 128, 32, 4, stages), ProductTile(128, 64, 32, 4, stages))
    return (product_tile.shipped(chip, kind, "small"), *wide)


@choice("feed_forward.tile", alternatives=_tile_alternatives)
def product_tile(chip: Chip, kind: str, size: str) -> ProductTile:
    """kind as launch.product_kind() tells, size as size_class()."""
    return _PRODUCT(chip, kind, size)


def of_two_results(tile: ProductTile) -> ProductTile:
    """The tile for an epilogue that reads another tile and writes two: 32 sums a thread, with 64 it spills.

    As many rows: a bias's gradient has a part for each tile of rows, whichever epilogue sums it.
    """
    columns = tile.columns
    while columns > 32 and tile.rows * columns > 32 * 32 * tile.warps:
        columns //= 2
    return replace(tile, columns=columns)
