"""Compile cases of attention/blackwell.py."""

from collections.abc import Iterator

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.hopper.rule import TENSOR_WIDTHS
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.attention_case import distinct
from fasttfm.kernels.proof.cases.attention.hopper.forward import forward_cases
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import BLACKWELL_FORWARD


@distinct
def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """forward_cases()."""
    if chip.name == "sm_100" and tensor_map.usable():
        from fasttfm.kernels.attention.blackwell import _forward

        yield from forward_cases(chip, _forward, "attention.blackwell", BLACKWELL_FORWARD, TENSOR_WIDTHS)
