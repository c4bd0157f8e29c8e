"""Recorded calls of compiled loops: made together they give what the calls give, on today's content of the arrays."""

import gc

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
