"""A plain layer as one node of autograd computes what its operators do, and their gradients."""

import contextlib

import pytest
import torch

from fasttfm.functional import backend
from fasttfm.models import Transformer, TransformerConfig, stack


def model_and_batch(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(TransformerConfig(**{**fields, "max_length": 16, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    source, target = torch.randint(4, 31, (3, 7)), torch.randint(4, 31, (3, 6))
    return model, (source, target[:, :-1], target[:, 1:], torch.tensor([7, 5, 2]), torch.tensor([5, 3, 4]))


@contextlib.contextmanager
def without_nodes():
    """Layers are computed operator by operator inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "may_run", lambda: False)
        yield


@contextlib.contextmanager
def counted_nodes():
    """Count the nodes that are made inside the block."""
    calls, node = [], stack.NODE

    def counting(*arguments):
        calls.append(arguments)
        return node(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "NODE", counting)
        yield calls


def loss_and_gradients(model, batch, choice, precision=None, **options):
    model.zero_grad()
    torch.manual_seed(1)
    cast = contextlib.nullcontext() if precision is None else torch.autocast("cpu", precision)
    with backend(choice):
        with cast:
            loss, _, _ = model.loss(*batch, **options)
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "pre-norm without a last norm": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "dropout everywhere": {"dropout": 0.1, "attention_dropout": 0.2, "relu_dropout": 0.3},
    "pre-norm with dropouts": {"norm_first": True, "dropout": 0.1, "attention_dropout": 0.2, "relu_dropout": 0.3},
    "other tables": {"share_embeddings": "none"},
}
PACKED = {"padded": {}, "packed": {"packed_tokens": (14, 12)}}


@pytest.mark.sample(7)
@pytest.mark.parametrize("choice", ["torch", "auto", "triton"])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_every_gradient_are_those_of_the_operators(variant, packed, choice):
    model, batch = model_and_batch(**{"dropout": 0.0, **VARIANTS[variant]})
    options = PACKED[packed]
    with without_nodes():
        wanted_loss, wanted = loss_and_gradients(model, batch, choice, **options)
    for _ in range(2):  # plans are made, and found
        with counted_nodes() as nodes:
            loss, actual = loss_and_gradients(model, batch, choice, **options)
        assert len(nodes) == 4
        torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-5)
        assert actual.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("variant", ["gelu", "pre-norm"])
def test_under_autocast_gradients_are_as_near_to_float32_as_those_of_the_operators(variant, choice):
    """GELU: of ReLU a rounding of hidden values near zero decides whole rows of gradients, on either side alike."""
    model, batch = model_and_batch(**{"dropout": 0.0, "activation": "gelu", **VARIANTS[variant]})
    _, exact = loss_and_gradients(model, batch, choice)
    _, actual = loss_and_gradients(model, batch, choice, torch.bfloat16)
    with without_nodes():
        _, plain = loss_and_gradients(model, batch, choice, torch.bfloat16)
    for name, gradient in exact.items():
        assert actual[name].dtype == torch.float32
        allowed = 2 * (plain[name] - gradient).abs().max() + 0.02 * gradient.abs().max() + 1e-3
        assert (actual[name] - gradient).abs().max() <= allowed, name
