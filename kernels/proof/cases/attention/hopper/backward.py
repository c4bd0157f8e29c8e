"""Compile cases of attention/hopper/backward_queries.py and backward_keys.py."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.hopper.rule import WIDTHS, keys_fit, queries_fit
from fasttfm.kernels.attention.launch import width_class
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.proof.attention_case import Variant, distinct, head_case
from fasttfm.kernels.proof.cases.attention.hopper.forward import rows
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_QUERIES, Tile

_VARIANTS = (
    *(Variant(dropout=dropout, shared=shared) for dropout in (False, True) for shared in (False, True)),
    *(Variant(dropout=dropout, window=True) for dropout in (False, True)),
    *(Variant(dropout=False, packed=True, window=window) for window in (False, True)),
)


@distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships or that `fasttfm tune` tries, with and without dropout, shared keys and a window, and
    packed; at one size the other dtype."""
    if chip.name != "sm_90" or not tensor_map.usable():
        return
    from fasttfm.kernels.attention.hopper.backward_keys import _keys
    from fasttfm.kernels.attention.hopper.backward_queries import _queries

    def case(choice: Choice, kind: str, width: int, tile: Tile, variant: Variant) -> CompileCase:
        own, walked = rows(kind, tile.rows, width), rows(kind, tile.columns, width)
        if choice is HOPPER_BACKWARD_KEYS:
            kernel, name, maps = _keys, "keys", {"k": walked, "v": walked, "q": own, "dout": own}
        else:
            keys = rows(kind, tile.columns, width, spread=variant.dropout)
            kernel, name, maps = _queries, "queries", {"k": keys, "v": keys, "q": own, "dout": own, "out": own}
        family = f"attention.hopper.backward.{name}"
        made = head_case(kernel, family, kind, tile, width, variant, **maps, STAGES=tile.stages)
        return replace(made, matrix_product=True)

    for choice in (HOPPER_BACKWARD_QUERIES, HOPPER_BACKWARD_KEYS):
        for width, variant in itertools.product(WIDTHS, _VARIANTS):
            fit = keys_fit if choice is HOPPER_BACKWARD_KEYS else queries_fit
            if not fit(width, dropout=variant.dropout):
                continue
            for tile in choice.answers(chip, "bf16", width_class(width), variant.extras("bf16"), 4096).values():
                if isinstance(tile, Tile):
                    yield case(choice, "bf16", width, tile, variant)
                    if (width, variant) == (64, Variant()):
                        yield case(choice, "fp16", width, tile, variant)
