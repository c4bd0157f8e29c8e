"""The quick interpreter computes what Triton's own does, and leaves triton.language as Triton does."""

from __future__ import annotations

import inspect

import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl

from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import interpreted
from fasttfm.kernels.parameter import Int32Pointer, Varying

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")


@jit
def _draw(out: Int32Pointer, seed: Varying, site: Varying, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    rows, blocks = tl.arange(0, ROWS), tl.arange(0, BLOCKS)
    words = tl.philox(seed, blocks[None, :], rows[:, None] * 99991, tl.program_id(0), site, 7)
    place = tl.program_id(0) * 4 * ROWS * BLOCKS + rows[:, None] * BLOCKS + blocks[None, :]
    for word in tl.static_range(4):
        tl.store(out + place + word * ROWS * BLOCKS, words[word].to(tl.int32, bitcast=True))


@triton.jit
def _twice(x):
    return x + x


@jit
def _add_up(out: Int32Pointer, TIMES: tl.constexpr):
    total = tl.zeros((8,), tl.int32)
    for n in tl.static_range(TIMES):
        total += _twice(tl.arange(0, 8) + n)
    tl.store(out + tl.arange(0, 8), total + tl.sum(total, 0))


def test_philox_draws_the_words_of_tritons_own(monkeypatch):
    drawn = []
    for _ in range(2):
        drawn.append(torch.zeros(3, 4, 8, 2, dtype=torch.int32))
        _draw[(3,)](drawn[-1], -(1 << 29) + 5, 2, ROWS=8, BLOCKS=2)
        monkeypatch.setattr(quick_interpreter, "_philox", lambda own, *given: own(*given))
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) == drawn[0].numel()


def test_a_launch_walks_over_the_language_once_however_often_it_calls_helpers(monkeypatch):
    walked, members = [], inspect.getmembers
    monkeypatch.setattr(inspect, "getmembers", lambda *given: walked.append(1) or members(*given))

    def walks(times):
        walked.clear()
        out = torch.zeros(8, dtype=torch.int32)
        _add_up[(1,)](out, TIMES=times)
        expected = sum(2 * (torch.arange(8) + n) for n in range(times))
        assert torch.equal(out.long(), expected + expected.sum())
        return len(walked)

    walks(1)  # the first time, it compiles
    assert walks(1) == walks(9) > 0


def test_after_a_launch_the_language_is_what_it_was_before():
    out = torch.zeros(8, dtype=torch.int32)
    _add_up[(1,)](out, TIMES=1)
    places = (tl, tl.tensor, tl.math, tl.random)  # triton.language.core is changed by each launch of Triton's own
    before = [dict(vars(place)) for place in places]
    _add_up[(1,)](out, TIMES=1)
    assert [dict(vars(place)) for place in places] == before
    assert "Interpreted" in type(tl.random.philox_impl).__name__
