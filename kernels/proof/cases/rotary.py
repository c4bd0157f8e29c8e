"""Compile cases of rotary.py."""

import itertools
from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.rotary import _rotate, tile


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in float32, which takes the most registers, with both orders of pairs; at one size every dtype."""
    for dtype, sizes in (("fp32", (16, 32, 64, 128)), ("fp16", (32,)), ("bf16", (32,))):
        for pairs, interleaved in itertools.product(sizes, (False, True)):
            strides: dict[str, Any] = {"strides": ("i32:16",) * 3, "position_strides": ("i32",) * 2}
            name = "rotary/interleaved" if interleaved else "rotary/halves"
            yield kernel_case(_rotate, name, dtype, tile(chip, pairs), INTERLEAVED=interleaved, **strides)
