"""Compile cases of attention/hopper/forward.py; what the cases of the other kernels in Gluon share."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.hopper.rule import BLOCK, WIDTHS, part_of
from fasttfm.kernels.attention.launch import width_class
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.proof.attention_case import Variant, distinct, head_case
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import HOPPER_FORWARD, Tile


@distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """forward_cases()."""
    if chip.name == "sm_90" and tensor_map.usable():
        from fasttfm.kernels.attention.hopper.forward import _forward

        yield from forward_cases(chip, _forward, "attention.hopper.forward", HOPPER_FORWARD, WIDTHS)


def forward_cases(
    chip: Chip, kernel: Any, name: str, choice: Choice[Tile | str], widths: Sequence[int]
) -> Iterator[CompileCase]:
    """Every tile that ships or that `fasttfm tune` tries, with and without dropout and a window; of the first ones also
    shared keys and packed rows, and at one size the other dtype."""

    def case(kind: str, width: int, tile: Tile, variant: Variant) -> CompileCase:
        query, keys = rows(kind, tile.rows, width), rows(kind, tile.columns, width, spread=variant.dropout)
        maps = {"q": query, "k": keys, "v": keys, "STAGES": tile.stages}
        return replace(head_case(kernel, name, kind, tile, width, variant, **maps), matrix_product=True)

    for width, window, dropout in itertools.product(widths, (False, True), (False, True)):
        variant = Variant(dropout=dropout, window=window)
        answers = choice.answers(chip, "bf16", width_class(width), variant.extras("bf16"), 4096).values()
        tiles = [tile for tile in answers if isinstance(tile, Tile)]
        for tile in tiles:
            yield case("bf16", width, tile, variant)
        if not window:
            yield case("bf16", width, tiles[0], replace(variant, shared=True))
        if not (window or dropout):
            yield case("bf16", width, tiles[0], replace(variant, packed=True))
            if width == 64:
                yield case("fp16", width, tiles[0], Variant())


def rows(kind: str, count: int, width: int, *, spread: bool = False) -> str:
    """A tensor map that copies `count` rows of a head at a time, as made by rule.Heads."""
    width = part_of(width)
    block = (1, BLOCK // 2, count // BLOCK, 2, width) if spread else (1, count, width)
    return f"map {kind} {'x'.join(map(str, block))}"
