"""torch.compile captures the whole Transformer as one graph, in training too, with the same results."""

import pytest
import torch

from fasttfm.functional import backend

from .test_layer_node import model_and_batch


def loss_and_gradients(model, loss, batch):
    model.zero_grad()
    value = loss(*batch)[0]
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_a_training_pass_is_one_graph_with_the_same_loss_and_gradients(route, norm_first):
    model, batch = model_and_batch(dropout=0.0, norm_first=norm_first, final_norm=norm_first)
    with backend(route):
        wanted, expected = loss_and_gradients(model, model.loss, batch)
        compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
        loss, gradients = loss_and_gradients(model, compiled, batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_drawn_anew_in_every_compiled_pass():
    model, batch = model_and_batch(dropout=0.3, encoder_layers=1, decoder_layers=1)
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    assert compiled(*batch)[0] != compiled(*batch)[0]
