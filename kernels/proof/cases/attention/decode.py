"""Compile cases of attention/decode.py."""

import itertools
from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.attention.decode import _append, _decode, _merge, rows_tile
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import (
    FAR,
    UNEVEN,
    WIDTHS,
    Variant,
    attention_case,
    distinct,
    every_kind,
    product_kinds,
)
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.attention import DECODE


@distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile with pages, split sequences (shares) and all scoring; at one size every dtype without them."""

    def case(
        kind: str, width: int, rows: int, *, plain: bool = False, shared: bool = False, lse: str | None = None,
        far: bool = False, uneven: bool = False,
    ) -> CompileCase:  # fmt: skip
        variant = Variant(dropout=False, scoring=not plain, shared=shared, far=far, uneven=uneven)
        constants: dict[str, Any] = {"bounds": ("*i64", None), "D": width, "DV": width, "CAUSAL": True}
        constants |= {"table": None, "output": None, "lse": lse} if plain else {}
        words = "rows" + "+lse" * (lse is not None) if plain else "pages+scoring+shares"
        name = f"attention.decode/{words}{'+grouped' * shared}{'+far' * far}{'+uneven' * uneven}/D{width}"
        return attention_case(_decode, name, kind, DECODE(chip, kind, width, rows), variant, **constants)

    for shared in (False, True):
        for width, kind, rows in itertools.product(WIDTHS, product_kinds(chip), (16, 32)):
            yield case(kind, width, rows, shared=shared)
        for kind in every_kind(chip):
            yield case(kind, 64, 16, plain=True, shared=shared)
    yield case("bf16", 64, 16, plain=True, lse="*fp32")
    if chip.name in FAR:
        yield case("bf16", 64, 16, far=True)
    if chip.name in UNEVEN:
        for width, rows in itertools.product(WIDTHS, (16, 32)):
            yield case("bf16", width, rows, shared=rows == 32, uneven=True)
    strides = ("i32:16",) * 3
    for width, dtype in itertools.product(WIDTHS, ("bf16", "fp16", "fp32")):
        for lse in (None, "*fp32") if (width, dtype) == (64, "bf16") else (None,):
            name = f"attention.decode.merge{'' if lse is None else '/lse'}/D{width}"
            yield kernel_case(_merge, name, dtype, rows_tile(width), strides=strides, DV=width, row_lse=lse)
        name = f"attention.decode.append/D{width}"
        yield kernel_case(_append, name, dtype, rows_tile(width), strides=(strides, strides), DV=width)
