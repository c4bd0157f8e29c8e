"""Costs on cases counted by hand, and against the figures in docs/gpu-predictions.md."""

import pytest

from benchmarks.cases import training_step
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import H200, Cost, Machine


def test_a_tiny_product():
    cost = costs.linear(2, 3, 5, 4)  # (2, 3) times (5, 3) transposed, float32
    assert cost == Cost(flops=2 * 2 * 3 * 5, bytes=4 * (6 + 15 + 10), launches=1)
    by_products = Machine(flops=10, bandwidth=1000)
    assert (cost.seconds(by_products), cost.bound(by_products)) == (6, "products")
    by_memory = Machine(flops=60, bandwidth=31)
    assert (cost.seconds(by_memory), cost.bound(by_memory)) == (4, "memory")


def test_attention_of_two_tokens():
    # two queries, two keys, four channels: q, k, v and output are 8 numbers each, and a log-sum-exp per row
    full = costs.attention(1, 1, 2, 2, 4, 4, causal=False, dropout=False)
    assert full == Cost(flops=2 * (2 * 2 * 2 * 4), bytes=4 * (4 * 8 + 2), launches=1)
    causal = costs.attention(1, 1, 2, 2, 4, 4, causal=True, dropout=False)
    assert causal.flops == full.flops * 3 // 4  # the first query sees one key


@pytest.mark.parametrize(("preset", "floor"), [("paper-base", 15.9), ("paper-big", 48.3)])
def test_the_floor_of_a_step_on_one_h200(preset, floor):
    """Sum over kernels, as in docs/gpu-predictions.md."""
    config = training_step.model_config(preset)
    shape = costs.Shape(d_model=config.d_model, heads=config.heads, d_ff=config.d_ff, vocabulary=config.vocab_size)
    pieces = costs.training_step(shape, tokens=25_000, length=training_step.LENGTH, size=2).values()
    assert 1e3 * sum(piece.seconds(H200) for part in pieces for piece in part) == pytest.approx(floor, abs=0.1)
    whole = training_step.cost(config, tokens=25_000)
    assert whole.flops == sum(piece.flops for part in pieces for piece in part)
