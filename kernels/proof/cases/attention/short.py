"""Compile cases of attention/short.py."""

import itertools
from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.attention.launch import extras, fits_short
from fasttfm.kernels.attention.short import _backward, _forward
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import FAR, MASKS, WIDTHS, distinct, every_kind, head_case, product_kinds
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import SHORT_BACKWARD, SHORT_FORWARD


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """The cases of both kernels: every tile in the heaviest variant that takes it, as in forward.py."""
    yield from distinct(_cases(chip))


def _cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in the heaviest variant that takes it; at one size every dtype with every mask, packed,
    and with shared keys."""
    for kernel, name, choose in (
        (_forward, "attention.short.forward", SHORT_FORWARD),
        (_backward, "attention.short.backward", SHORT_BACKWARD),
    ):

        def case(
            kind: str, width: int, keys: int, *, dropout: bool = True, mask: str = "none", packed: bool = False,
            shared: bool = False, scoring: bool = False, far: bool = False, D: int | None = None, kernel: Any = kernel,
            name: str = name, choose: Any = choose,
        ) -> CompileCase:  # fmt: skip
            tile = choose(chip, kind, width, extras(kind, dropout, mask != "none", shared=shared, scored=scoring), keys)
            sums = kernel is _backward and mask == "none" and not (shared or scoring)
            variant = {"dropout": dropout, "mask": mask, "packed": packed, "shared": shared, "scoring": scoring}
            return head_case(kernel, name, kind, tile, D or width, {**variant, "sums": sums, "far": far})

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
        for kind in product_kinds(chip):
            keys = 32 if fits_short(chip, kind, 64, 32) else 16
            yield case(kind, 64, keys, shared=True)
            yield case(kind, 64, keys, scoring=True)
        yield case("bf16", 64, 32, D=32)
        if chip.name in FAR:
            yield case("bf16", 64, 32, mask="add", far=True)
