"""Compile cases of attention/backward.py."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from fasttfm.kernels.attention.backward import _backward_heads, _backward_keys, _backward_queries
from fasttfm.kernels.attention.launch import extras
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import distinct, head_case
from fasttfm.kernels.proof.cases.attention.forward import long_cases
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import (
    BACKWARD_HEADS,
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    LAUNCHES,
    SHORT_BY_LONG,
    Tile,
)


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """The cases of the two kernels: every tile in the heaviest variant that takes it, as in forward.py; and of the one
    kernel where it may be taken."""
    two = (
        (_backward_queries, "attention.backward.queries", BACKWARD_QUERIES),
        (_backward_keys, "attention.backward.keys", BACKWARD_KEYS),
    )
    for kernel, name, choose in two:
        yield from distinct([*long_cases(chip, kernel, name, choose), *_short_cases(chip, kernel, name)])
    yield from distinct(_heads_cases(chip))


def _short_cases(chip: Chip, kernel: Any, name: str) -> Iterator[CompileCase]:
    """With the tile for short rows, where there is one."""
    for kind in ("bf16", "fp16"):
        if isinstance(tile := SHORT_BY_LONG(chip, kind, 64, extras(kind, True, False, shared=False), 128, 128), Tile):
            yield head_case(kernel, name, kind, tile, 64, {"dropout": True, "mask": "none"})


def _heads_cases(chip: Chip) -> Iterator[CompileCase]:
    for kind in ("bf16", "fp16"):
        for dropout, shared, packed in product((False, True), repeat=3):
            size = (chip, kind, 64, extras(kind, dropout, False, shared=shared))
            if 1 in LAUNCHES.alternatives(*size):
                variant = {"dropout": dropout, "mask": "none", "packed": packed, "shared": shared}
                name, tile = "attention.backward.heads", BACKWARD_HEADS(*size)
                yield head_case(_backward_heads, name, kind, tile, 64, variant)
