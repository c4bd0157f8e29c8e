"""The launch log itself, and what a training step of the paper's depth launches."""

import keep_mask
import pytest
import torch
from fasttfm.kernels.proof.launch_log import LaunchLog

from fasttfm import functional as F
from fasttfm.functional import backend
from fasttfm.models import Transformer, TransformerConfig

MOST_LAUNCHES = 318
"""Of a training step with six encoder and six decoder layers; more would bind a fast GPU below 5,000 tokens a step."""


def test_products_other_operators_views_and_allocations_are_told_apart():
    x, weight, bias = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)
    with LaunchLog() as log:
        y = torch.nn.functional.linear(x, weight, bias)  # one product with its bias
        y = y.view(2, 2, 5).transpose(0, 1)[0].detach()
        y = y.relu().sum()
        torch.empty(3)
        y.item()
    assert (log.products, log.others) == ({"addmm": 1}, {"relu": 1, "sum": 1})
    assert log.total == 3


def test_gradients_count_too():
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    with LaunchLog() as log:
        (x @ weight.T).backward(torch.ones(4, 5))
    assert log.products == {"mm": 3}


def test_an_optimizer_takes_as_many_launches_as_its_tensors_fill():
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(73)]
    for p in parameters:
        p.grad = torch.ones(3)
    optimizer = torch.optim.Adam(parameters, fused=True)
    optimizer.step()
    with LaunchLog() as log:
        optimizer.step()
    assert log.others["_fused_adam_"] == 3  # 36 tensors each in four lists


def test_an_operator_of_ours_is_looked_into():
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    with LaunchLog() as log:
        F.layer_norm(x, weight, bias)
    assert log.others["native_layer_norm"] == 1
    assert log.triton.total() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
def test_kernels_count_by_name_and_what_the_interpreter_does_counts_nothing():
    out, seed = torch.zeros(1, 4, 8, dtype=torch.int8), torch.tensor([1])
    with LaunchLog() as log:
        keep_mask.write(out, seed, 0, 1000)
        keep_mask.write(out, seed, 0, 1000)
    assert (log.triton, log.total) == ({"keep_mask._write": 2}, 2)
    keep_mask.write(out, seed, 0, 1000)
    assert log.total == 2  # the block has ended


def training_step(norm_first: bool, precision: torch.dtype) -> LaunchLog:
    config = TransformerConfig(
        vocab_size=40,
        d_model=16,
        heads=2,
        d_ff=32,
        attention_dropout=0.1,
        relu_dropout=0.1,
        norm_first=norm_first,
        final_norm=norm_first,
    )
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the first step also makes Adam's moments
    optimizer.zero_grad()
    source, target = torch.randint(4, 40, (2, 5)), torch.randint(4, 40, (2, 4))
    with backend("triton"), LaunchLog() as log:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss, _, tokens = model.loss(source, target, target, torch.tensor([5, 3]), torch.tensor([4, 4]))
        (loss / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return log


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_a_training_step_of_six_and_six_layers_is_few_launches(norm_first, capsys):
    """A narrow model: of width nothing depends but how many launches walk over the lists of parameters."""
    log = training_step(norm_first, torch.float32)
    with capsys.disabled():
        print(f"\n{log.table()}")
    assert log.total <= MOST_LAUNCHES


@pytest.mark.slow
def test_half_precision_adds_ten_launches_not_one_a_parameter():
    """Under autocast PyTorch casts every weight forth and its gradient back by itself."""
    log = training_step(False, torch.bfloat16)
    assert log.total <= MOST_LAUNCHES + 10
    assert log.others["_to_copy"] <= 6
