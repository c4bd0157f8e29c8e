"""Recorded calls of compiled loops: made together they give what the calls give, on today's content of the arrays."""

import gc

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from fasttfm.cpu import launches, search_loops, step_loops, thread_team
from fasttfm.cpu.panels import PanelProduct

TEAMS = [(1, 0, 0), (3, thread_team.start(), 0)]


def recorded(x, weight, out):
    """A product, a function, and two loops; the arrays in between belong to the launches alone."""
    calls = launches.Launches()
    product, between, sums = PanelProduct(weight, None, False), torch.zeros(len(x), len(weight)), out[0]
    calls.add(*product.launch(x, between))
    calls.call(lambda: between.mul_(2))
    calls.add(search_loops.log_sum_exp, between.numpy(), sums.numpy())
    calls.add(step_loops.quantize_rows, between.numpy(), out[1].numpy(), out[2].numpy())
    return calls


@pytest.mark.parametrize("team", TEAMS, ids=["one thread", "a team"])
def test_launches_read_the_content_of_the_moment(monkeypatch, team):
    monkeypatch.setattr(launches, "team", lambda record=0: (*team[:2], record))
    x, weight = torch.zeros(70, 64), torch.randn(96, 64)
    out = torch.zeros(70), torch.zeros(70, 96, dtype=torch.uint8), torch.zeros(70)
    calls = recorded(x, weight, out)
    assert not any(each.any() for each in out), "recording computes nothing"
    gc.collect()
    for turn in range(3):
        x.normal_(generator=torch.Generator().manual_seed(turn))
        calls()
        expected = 2 * (x @ weight.T)
        torch.testing.assert_close(out[0], expected.logsumexp(1), rtol=1e-4, atol=1e-4)
        again = (out[1].float() - 128) * out[2][:, None]
        assert (again - expected).abs().max() <= 1.01 * out[2].max() / 2


def test_a_loop_without_work_is_left_out():
    calls = launches.Launches()
    calls.add(*PanelProduct(torch.randn(96, 64), None, False).launch(torch.zeros(0, 64), torch.zeros(0, 96)))
    calls()
    assert not calls._kept


def test_arguments_beyond_a_record_are_refused(monkeypatch):
    monkeypatch.setattr(launches, "_WORDS", 40)
    product = PanelProduct(torch.randn(96, 64), None, False).launch(torch.zeros(3, 64), torch.zeros(3, 96))
    with pytest.raises(OverflowError, match="record"):
        launches.Launches().add(*product)


def test_records_fit_and_arrays_live_as_long_as_they():
    rows, heads, size, positions = 4, 2, 16, 8
    calls, out = launches.Launches(), np.zeros((rows, heads * size), np.float32)
    keys, values = np.zeros((2, rows, positions, heads, size), np.float32)
    joint = np.random.default_rng(0).standard_normal((rows, 3 * heads * size)).astype(np.float32)
    tables = np.zeros((rows, positions), np.int32), np.arange(rows, dtype=np.int32), np.zeros(rows, np.int64)
    quantized = np.zeros((rows, heads * size), np.uint8), np.zeros(rows, np.float32)
    scaled = np.ones(rows, np.float32), np.zeros(3 * heads * size, np.float32)
    calls.add(step_loops.attend_to_ancestors, joint.copy(), *scaled, keys, values, *tables, out, *quantized)
    del keys, values, tables
    gc.collect()
    calls()
    np.testing.assert_allclose(out, joint[:, 2 * heads * size :], rtol=1e-6)  # the only position
    assert len(calls._kept[0][0]) < launches._WORDS / 2
