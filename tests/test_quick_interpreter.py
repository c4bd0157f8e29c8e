"""The quick interpreter computes what Triton's own does."""

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import interpreted
from fasttfm.kernels.parameter import Int32Pointer, Varying

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")


@jit
def _write(out: Int32Pointer, seed: Varying, site: Varying, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    rows, blocks = tl.arange(0, ROWS), tl.arange(0, BLOCKS)
    words = tl.philox(seed, blocks[None, :], rows[:, None] * 99991, tl.program_id(0), site, 7)
    place = tl.program_id(0) * 4 * ROWS * BLOCKS + rows[:, None] * BLOCKS + blocks[None, :]
    for word in tl.static_range(4):
        tl.store(out + place + word * ROWS * BLOCKS, words[word].to(tl.int32, bitcast=True))


def test_philox_draws_the_words_of_tritons_own(monkeypatch):
    quick = tl.random.philox_impl
    assert not isinstance(quick, interpreter.InterpretedFunction)
    drawn = []
    for implementation in (quick, quick.args[2]):
        monkeypatch.setattr(tl.random, "philox_impl", implementation)
        drawn.append(torch.zeros(3, 4, 8, 2, dtype=torch.int32))
        _write[(3,)](drawn[-1], -(1 << 29) + 5, 2, ROWS=8, BLOCKS=2)
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) == drawn[0].numel()
