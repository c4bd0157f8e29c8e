"""The launch log, and the launches of a training step of the paper's depth."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import keep_mask
import pytest
import torch
from launch_limits import IN_HALF, MOST_LAUNCHES
from uncomputed import without_computing

from benchmarks.cases import synthetic
from fasttfm import functional as F
from fasttfm.functional import backend, embed
from fasttfm.kernels import choices
from fasttfm.kernels.attention.launch import key_class, width_class
from fasttfm.kernels.chip import INTERPRETER
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models import Transformer, TransformerConfig


def test_products_and_other_operators_count_but_not_views_and_allocations():
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


def test_a_sort_takes_a_pass_a_byte():
    tokens = torch.zeros(3, dtype=torch.int32)
    for options, launches in (({}, 4), ({"long_sorts": True}, 7)):
        with LaunchLog(**options) as log:
            torch.sort(tokens)
        assert log.total == launches


def test_launches_inside_of_our_operators_count():
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    with LaunchLog() as log:
        F.layer_norm(x, weight, bias)
    assert log.others["native_layer_norm"] == 1
    assert log.triton.total() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
def test_kernels_count_by_name_and_operations_of_the_interpreter_do_not_count():
    out, seed = torch.zeros(1, 4, 8, dtype=torch.int8), torch.tensor([1])
    with LaunchLog() as log:
        keep_mask.write(out, seed, 0, 1000)
        keep_mask.write(out, seed, 0, 1000)
    assert (log.triton, log.total) == ({"keep_mask._write": 2}, 2)
    keep_mask.write(out, seed, 0, 1000)
    assert log.total == 2  # outside of the block


def training_step(
    route: str, *, norm_first: bool = False, final_norm: bool | None = None, precision: torch.dtype = torch.float32
) -> LaunchLog:
    """The launches of a step of six encoder and six decoder layers.

    precision: of autocast. final_norm: None for the same as norm_first.
    """
    config = TransformerConfig(
        vocab_size=40, d_model=16, heads=2, d_ff=32, attention_dropout=0.1, relu_dropout=0.1, norm_first=norm_first,
        final_norm=norm_first if final_norm is None else final_norm,
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
    with backend("triton"), _attention_by(route), without_computing(), LaunchLog(long_sorts=True) as log:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss, _ = model.batch_loss(batch)
        loss.backward(share)
        optimizer.step()
        optimizer.zero_grad()
    return log


@contextlib.contextmanager
def _attention_by(route: str) -> Iterator[None]:
    """Context in which attention of these heads and rows takes this route, as if tuned."""
    before = choices.kept(INTERPRETER)
    sizes = [(kind, width_class(8), key_class(5)) for kind in ("fp32", "fp16", "bf16")]
    choices.keep(INTERPRETER, {**before, **{("attention.route", size): route for size in sizes}})
    try:
        yield
    finally:
        choices.keep(INTERPRETER, before)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("route", MOST_LAUNCHES)
def test_a_training_step_of_six_and_six_layers_is_few_launches(route, norm_first, capsys):
    log = training_step(route, norm_first=norm_first)
    with capsys.disabled():
        print(f"\n{log.table()}")
    assert log.total <= MOST_LAUNCHES[route] + 8 * norm_first


@pytest.mark.slow
def test_a_stack_without_a_final_norm_adds_its_last_bias_in_the_product():
    with_norm, without = (training_step("short", norm_first=True, final_norm=norm) for norm in (True, False))
    assert with_norm.triton["residual_add._add_dropped"] == 0
    assert without.triton["residual_add._add_dropped"] == 4  # forward and backward, instead of the norms
    assert without.others == with_norm.others
    assert without.total <= with_norm.total + 2  # the gradient of each stack's last bias is a separate sum


@pytest.mark.slow
def test_half_precision_adds_nine_launches_not_one_per_parameter():
    """With autocast, PyTorch casts every weight and its gradient separately."""
    log = training_step("short", precision=torch.bfloat16)
    assert log.total <= MOST_LAUNCHES["short"] + IN_HALF
    assert log.others["_to_copy"] <= 8


def test_the_pages_quote_the_number_of_launches():
    docs = Path(__file__).parents[2] / "docs"
    for page in ("proof.md", "gpu-predictions.md"):
        text = (docs / page).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{most}\b", text) for most in MOST_LAUNCHES.values()), page
