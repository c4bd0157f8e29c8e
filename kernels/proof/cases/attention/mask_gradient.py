"""Compile cases of attention/mask_gradient.py."""

from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.attention.launch import takes_long
from fasttfm.kernels.attention.mask_gradient import _gradient
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import WIDTHS, Variant, every_kind, head_case
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import MASK_GRADIENT


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile, for a mask shared by all heads; at one size with shared keys, and with all scoring."""
    whole = {"MB": True, "MH": False, "ML": True, "MS": True}

    def case(kind: str, width: int, **options: Any) -> CompileCase:
        tile, variant = MASK_GRADIENT(chip, kind, width), Variant(mask="add", **options)
        return head_case(_gradient, "attention.mask_gradient", kind, tile, width, variant, **whole)

    for width in WIDTHS:
        for kind in every_kind(chip):
            if takes_long(chip, kind, width):  # else the route is softmax
                yield case(kind, width)
    yield case("bf16", 64, shared=True)
    yield case("bf16", 64, scoring=True)
