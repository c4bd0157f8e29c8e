"""The static costs against the plan: floors on an H200 that sustains 790 TFLOP/s and 4.3 TB/s."""

import pytest

from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import H200, Cost

PLANNED_MS = {
    # part of a step: base, big; 25,000 source and as many target tokens, no padding, bfloat16
    "logits and cross entropy": (4.5, 8.1),
    "attention": (1.2, 2.4),
    "residual, dropout, LayerNorm": (1.4, 2.9),
    "FFN": (4.8, 19.1),
    "projections": (3.6, 14.3),
    "Adam and embedding": (0.5, 1.5),
}
"""Fused, no part slower than its floor."""
PLANNED_TOTAL_MS = (15.9, 48.3)
PLANNED_TFLOP = (9.55, 32.3)
MODELS = {
    "base": costs.Shape(d_model=512, heads=8, d_ff=2048, vocabulary=37_000),
    "big": costs.Shape(d_model=1024, heads=16, d_ff=4096, vocabulary=37_000),
}


@pytest.mark.parametrize(("model", "column"), [("base", 0), ("big", 1)])
def test_a_training_step_costs_what_the_plan_says(model, column):
    parts = costs.training_step(MODELS[model], tokens=25_000, length=25, size=2)
    results = {part: sum(1e3 * cost.seconds(H200) for cost in pieces) for part, pieces in parts.items()}
    assert results.keys() == PLANNED_MS.keys()
    for part, planned in PLANNED_MS.items():
        assert results[part] == pytest.approx(planned[column], abs=0.06), part
    assert sum(results.values()) == pytest.approx(PLANNED_TOTAL_MS[column], abs=0.15)
    flops = sum(cost.flops for pieces in parts.values() for cost in pieces)
    assert flops / 1e12 == pytest.approx(PLANNED_TFLOP[column], rel=0.03)


def test_a_bfloat16_residual_layer_norm_takes_24_microseconds():
    cost = costs.residual_layer_norm(25_000, 512, 2, dropout=True)
    assert 1e6 * cost.seconds(H200) == pytest.approx(24, abs=0.5)
    assert cost.philox == 25_000 * 512 // 8


def test_a_causal_row_scores_half_its_keys():
    full = costs.attention(2, 4, 64, 64, 32, 2, causal=False, dropout=True)
    causal = costs.attention(2, 4, 64, 64, 32, 2, causal=True, dropout=True)
    assert full.flops == 4 * 2 * 4 * 64 * 64 * 32
    assert causal.flops == full.flops * 65 // 128


def test_the_short_backward_is_one_launch_and_reads_no_output():
    sizes = (8, 8, 100, 100, 64, 2)
    short = costs.attention_backward_short(*sizes, causal=False, dropout=True)
    assert short.launches == 1
    assert short.flops == 5 * 2 * 64 * 100 * 100 * 64
    assert short.bytes == 64 * (2 * 64 * 7 * 100 + 4 * 100)


def test_costs_add_up():
    assert Cost(1, 2, 3, 4) + Cost(10, 20, 30, 40) * 2 == Cost(21, 42, 63, 84)
