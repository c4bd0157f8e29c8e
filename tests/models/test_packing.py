"""A pass without padding: the same loss and the same gradients, and nothing of padding computed."""

import contextlib
import dataclasses

import pytest
import torch
from uncomputed import without_computing

from fasttfm.functional import backend
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.models.packing import Packing

LENGTHS = (7, 2, 5), (4, 6, 3)


def model_and_batch(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(TransformerConfig(**{**fields, "dropout": 0.0, "max_length": 16, **changes}))
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
    cast = contextlib.nullcontext() if precision is None else torch.autocast("cpu", precision)
    with backend(route):
        with cast:
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
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("route", ["torch", "triton"])
def test_half_precision_and_dropout_run_and_attention_drops_what_it_drops_of_the_padded_batch(route):
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
    assert logs[1] <= logs[0] + 30


def test_lengths_must_be_given():
    model, (source, target_in, target_out, *_) = model_and_batch()
    with pytest.raises(ValueError, match="packed_tokens needs source_lengths and target_lengths"):
        model.loss(source, target_in, target_out, packed_tokens=(14, 13))


@pytest.mark.parametrize("starts", [[0, 7, 40], [0, -5, 12], [0, 9, 12]])
def test_a_packing_that_does_not_fit_its_rows_is_refused_by_nodes_too(starts):
    stack = Transformer(TransformerConfig(vocab_size=31, d_model=16, heads=2, d_ff=24, encoder_layers=1)).encoder
    packing, x = Packing.from_lengths(torch.tensor([7, 5]), 7, 12), torch.randn(1, 12, 16)
    stack(x, packing)  # whose plan the next would find
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        stack(x, dataclasses.replace(packing, starts=torch.tensor(starts, dtype=torch.int32)))
