"""The cost model: a training step on an H200, and its counts against the kernels' in the interpreter."""

import collections
import contextlib
from unittest import mock

import pytest
import torch

from benchmarks.cases import training_step
from fasttfm import functional as F
from fasttfm.functional import backend
from fasttfm.kernels import cross_entropy
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.launch_log import LaunchLog

through_the_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")

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


@contextlib.contextmanager
def traffic():
    """Counts of the kernels launched in a block: bytes of unmasked elements at every load and store, flops of tl.dot
    tile by tile."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    seen = collections.Counter()

    def count_bytes(pointers, mask):
        seen["bytes"] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def load(self, pointers, mask, *rest, run=Builder.create_masked_load):
        count_bytes(pointers, mask)
        return run(self, pointers, mask, *rest)

    def store(self, pointers, value, mask, *rest, run=Builder.create_masked_store):
        count_bytes(pointers, mask)
        return run(self, pointers, value, mask, *rest)

    def dot(self, a, b, *rest, run=Builder.create_dot):
        seen["flops"] += 2 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return run(self, a, b, *rest)

    counting = {"create_masked_load": load, "create_masked_store": store, "create_dot": dot}
    with mock.patch.multiple(Builder, **counting), LaunchLog() as log, backend("triton"):
        yield seen
    seen["launches"] = log.triton.total()


def tensor(*shape):
    return torch.randn(shape, requires_grad=True)


SEED = torch.tensor([3])


def gradients(function, *inputs):
    """A call that computes the gradients alone."""
    with backend("triton"):
        output = function(*inputs)
    output = output if isinstance(output, torch.Tensor) else output[0]
    return lambda: torch.autograd.grad(output, inputs, torch.ones_like(output))


def assert_as_modelled(cost, run, most, launches=1):
    """run() multiplies what the model says in one launch, and moves at most `most` times its bytes."""
    with traffic() as seen:
        run()
    assert cost.bytes <= seen["bytes"] <= most * cost.bytes
    assert (seen["flops"], seen["launches"]) == (cost.flops, launches)


@through_the_interpreter
@pytest.mark.parametrize("dropout", [False, True])
def test_rows(dropout):
    rows, width = 256, 512
    options = {"dropout_p": 0.1 if dropout else 0.0, "seed": SEED}
    inputs = tensor(rows, width), tensor(rows, width), tensor(width), tensor(width)

    def run(*inputs):
        return F.residual_layer_norm(*inputs, **options)

    # not in the model: weight and bias, once per program
    assert_as_modelled(costs.residual_layer_norm(rows, width, 4), lambda: run(*inputs), 1.3)
    # not in the model: weight, and the partial sums of its gradient, which do not depend on the number of rows
    cost = costs.residual_layer_norm_backward(rows, width, 4, dropout=dropout)
    assert_as_modelled(cost, gradients(run, *inputs), 2, launches=2)
    if not dropout:
        assert_as_modelled(costs.layer_norm(rows, width, 4), lambda: F.layer_norm(inputs[0], *inputs[2:]), 1.6)
    tokens, weight = torch.randint(50, (2, 16)), tensor(50, 256)
    assert_as_modelled(costs.embedding(2 * 16, 256, 4), lambda: F.embed(tokens, weight, **options), 1.1)


@through_the_interpreter
@pytest.mark.parametrize("dropout", [False, True])
def test_attention_over_short_rows(dropout):
    sizes = (2, 2, 32, 32, 32)
    inputs = [tensor(2, 2, 32, 32) for _ in range(3)]

    def run(*inputs):
        return F.attention(*inputs, dropout_p=0.1 if dropout else 0.0, seed=SEED)

    # keys and values once per tile of queries
    assert_as_modelled(costs.attention(*sizes, 4, causal=False), lambda: run(*inputs), 1.5)
    cost = costs.attention_backward_short(*sizes, 4, causal=False)
    assert_as_modelled(cost, gradients(run, *inputs), 1.1)


@through_the_interpreter
def test_attention_over_long_rows():
    once = costs.attention_backward_short(1, 1, 256, 256, 32, 4, causal=False)
    run = gradients(F.attention, *(tensor(1, 1, 256, 32) for _ in range(3)))
    with traffic() as seen:
        run()
    assert seen["flops"] == 7 * once.flops / 5  # the scores and their gradient twice
    assert seen["bytes"] >= once.bytes  # each tile of queries rereads all keys, from the cache of a chip
    assert seen["launches"] == 2


@through_the_interpreter
def test_cross_entropy_that_leaves_its_gradient_in_the_logits():
    target = torch.arange(8)
    options = {"label_smoothing": 0.0, "ignore_index": -100, "overwrite": True}
    launch = cross_entropy.Forward(logits := tensor(8, 1024), target, **options)
    assert_as_modelled(costs.cross_entropy(8, 1024, 4), lambda: launch(logits, target), 1.02)
