"""Compile cases of partial_sums.py."""

from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.partial_sums import _LARGEST, _add_parts
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.rows import PARTIAL_SUMS


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """One sum, a few, and as many as fit."""
    for dtype in ("fp32", "fp16", "bf16"):
        for count in (1, 3, _LARGEST):
            arguments: dict[str, Any] = {"parts": ("*fp32",) * count, "outs": (f"*{dtype}",) * count}
            arguments |= dict.fromkeys(("programs", "columns"), ("i32",) * count)
            yield kernel_case(_add_parts, f"partial_sums/{count}", dtype, PARTIAL_SUMS(chip), **arguments)
