"""Compile cases of residual_add.py."""

from collections.abc import Iterator

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.residual_add import _add_dropped, tile


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile, with dropout and a residual."""
    for dtype in ("fp32", "fp16", "bf16"):
        for N in (128, 256, 512):
            yield kernel_case(_add_dropped, "residual_add", dtype, tile(chip, N))
