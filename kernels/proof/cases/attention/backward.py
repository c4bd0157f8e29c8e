"""Compile cases of attention/backward.py."""

from collections.abc import Iterator
from itertools import product

from fasttfm.kernels.attention.backward import _backward_heads, _backward_keys, _backward_queries
from fasttfm.kernels.attention.launch import extras
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import distinct, head_case
from fasttfm.kernels.proof.cases.attention.forward import long_cases
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import BACKWARD_HEADS, BACKWARD_KEYS, BACKWARD_QUERIES, LAUNCHES


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """The cases of the two kernels: every tile in the heaviest variant that takes it, as in forward.py; and of the one
    kernel where it may be taken."""
    yield from distinct(long_cases(chip, _backward_queries, "attention.backward.queries", BACKWARD_QUERIES))
    yield from distinct(long_cases(chip, _backward_keys, "attention.backward.keys", BACKWARD_KEYS))
    yield from distinct(_heads_cases(chip))


def _heads_cases(chip: Chip) -> Iterator[CompileCase]:
    for kind in ("bf16", "fp16"):
        for dropout, shared, packed in product((False, True), repeat=3):
            size = (chip, kind, 64, extras(kind, dropout, False, shared=shared))
            if 1 in LAUNCHES.alternatives(*size):
                variant = {"dropout": dropout, "mask": "none", "packed": packed, "shared": shared}
                name, tile = "attention.backward.heads", BACKWARD_HEADS(*size)
                yield head_case(_backward_heads, name, kind, tile, 64, variant)
