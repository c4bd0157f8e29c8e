"""Compile cases of cross_entropy.py."""

from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.cross_entropy import _SIZES, _backward, _forward
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.rows import CROSS_ENTROPY
from fasttfm.kernels.tiles.table import Tile


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every shipped tile in float32; at the widest, half precision, which needs less, and the lighter kernels."""
    whole = [block for classes in _SIZES if (block := CROSS_ENTROPY.shipped(chip, classes)).columns >= classes]
    walked = CROSS_ENTROPY.shipped(chip, _SIZES[-1])
    for block in whole:
        yield _forward_case(block, "fp32", whole_row=True)
    yield _forward_case(whole[0], "fp32")  # rows shorter than half of the narrowest tile
    yield _forward_case(whole[0], "fp32", in_place=False)
    for block in whole:
        yield kernel_case(_backward, "cross_entropy.backward", "fp32", block)
    for dtype in ("fp32", "bf16", "fp16"):
        yield _forward_case(walked, dtype)
        yield _forward_case(walked, dtype, in_place=False)
    for dtype in ("bf16", "fp16"):
        yield _forward_case(whole[-1], dtype, whole_row=True)
        yield kernel_case(_backward, "cross_entropy.backward", dtype, whole[-1])


def _forward_case(block: Tile, dtype: str, *, whole_row: bool = False, in_place: bool = True) -> CompileCase:
    variant = f"{'in_place' if in_place else 'loss+statistics'}{'+whole_row' if whole_row else ''}"
    options: dict[str, Any] = {"V": "i32", "ONE_TILE": whole_row, "OVERWRITE": in_place}
    options["statistics" if in_place else "factor"] = None
    return kernel_case(_forward, f"cross_entropy.forward/{variant}", dtype, block, **options)
