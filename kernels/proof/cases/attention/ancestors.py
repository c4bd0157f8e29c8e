"""Compile cases of attention/ancestors.py."""

import itertools
from collections.abc import Iterator

from fasttfm.kernels.attention.ancestors import _attend
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import WIDTHS
from fasttfm.kernels.proof.compile_case import DTYPES, CompileCase, kernel_case
from fasttfm.kernels.tiles.attention import ANCESTORS


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in every dtype."""
    for width, dtype in itertools.product(WIDTHS, DTYPES):
        yield kernel_case(_attend, f"attention.ancestors/D{width}", dtype, ANCESTORS(chip, dtype, width), D=width)
