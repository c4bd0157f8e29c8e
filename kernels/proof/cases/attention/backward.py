"""Compile cases of attention/backward.py."""

from collections.abc import Iterator
from itertools import product

from fasttfm.kernels.attention.backward import _backward_heads, _backward_keys, _backward_queries
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import Variant, distinct, head_case
from fasttfm.kernels.proof.cases.attention.forward import long_cases
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles import attention as tiles


@distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """The two-launch kernels (dQ; dK and dV): every tile in the heaviest variant that uses it, as in forward.py, and
    the dK, dV tile for short rows (that of dQ is also one for long rows). The one-launch kernel, where LAUNCHES offers
    it."""
    yield from long_cases(chip, _backward_queries, "attention.backward.queries", tiles.BACKWARD_QUERIES)
    yield from long_cases(chip, _backward_keys, "attention.backward.keys", tiles.BACKWARD_KEYS)
    for kind in ("bf16", "fp16"):
        if isinstance(tile := tiles.SHORT_BY_LONG(chip, kind, 64, 1, 128, 128), tiles.Tile):
            yield head_case(_backward_keys, "attention.backward.keys", kind, tile, 64, Variant())
        for dropout, shared, packed in product((False, True), repeat=3):
            variant = Variant(dropout=dropout, shared=shared, packed=packed)
            size = (chip, kind, 64, variant.extras(kind))
            if 1 in tiles.LAUNCHES.alternatives(*size):
                tile = tiles.BACKWARD_HEADS(*size)
                yield head_case(_backward_heads, "attention.backward.heads", kind, tile, 64, variant)
