"""Which tile the feed-forward kernels take, and where cuBLAS goes before them."""

from __future__ import annotations

from dataclasses import dataclass

from fasttfm.kernels.choices import choice
from fasttfm.kernels.launch import Chip


@dataclass(frozen=True, slots=True)
class ProductTile:
    rows: int
    columns: int
    """A multiple of 32, for the words of the mask."""
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GateTile:
    rows: int
    columns: int
    warps: int
    shares: int
    """Programs among which the rows of a block of columns are divided at most."""


def _route_alternatives(chip: Chip, kind: str, product: str) -> tuple[str, ...]:
    return ("cublas", "fused")


@choice("feed_forward.route", alternatives=_route_alternatives)
def epilogue_route(chip: Chip, kind: str, product: str) -> str:
    """fused: a Triton product with the epilogue in it; cublas: cuBLAS and a pass of its own for what remains.

    kind as launch.product_kind() tells; product forward, forward+dropout or backward. From a model on paper, not yet
    measured: a Triton product costs about a fifth more than cuBLAS's where it uses matrix units, less than the passes
    that it saves; bias and ReLU alone are free in cuBLASLt's own epilogue. Without matrix units in reach (sm_60 to
    sm_75, and float32 proper) nothing makes up for cuBLAS.
    """
    if chip.name == "interpreter":
        return "fused"
    if not chip.matrix_units or kind == "fp32":
        return "cublas"
    return "cublas" if product == "forward" else "fused"


def size_class(chip: Chip, M: int, N: int, K: int) -> str:
    """large when 128 x 128 tiles give every processor work and K divides by 64, else small."""
    tiles = -(-M // 128) * -(-N // 128)
    return "large" if tiles >= chip.processors and K % 64 == 0 else "small"


def _tile_alternatives(chip: Chip, kind: str, size: str) -> tuple[ProductTile, ...]:
    """The same number of elements a thread in other shapes, and the other size's tile."""
    if not chip.matrix_units or kind == "fp32":
        return ()
    if size == "small":
        return (ProductTile(32, 64, 32, 4, 2 if chip.name.startswith("gfx") else 4),)
    stages = 2 if chip.name.startswith("gfx") else 4
    wide = () if kind == "tf32" else (ProductTile(64, 128, 32, 4, stages), ProductTile(128, 64, 32, 4, stages))
    return (product_tile.shipped(chip, kind, "small"), *wide)


@choice("feed_forward.tile", alternatives=_tile_alternatives)
def product_tile(chip: Chip, kind: str, size: str) -> ProductTile:
    """kind as launch.product_kind() tells, size as size_class().

    64 sums a thread at most, so that dropout and the packing of the mask still find registers.
    """
    if chip.name == "interpreter":
        return ProductTile(32, 64, 32, 4, 1)
    if not chip.matrix_units or kind == "fp32":
        return ProductTile(64, 64, 16, 8, 3 if chip.capability == 100 else 2)  # with two, backward spills on sm_100
    amd = chip.name.startswith("gfx")
    if size == "small":
        # four warps spill on sm_100
        return ProductTile(64, 64, 32, 8 if chip.capability == 100 else 4, 2 if amd else 3)
    if kind == "tf32":
        return ProductTile(128, 64, 32, 8, 2 if amd else 3)
    if amd:
        return ProductTile(128, 128, 32, 8, 2)
    return ProductTile(128, 128, 64 if chip.capability in (90, 100) else 32, 8, 3)


def gate_tile(chip: Chip) -> GateTile:
    """16 elements a thread, and enough programs to fill the chip at a hidden width of 512."""
    return GateTile(16, 128, 2 if chip.name.startswith("gfx") else 4, chip.processors)
