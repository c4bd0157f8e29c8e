"""Compile cases of attention/hopper/forward.py, and the tensor maps that kernels beside it share."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.hopper.rule import BLOCK, WIDTHS
from fasttfm.kernels.attention.launch import extras
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import distinct, head_case
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import HOPPER_FORWARD, Tile


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships or that `fasttfm tune` may take, with dropout and without; at one size the other dtype,
    packed, and with shared keys."""
    if chip.name != "sm_90" or not tensor_map.usable():
        return
    from fasttfm.kernels.attention.hopper.forward import _forward

    def case(kind: str, width: int, tile: Tile, *, dropout: bool, **variant: Any) -> CompileCase:
        variant = {"dropout": dropout, "mask": "none", **variant}
        maps = {"q": rows(kind, tile.rows, width), "k": rows(kind, tile.columns, width, spread=dropout)}
        made = head_case(
            _forward, "attention.hopper.forward", kind, tile, width, variant, **maps, v=maps["k"], STAGES=tile.stages
        )
        return replace(made, matrix_product=True)

    def every() -> Iterator[CompileCase]:
        for width in WIDTHS:
            for dropout in (False, True):
                size = (chip, "bf16", width, extras("bf16", dropout, False, shared=False), 4096)
                tiles = [tile for tile in HOPPER_FORWARD.answers(*size).values() if isinstance(tile, Tile)]
                for tile in tiles:
                    yield case("bf16", width, tile, dropout=dropout)
                yield case("bf16", width, tiles[0], dropout=dropout, shared=True)
        yield case("fp16", 64, tiles[0], dropout=True)
        yield case("bf16", 128, tiles[0], dropout=False, packed=True)

    yield from distinct(every())


def rows(kind: str, count: int, width: int, *, spread: bool = False) -> str:
    """A tensor map that brings so many rows of a head, as rule.Heads makes it."""
    block = (1, BLOCK // 2, count // BLOCK, 2, width) if spread else (1, count, width)
    return f"map {kind} {'x'.join(map(str, block))}"
