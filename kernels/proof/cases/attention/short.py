"""Compile cases of attention/short.py."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fasttfm.kernels.attention.launch import fits_short
from fasttfm.kernels.attention.short import _backward, _forward
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.proof import attention_case as attention
from fasttfm.kernels.proof.attention_case import MASKS, WIDTHS, Variant, every_kind, product_kinds
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import SHORT_BACKWARD, SHORT_FORWARD


@attention.distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Both kernels: every tile in the heaviest variant that uses it; at one size every dtype with every mask, packed,
    and with shared keys."""
    yield from _cases(chip, _forward, "attention.short.forward", SHORT_FORWARD)
    yield from _cases(chip, _backward, "attention.short.backward", SHORT_BACKWARD)


def _cases(chip: Chip, kernel: Any, name: str, choose: Choice) -> Iterator[CompileCase]:
    def case(kind: str, width: int, keys: int, *, D: int | None = None, **options: Any) -> CompileCase:
        variant = Variant(**options)
        sums = kernel is _backward and variant.mask == "none" and not (variant.shared or variant.scoring)
        tile = choose(chip, kind, width, variant.extras(kind), keys)
        return attention.head_case(kernel, name, kind, tile, D or width, replace(variant, sums=sums))

    for kind, width, keys in itertools.product(product_kinds(chip), WIDTHS[:2], (16, 32, 64, 128)):
        if fits_short(chip, kind, width, keys):
            yield case(kind, width, keys, mask="add")
            if kernel is _backward or choose(chip, kind, width, 1, keys) != choose(chip, kind, width, 2, keys):
                yield case(kind, width, keys)
    yield case("bf16", 64, 32, dropout=False)
    if "tf32" in product_kinds(chip) and choose(chip, "tf32", 64, 0, 32) != choose(chip, "tf32", 64, 1, 32):
        yield case("tf32", 64, 32, dropout=False)
    for kind in every_kind(chip):
        keys = 32 if fits_short(chip, kind, 64, 32) else 16
        for mask in MASKS:
            yield case(kind, 64, keys, mask=mask)
        yield case(kind, 64, keys, packed=True)
        if kind in product_kinds(chip):
            yield case(kind, 64, keys, shared=True)
            yield case(kind, 64, keys, scoring=True)
    yield case("bf16", 64, 32, D=32)
    if chip.name in attention.FAR:
        yield case("bf16", 64, 32, mask="add", far=True)
