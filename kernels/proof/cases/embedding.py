"""Compile cases of embedding.py."""

from collections.abc import Iterator

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.embedding import _COLUMNS, _WIDE, _forward, _sum_rows, sums_tile, tile
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.table import Tile


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in float32 with positions and dropout; at the widest two, half precision, which needs less; at one,
    without positions and dropout."""
    for columns in _COLUMNS:
        narrow = tile(chip, columns)
        yield kernel_case(_forward, "embedding.forward/positions+dropout", "fp32", narrow)
        yield from _sum_cases("fp32", sums_tile(chip, columns))
    wide = tile(chip, _WIDE)
    yield kernel_case(_forward, "embedding.forward/positions+dropout", "fp32", wide)
    for dtype in ("fp16", "bf16"):
        for block in (narrow, wide):
            yield kernel_case(_forward, "embedding.forward/positions+dropout", dtype, block)
        yield kernel_case(_forward, "embedding.forward/plain", dtype, wide, positions=None, seed=None)
        yield from _sum_cases(dtype, narrow)
        yield kernel_case(_sum_rows, "embedding.sum_rows/weight", dtype, narrow, seed=None)


def _sum_cases(dtype: str, block: Tile) -> Iterator[CompileCase]:
    yield kernel_case(_sum_rows, "embedding.sum_rows/weight+dropout", dtype, block)
    name = "embedding.sum_rows/positions+dropout"
    yield kernel_case(_sum_rows, name, dtype, block, order=None, starts=None, out="*fp32")
