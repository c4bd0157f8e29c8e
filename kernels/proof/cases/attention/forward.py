"""Compile cases of attention/forward.py, and the list that kernels for long rows share."""

from collections.abc import Callable, Iterator
from typing import Any

from fasttfm.kernels.attention.forward import _forward
from fasttfm.kernels.attention.launch import extras, takes_long
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import FAR, MASKS, WIDTHS, distinct, every_kind, head_case, product_kinds
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import FORWARD, Tile


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in the heaviest variant that takes it; at one size every dtype with every mask, packed,
    and with shared keys."""
    yield from distinct(long_cases(chip, _forward, "attention.forward", FORWARD))


def long_cases(chip: Chip, kernel: Any, name: str, choose: Callable[..., Tile]) -> Iterator[CompileCase]:
    """The cases of a kernel for long rows whose tile choose() says, as FORWARD does."""

    def case(
        kind: str, width: int, *, dropout: bool = True, mask: str = "add", packed: bool = False, shared: bool = False,
        scoring: bool = False, far: bool = False, D: int | None = None,
    ) -> CompileCase:  # fmt: skip
        tile = choose(chip, kind, width, extras(kind, dropout, mask != "none", shared=shared, scored=scoring))
        variant = {"dropout": dropout, "mask": mask, "packed": packed, "shared": shared, "scoring": scoring}
        return head_case(kernel, name, kind, tile, D or width, {**variant, "far": far})

    for width in WIDTHS:
        for kind in product_kinds(chip):
            if not takes_long(chip, kind, width):
                continue  # the route takes another way
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
    if chip.name in FAR:
        yield case("bf16", 64, far=True)
