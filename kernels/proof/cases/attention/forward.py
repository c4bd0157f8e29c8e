"""Compile cases of attention/forward.py, and the list shared by the kernels for long rows."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fasttfm.kernels.attention.forward import _forward
from fasttfm.kernels.attention.launch import takes_long
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof import attention_case as attention
from fasttfm.kernels.proof.attention_case import MASKS, WIDTHS, Variant, every_kind, product_kinds
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import FORWARD, Tile


@attention.distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in the heaviest variant that uses it; at one size every dtype with every mask, packed, and with shared
    keys."""
    yield from long_cases(chip, _forward, "attention.forward", FORWARD)


def long_cases(chip: Chip, kernel: Any, name: str, choose: Callable[..., Tile]) -> Iterator[CompileCase]:
    """The cases of a kernel for long rows; choose: its table of tiles."""

    def case(kind: str, width: int, *, mask: str = "add", D: int | None = None, **options: Any) -> CompileCase:
        variant = Variant(mask=mask, **options)
        tile = choose(chip, kind, width, variant.extras(kind))
        return attention.head_case(kernel, name, kind, tile, D or width, variant)

    for width in WIDTHS:
        for kind in product_kinds(chip):
            if not takes_long(chip, kind, width):
                continue  # the route is softmax
            yield case(kind, width)
            if choose(chip, kind, width, 1) != choose(chip, kind, width, 2):
                yield case(kind, width, mask="none")
            if choose(chip, kind, width, 4) != choose(chip, kind, width, 1):
                yield case(kind, width, mask="none", shared=True)
            if kind in ("bf16", "fp16"):
                yield case(kind, width, dropout=False, mask="none")
    for kind in every_kind(chip):
        for mask in MASKS:
            yield case(kind, 64, mask=mask)
        yield case(kind, 64, mask="none", packed=True)
    for kind in product_kinds(chip):
        yield case(kind, 64, mask="none", shared=True)
        yield case(kind, 64, mask="none", scoring=True)
    if chip.matrix_units:
        yield case("bf16", 128, dropout=False, mask="none", shared=True)
        yield case("bf16", 128, dropout=False, mask="none", scoring=True)
    yield case("bf16", 64, D=32)
    if chip.name in attention.FAR:
        yield case("bf16", 64, far=True)
    if chip.name in attention.UNEVEN:
        for width, extras in itertools.product(WIDTHS, (2, 4, 1, 0)):  # the heaviest first
            if choose(chip, "bf16", width, extras).stages > 1:
                mask, shared = "add" if extras == 2 else "none", extras == 4
                yield case("bf16", width, mask=mask, dropout=extras > 0, shared=shared, uneven=True)
