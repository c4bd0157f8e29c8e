"""Compile cases of attention/backward.py."""

from collections.abc import Iterator

from fasttfm.kernels.attention.backward import _backward_keys, _backward_queries
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import distinct
from fasttfm.kernels.proof.cases.attention.forward import long_cases
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import BACKWARD_KEYS, BACKWARD_QUERIES


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """The cases of both kernels: every tile in the heaviest variant that takes it, as in forward.py."""
    yield from distinct(long_cases(chip, _backward_queries, "attention.backward.queries", BACKWARD_QUERIES))
    yield from distinct(long_cases(chip, _backward_keys, "attention.backward.keys", BACKWARD_KEYS))
