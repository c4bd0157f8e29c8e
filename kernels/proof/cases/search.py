"""Compile cases of search.py."""

from collections.abc import Iterator

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.search import _CANDIDATES, _COLUMNS, _EMBEDDING, _admit, _choose, _embed, _likeliest
from fasttfm.kernels.tiles.rows import SEARCH_CANDIDATES, SEARCH_SHARES, SEARCH_SLOTS


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile; for parts of the vocabulary (shares) every dtype, with and without selected tokens."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield kernel_case(_embed, "search.embed", dtype, _EMBEDDING)
        for columns in _COLUMNS:
            tile = SEARCH_SHARES(chip, columns)
            yield kernel_case(_likeliest, "search.likeliest/selected", dtype, tile)
            yield kernel_case(_likeliest, "search.likeliest", dtype, tile, selected=None)
    for slots in (128, 1024):
        yield kernel_case(_admit, "search.admit", "fp32", SEARCH_SLOTS(chip, slots))
    for rows, sizes in _CANDIDATES.items():
        for size in sizes:
            yield kernel_case(_choose, "search.choose", "fp32", SEARCH_CANDIDATES(chip, rows, size))
