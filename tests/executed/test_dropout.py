"""Dropout masks drawn by inline PTX for NVIDIA chips, which the interpreter does not run, equal the reference's."""

import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl
from executed_chips import CHIPS

sys.path.insert(0, str(Path(__file__).parents[1]))

import keep_mask

from fasttfm import reference
from fasttfm.kernels.proof.executed import executed

SEED = torch.tensor([0x0123456789ABCDEF])
WAYS = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16, "transposed": "transposed"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_draws_the_references_mask(chip, how, columns):
    """In any layout: without a matrix product, the compiler is free to choose."""
    out = torch.empty((1, 18, 150), dtype=torch.int8)
    for threshold, warps in ((26, 4), (128, 1), (256, 2)):
        with executed(chip):
            keep_mask.write(out, SEED, 3, threshold, WAYS[how], columns=columns, warps=warps)
        assert torch.equal(out.bool(), reference.keep_mask(out.shape, threshold / 256, SEED, 3))
