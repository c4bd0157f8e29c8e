"""The launch log, and the launches of a training step of the paper's depth."""

import re
from pathlib import Path
from unittest import mock

import keep_mask
import pytest
import torch
from launch_limits import IN_HALF, MOST_LAUNCHES
from uncomputed import without_computing

from benchmarks.cases import synthetic
from fasttfm import functional as F
from fasttfm.functional import backend, embed
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models import Transformer, TransformerConfig

TOKENS, ONES = torch.zeros(3, dtype=torch.int32), torch.ones(4, 6)


def views_and_more(x, weight):
    y = torch.nn.functional.linear(x.detach(), weight, weight[0])  # one product with its bias
    y = y.view(2, 2, 6).transpose(0, 1)[0].relu().sum()
    torch.empty(3)
    y.item()


@pytest.mark.parametrize(
    ("call", "options", "launches"),
    [
        (views_and_more, {}, {"addmm": 1, "relu": 1, "sum": 1}),
        (lambda x, weight: (x @ weight.T).backward(ONES), {}, {"mm": 3}),
        (lambda x, weight: F.layer_norm(x.detach(), weight[0], weight[1]), {}, {"native_layer_norm": 1}),
        (lambda x, weight: torch.sort(TOKENS), {}, {"sort": 4}),
        (lambda x, weight: torch.sort(TOKENS), {"long_sorts": True}, {"sort": 7}),  # a pass a byte
    ],
    ids=["no views and allocations", "gradients", "inside of our operators", "a sort", "a long sort"],
)
def test_launches_of_pytorchs_operators_count(call, options, launches):
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    with LaunchLog(**options) as log:
        call(x, weight)
    assert log.products | log.others == launches
    assert log.total == sum(launches.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
def test_kernels_count_by_name_and_operations_of_the_interpreter_do_not_count():
    out, seed = torch.zeros(1, 4, 8, dtype=torch.int8), torch.tensor([1])
    with LaunchLog() as log:
        keep_mask.write(out, seed, 0, 1000)
        keep_mask.write(out, seed, 0, 1000)
    keep_mask.write(out, seed, 0, 1000)  # outside of the block
    assert (log.triton, log.total) == ({"keep_mask._write": 2}, 2)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("route", "half"), [("short", False), ("flash", False), ("softmax", False), ("short", True), ("flash", True)]
)
def test_a_training_step_of_six_and_six_layers_is_few_launches(route, norm_first, half):
    """half: bfloat16 by autocast; PyTorch casts every weight and its gradient separately."""
    config = TransformerConfig(
        vocab_size=40, d_model=16, heads=2, d_ff=32, attention_dropout=0.1, relu_dropout=0.1, norm_first=norm_first,
        final_norm=norm_first,
    )  # fmt: skip
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the first step also allocates Adam's moments
    optimizer.zero_grad()
    table = torch.zeros(config.vocab_size, config.d_model, requires_grad=True)
    with backend("triton"):
        embed(torch.zeros(1, 1, dtype=torch.int64), table).sum().backward()  # fills caches per device
    batch = synthetic.batch(2, 5, 0.3, 40, seed=0)
    share = torch.tensor(1.0 / batch.target_tokens)
    routed = mock.patch.object(attention_launch, "route", return_value=route)
    with backend("triton"), routed, without_computing(), LaunchLog(long_sorts=True) as log:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, _ = model.batch_loss(batch)
        loss.backward(share)
        optimizer.step()
        optimizer.zero_grad()
    assert log.total <= MOST_LAUNCHES[route] + 8 * norm_first + IN_HALF * half, log.table()


def test_the_pages_quote_the_number_of_launches():
    docs = Path(__file__).parents[2] / "docs"
    for page in ("proof.md", "gpu-predictions.md"):
        text = (docs / page).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{most}\b", text) for most in MOST_LAUNCHES.values()), page
