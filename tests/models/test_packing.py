"""Packed training: the loss and gradients of the padded batch, without computing padding."""

import dataclasses

import pytest
import torch
from uncomputed import without_computing

from fasttfm.functional import backend
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models.packing import Packing

from .test_layer_node import tiny

LENGTHS = (7, 2, 5), (4, 6, 3)


def model_and_batch(**changes):
    model = tiny(**{"dropout": 0.0, **changes})
    source, target = torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.int64)
    lengths = [torch.tensor(side) for side in LENGTHS]
    for row, (s, t) in enumerate(zip(*LENGTHS)):
        source[row, :s] = torch.randint(4, 31, (s,))
        target[row, : t + 1] = torch.randint(4, 31, (t + 1,))
    target_in = target[:, :-1].clone()
    for row, t in enumerate(LENGTHS[1]):
        target_in[row, t:] = 0
    return model, (source, target_in, target[:, 1:], *lengths)


def run(model, batch, route, precision=None, **options):
    model.zero_grad()
    torch.manual_seed(1)
    with backend(route):
        with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
            loss, nll, tokens = model.loss(*batch, **options)
        loss.backward()
    return loss.detach(), nll, tokens, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("changes", [{}, {"norm_first": True, "final_norm": True}, {"activation": "gelu"}], ids=str)
def test_loss_and_every_gradient_are_those_of_the_padded_batch(route, changes):
    model, batch = model_and_batch(**changes)
    loss, nll, tokens, gradients = run(model, batch, route)
    packed_loss, packed_nll, packed_tokens, packed_gradients = run(model, batch, route, packed_tokens=(14, 13))
    assert packed_tokens == tokens == 13
    torch.testing.assert_close((packed_loss, packed_nll), (loss, nll), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed_gradients, gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("route", ["torch", "triton"])
def test_attention_dropout_is_that_of_the_padded_batch_and_half_precision_trains(route):
    model, batch = model_and_batch(attention_dropout=0.3)
    loss, *_ = run(model, batch, route)
    packed, *_ = run(model, batch, route, packed_tokens=(14, 13))
    torch.testing.assert_close(packed, loss, rtol=1e-5, atol=1e-5)
    half, *_, gradients = run(model, batch, route, torch.bfloat16, packed_tokens=(14, 13))
    torch.testing.assert_close(half, loss, rtol=0.03, atol=0.03)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())


def test_no_layer_sees_padding():
    model, batch = model_and_batch()
    seen = []
    for layer in (model.encoder.layers[0], model.decoder.layers[1]):
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append(tuple(inputs[0].shape)))
    run(model, batch, "torch", packed_tokens=(14, 13))
    assert seen == [(1, 14, 16), (1, 13, 16)]


def test_packing_costs_few_launches():
    logs = []
    for options in ({}, {"packed_tokens": (14, 13)}):
        model, batch = model_and_batch()
        with backend("triton"), without_computing(), LaunchLog() as log:
            model.loss(*batch, **options)[0].backward()
        logs.append(log.total)
    assert 0 < logs[1] <= logs[0] + 30


def test_lengths_must_be_given():
    model, (source, target_in, target_out, *_) = model_and_batch()
    with pytest.raises(ValueError, match="packed_tokens needs source_lengths and target_lengths"):
        model.loss(source, target_in, target_out, packed_tokens=(14, 13))


@pytest.mark.parametrize("starts", [[0, 7, 40], [0, -5, 12], [0, 9, 12]])
def test_a_packing_that_does_not_fit_its_rows_is_refused_by_nodes_too(starts):
    stack = tiny(encoder_layers=1).encoder
    packing, x = Packing.from_lengths(torch.tensor([7, 5]), 7, 12), torch.randn(1, 12, 16)
    stack(x, packing)  # caches a plan for the call below
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        stack(x, dataclasses.replace(packing, starts=torch.tensor(starts, dtype=torch.int32)))
