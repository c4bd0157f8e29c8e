"""The cost model: a training step on an H200."""

import pytest

from benchmarks.cases import training_step
from fasttfm.kernels.proof import costs

H200 = costs.Machine(flops=790e12, bandwidth=4.3e12)
"""Published rates of large cuBLAS products and copies."""


@pytest.mark.parametrize(("preset", "milliseconds", "tflop"), [("paper-base", 15.9, 9.55), ("paper-big", 48.2, 32.3)])
def test_a_training_step_costs_what_the_page_says(preset, milliseconds, tflop):
    """Of 25,000 source and as many target tokens, no padding, bfloat16: docs/gpu-predictions.md."""
    pieces = training_step.pieces(training_step.model_config(preset), tokens=25_000, length=25)
    assert sum(1e3 * cost.seconds(H200) for cost in pieces) == pytest.approx(milliseconds, abs=0.05)
    assert sum(cost.flops for cost in pieces) / 1e12 == pytest.approx(tflop, rel=0.03)


def test_a_causal_row_scores_half_its_keys():
    full, causal = (costs.attention(2, 4, 64, 64, 32, 2, causal=c) for c in (False, True))
    assert full.flops == 4 * 2 * 4 * 64 * 64 * 32
    assert causal.flops == full.flops * 65 // 128
