"""Compile cases of attention/hopper/forward.py, and the tensor maps shared with the backward kernels."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.hopper.rule import BLOCK, WIDTHS
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import Variant, distinct, head_case
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import HOPPER_FORWARD, Tile


@distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships or that `fasttfm tune` tries, with and without dropout and a window; at one size the other
    dtype, packed, and with shared keys."""
    if chip.name != "sm_90" or not tensor_map.usable():
        return
    from fasttfm.kernels.attention.hopper.forward import _forward

    def case(kind: str, width: int, tile: Tile, variant: Variant) -> CompileCase:
        query, keys = rows(kind, tile.rows, width), rows(kind, tile.columns, width, spread=variant.dropout)
        maps = {"q": query, "k": keys, "v": keys, "STAGES": tile.stages}
        made = head_case(_forward, "attention.hopper.forward", kind, tile, width, variant, **maps)
        return replace(made, matrix_product=True)

    first = {}
    for width, window, dropout in itertools.product(WIDTHS, (True, False), (False, True)):
        variant = Variant(dropout=dropout, window=window)
        answers = HOPPER_FORWARD.answers(chip, "bf16", width, variant.extras("bf16"), 4096).values()
        tiles = [tile for tile in answers if isinstance(tile, Tile)]
        for tile in tiles:
            yield case("bf16", width, tile, variant)
        if not window:
            first[width] = tiles[0]
            yield case("bf16", width, tiles[0], Variant(dropout=dropout, shared=True))
    yield case("fp16", 64, first[64], Variant())
    for width in (128, 256):
        yield case("bf16", width, first[width], Variant(dropout=False, packed=True))


def rows(kind: str, count: int, width: int, *, spread: bool = False) -> str:
    """A tensor map that copies `count` rows of a head at a time, as made by rule.Heads."""
    block = (1, BLOCK // 2, count // BLOCK, 2, width) if spread else (1, count, width)
    return f"map {kind} {'x'.join(map(str, block))}"
