"""Packed training: the loss and gradients of the padded batch, without computing padding."""

import dataclasses

import pytest
import torch
from uncomputed import without_computing

from fasttfm.functional import backend
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models.packing import Packing

from .test_layer_node import LENGTHS, loss_and_gradients, model_and_batch, tiny

PACKED = {"packed_tokens": tuple(map(sum, LENGTHS))}


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("changes", [{}, {"norm_first": True, "final_norm": True}, {"activation": "gelu"}], ids=str)
def test_loss_and_every_gradient_are_those_of_the_padded_batch(route, changes):
    model, batch = model_and_batch(dropout=0.0, **changes)
    loss, gradients = loss_and_gradients(model, batch, route)
    packed_loss, packed_gradients = loss_and_gradients(model, batch, route, **PACKED)
    torch.testing.assert_close(packed_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed_gradients, gradients, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        (_, *measures), (_, *packed_measures) = model.loss(*batch), model.loss(*batch, **PACKED)
    torch.testing.assert_close(packed_measures, measures, rtol=1e-5, atol=1e-5)
    assert measures[1] == sum(LENGTHS[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("route", ["torch", "triton"])
def test_attention_dropout_is_that_of_the_padded_batch_and_half_precision_trains(route):
    model, batch = model_and_batch(dropout=0.0, attention_dropout=0.3)
    loss, _ = loss_and_gradients(model, batch, route)
    packed, _ = loss_and_gradients(model, batch, route, **PACKED)
    torch.testing.assert_close(packed, loss, rtol=1e-5, atol=1e-5)
    half, gradients = loss_and_gradients(model, batch, route, torch.bfloat16, **PACKED)
    torch.testing.assert_close(half, loss, rtol=0.03, atol=0.03)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())


def test_no_layer_sees_padding():
    model, batch = model_and_batch(dropout=0.0)
    seen = []
    for layer in (model.encoder.layers[0], model.decoder.layers[1]):
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append(tuple(inputs[0].shape)))
    loss_and_gradients(model, batch, "torch", **PACKED)
    assert seen == [(1, 14, 16), (1, 12, 16)]


def test_packing_costs_few_launches():
    logs = []
    for options in ({}, PACKED):
        model, batch = model_and_batch(dropout=0.0)
        with backend("triton"), without_computing(), LaunchLog() as log:
            model.loss(*batch, **options)[0].backward()
        logs.append(log.total)
    assert 0 < logs[1] <= logs[0] + 30


def test_lengths_must_be_given():
    model, (source, target_in, target_out, *_) = model_and_batch(dropout=0.0)
    with pytest.raises(ValueError, match="packed_tokens needs source_lengths and target_lengths"):
        model.loss(source, target_in, target_out, **PACKED)


@pytest.mark.parametrize("starts", [[0, 7, 40], [0, -5, 12], [0, 9, 12]])
def test_a_packing_that_does_not_fit_its_rows_is_refused_by_nodes_too(starts):
    stack = tiny(encoder_layers=1).encoder
    packing, x = Packing.from_lengths(torch.tensor([7, 5]), 7, 12), torch.randn(1, 12, 16)
    stack(x, packing)  # caches a plan for the call below
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        stack(x, dataclasses.replace(packing, starts=torch.tensor(starts, dtype=torch.int32)))
