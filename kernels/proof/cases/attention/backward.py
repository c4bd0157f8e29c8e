"""Compile cases of attention/backward.py."""

from collections.abc import Iterator
from itertools import product

from fasttfm.kernels.attention.backward import _backward_heads, _backward_keys, _backward_queries
from fasttfm.kernels.attention.launch import extras
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import distinct, head_case
from fasttfm.kernels.proof.cases.attention.forward import long_cases
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles import attention as tiles


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """The cases of the two kernels: every tile in the heaviest variant that takes it, as in forward.py; of the second
    that for short rows too, which the first has for long ones; and of the one kernel where it may be taken."""
    yield from distinct(_cases(chip))


def _cases(chip: Chip) -> Iterator[CompileCase]:
    yield from long_cases(chip, _backward_queries, "attention.backward.queries", tiles.BACKWARD_QUERIES)
    yield from long_cases(chip, _backward_keys, "attention.backward.keys", tiles.BACKWARD_KEYS)
    for kind in ("bf16", "fp16"):
        if isinstance(tile := tiles.SHORT_BY_LONG(chip, kind, 64, 1, 128, 128), tiles.Tile):
            dropped = {"dropout": True, "mask": "none"}
            yield head_case(_backward_keys, "attention.backward.keys", kind, tile, 64, dropped)
        for dropout, shared, packed in product((False, True), repeat=3):
            size = (chip, kind, 64, extras(kind, dropout, False, shared=shared))
            if 1 in tiles.LAUNCHES.alternatives(*size):
                variant = {"dropout": dropout, "mask": "none", "packed": packed, "shared": shared}
                tile = tiles.BACKWARD_HEADS(*size)
                yield head_case(_backward_heads, "attention.backward.heads", kind, tile, 64, variant)
