"""Reading all parameters through one node changes launches, and nothing else."""

import contextlib

import pytest
import torch
from separate_launches import separate_launches

from fasttfm.functional import backend
from fasttfm.functional.parameters import Slice, Sum, read_parameters
from fasttfm.models import Transformer, TransformerConfig


def model_and_batch(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(TransformerConfig(**{**fields, "max_length": 16, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    source, target = torch.randint(4, 31, (3, 7)), torch.randint(4, 31, (3, 6))
    return model, (source, target[:, :-1], target[:, 1:], torch.tensor([7, 5, 2]), torch.tensor([5, 3, 4]))


def gradients(model, batch, precision=None, **options):
    model.zero_grad()
    torch.manual_seed(1)
    cast = contextlib.nullcontext() if precision is None else torch.autocast("cpu", precision)
    with backend("triton"):
        with cast:
            loss, _, _ = model.loss(*batch, **options)
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "pre-norm without a last norm": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "dropout everywhere": {"dropout": 0.1, "attention_dropout": 0.2, "relu_dropout": 0.3},
    "other tables": {"share_embeddings": "none"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_gradient_is_that_of_parameters_read_as_they_are(variant):
    model, batch = model_and_batch(**{"dropout": 0.0, **VARIANTS[variant]})
    actual = gradients(model, batch)
    with separate_launches():
        wanted = gradients(model, batch)
    assert any(not torch.equal(actual[name], wanted[name]) for name in wanted), "the node was not used"
    for name, gradient in wanted.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_under_autocast_gradients_are_as_near_to_float32_as_without_it():
    """GELU: of ReLU a rounding of hidden values near zero decides whole rows of gradients, on either side alike."""
    model, batch = model_and_batch(dropout=0.0, activation="gelu")
    exact = gradients(model, batch)
    actual = gradients(model, batch, torch.bfloat16)
    with separate_launches():
        plain = gradients(model, batch, torch.bfloat16)
    for name, gradient in exact.items():
        assert actual[name].dtype == torch.float32
        allowed = 2 * (plain[name] - gradient).abs().max() + 0.02 * gradient.abs().max() + 1e-3
        assert (actual[name] - gradient).abs().max() <= allowed, name


def test_gradients_add_up_over_batches():
    model, batch = model_and_batch(dropout=0.0)
    single = gradients(model, batch)
    with backend("triton"):
        model.loss(*batch)[0].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * single[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_parameter_that_does_not_train_has_no_gradient_and_changes_no_other():
    model, batch = model_and_batch(dropout=0.0)
    every = gradients(model, batch)
    frozen = ("encoder.layers.0.linear1.bias", "decoder.layers.1.multihead_attn.in_proj_weight")
    named = dict(model.named_parameters())
    for name in frozen:
        named[name].requires_grad_(False)
        named[name].grad = None
    model.zero_grad()
    with backend("triton"):
        model.loss(*batch)[0].backward()
    for name, parameter in named.items():
        if name in frozen:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, every[name], rtol=1e-4, atol=1e-4, msg=name)


def test_parts_of_a_parameter_meet_in_one_gradient():
    matrix, other, vector = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (3, 4), (6,)))
    products, biases, sums = read_parameters(
        [[Slice(matrix, 0, 2)], [Slice(matrix, 2), Slice(other)]],
        [[Slice(vector)]],
        [Sum(Slice(vector, 0, 4), 3), Sum(Slice(vector, 4), 2)],
        torch.bfloat16,
    )
    assert [tuple(x.shape) for x in products] == [(2, 4), (7, 4)]
    assert torch.equal(products[1], torch.cat([matrix[2:], other]).bfloat16())
    assert torch.equal(biases[0], vector.bfloat16())
    assert not biases[0].requires_grad
    assert [tuple(x.shape) for x in sums] == [(3, 4), (2, 2)]
    given = [torch.randn_like(x) for x in (*products, *sums)]
    torch.autograd.backward([*products, *sums], given)
    torch.testing.assert_close(matrix.grad, torch.cat([given[0], given[1][:4]]).float())
    torch.testing.assert_close(other.grad, given[1][4:].float())
    torch.testing.assert_close(vector.grad, torch.cat([given[2].sum(0), given[3].sum(0)]))


def test_what_nobody_read_gets_zeros_beside_what_somebody_did():
    matrix = torch.randn(4, 2, requires_grad=True)
    (_, second), _, _ = read_parameters([[Slice(matrix, 0, 1)], [Slice(matrix, 1)]], [], [], torch.float32)
    second.sum().backward()
    assert torch.equal(matrix.grad, torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
