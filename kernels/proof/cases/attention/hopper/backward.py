"""Compile cases of attention/hopper/backward_queries.py and backward_keys.py."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.hopper.rule import WIDTHS
from fasttfm.kernels.attention.launch import extras
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.proof.attention_case import distinct, head_case
from fasttfm.kernels.proof.cases.attention.hopper.forward import rows
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_QUERIES, Tile


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships or that `fasttfm tune` may take, with dropout and shared keys and without; at one size the
    other dtype."""
    if chip.name != "sm_90" or not tensor_map.usable():
        return
    from fasttfm.kernels.attention.hopper.backward_keys import _keys
    from fasttfm.kernels.attention.hopper.backward_queries import _queries

    def case(choice: Choice, kind: str, width: int, tile: Tile, *, dropout: bool, shared: bool = False) -> CompileCase:
        variant: dict[str, Any] = {"dropout": dropout, "mask": "none", "shared": shared}
        own, walked = rows(kind, tile.rows, width), rows(kind, tile.columns, width)
        if choice is HOPPER_BACKWARD_KEYS:
            kernel, name, maps = _keys, "keys", {"k": walked, "v": walked, "q": own, "dout": own}
        else:
            keys = rows(kind, tile.columns, width, spread=dropout)
            kernel, name, maps = _queries, "queries", {"k": keys, "v": keys, "q": own, "dout": own, "out": own}
        named = f"attention.hopper.backward.{name}"
        made = head_case(kernel, named, kind, tile, width, variant, **maps, STAGES=tile.stages)
        return replace(made, matrix_product=True)

    def every() -> Iterator[CompileCase]:
        for choice in (HOPPER_BACKWARD_QUERIES, HOPPER_BACKWARD_KEYS):
            for width, dropout, shared in itertools.product(WIDTHS, (False, True), (False, True)):
                size = (chip, "bf16", width, extras("bf16", dropout, False, shared=shared), 4096)
                for tile in choice.answers(*size).values():
                    if isinstance(tile, Tile):
                        yield case(choice, "bf16", width, tile, dropout=dropout, shared=shared)
                        if (width, dropout, shared) == (64, True, False):
                            yield case(choice, "fp16", width, tile, dropout=dropout)

    yield from distinct(every())
