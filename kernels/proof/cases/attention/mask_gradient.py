"""Compile cases of attention/mask_gradient.py."""

from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.attention.launch import takes_long
from fasttfm.kernels.attention.mask_gradient import _gradient
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import WIDTHS, attention_case, head_constants, product_kinds, variant_name
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import MASK_GRADIENT


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile, for a mask shared by all heads; at one size with shared keys."""
    whole: dict[str, Any] = {"MB": True, "MH": False, "ML": True, "MS": True}

    def case(kind: str, width: int, *, shared: bool = False, scoring: bool = False) -> CompileCase:
        tile = MASK_GRADIENT(chip, kind, width)
        variant: dict[str, Any] = {"dropout": True, "mask": "add", "shared": shared, "scoring": scoring}
        name = f"attention.mask_gradient/{variant_name(**variant)}/D{width}"
        return attention_case(_gradient, name, kind, tile, **variant, **head_constants(width), **whole)

    for width in WIDTHS:
        for kind in dict.fromkeys((*product_kinds(chip), "fp16")):
            if takes_long(chip, kind, width):  # else the route takes another way
                yield case(kind, width)
    yield case("bf16", 64, shared=True)
    yield case("bf16", 64, scoring=True)
