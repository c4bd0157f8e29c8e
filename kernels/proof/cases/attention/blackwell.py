"""Compile cases of attention/blackwell.py."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.hopper.rule import TENSOR_WIDTHS
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import Variant, distinct, head_case
from fasttfm.kernels.proof.cases.attention.hopper.forward import rows
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import BLACKWELL_FORWARD, Tile


@distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that `fasttfm tune` tries, with and without dropout and a window; of the first ones also the other
    dtype, shared keys and packed rows."""
    if chip.name != "sm_100" or not tensor_map.usable():
        return
    from fasttfm.kernels.attention.blackwell import _forward

    def case(kind: str, width: int, tile: Tile, variant: Variant) -> CompileCase:
        query, keys = rows(kind, tile.rows, width), rows(kind, tile.columns, width, spread=variant.dropout)
        maps = {"q": query, "k": keys, "v": keys, "STAGES": tile.stages}
        made = head_case(_forward, "attention.blackwell", kind, tile, width, variant, **maps)
        return replace(made, matrix_product=True)

    for width, window, dropout in itertools.product(TENSOR_WIDTHS, (False, True), (False, True)):
        variant = Variant(dropout=dropout, window=window)
        answers = BLACKWELL_FORWARD.answers(chip, "bf16", width, variant.extras("bf16"), 4096).values()
        tiles = [tile for tile in answers if isinstance(tile, Tile)]
        for tile in tiles:
            yield case("bf16", width, tile, variant)
        if not (window or dropout):
            yield case("fp16", width, tiles[0], variant)
            yield case("bf16", width, tiles[0], Variant(dropout=False, shared=True))
            yield case("bf16", width, tiles[0], Variant(dropout=False, packed=True))
