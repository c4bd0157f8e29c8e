"""Plain layers run as one autograd node give the outputs and gradients of their operators."""

import contextlib

import pytest
import torch

from fasttfm.functional import backend
from fasttfm.models import Transformer, TransformerConfig, stack


def tiny(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2}
    return Transformer(TransformerConfig(**{**fields, "max_length": 16, **changes}))


LENGTHS = (7, 5, 2), (5, 3, 4)


def batch_of(lengths=LENGTHS):
    """source, target_in, target_out, and the lengths of both sides; padded with zeros."""
    generator = torch.Generator().manual_seed(1)
    source, target_in, target_out = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.randint(4, 31, (length,), generator=generator) for length in side], batch_first=True
        )
        for side in (*lengths, lengths[1])
    )
    return source, target_in, target_out, *(torch.tensor(side) for side in lengths)


def model_and_batch(**changes):
    model = tiny(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, batch_of()


@contextlib.contextmanager
def without_nodes():
    """Run layers operator by operator within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "may_run", lambda: False)
        yield


@contextlib.contextmanager
def counted_nodes():
    """Record the arguments of nodes created within the block."""
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
    "biases that do not fill 16 bytes": {"d_model": 12},
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
    for _ in range(2):  # plans are created, then cached
        with counted_nodes() as nodes:
            loss, actual = loss_and_gradients(model, batch, choice, **options)
        assert len(nodes) == 2
        torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("variant", ["gelu", "pre-norm"])
def test_under_autocast_gradients_are_as_near_to_float32_as_those_of_the_operators(variant, choice):
    """With GELU: with ReLU, rounding of hidden values near zero changes whole rows of gradients."""
    model, batch = model_and_batch(**{"dropout": 0.0, "activation": "gelu", **VARIANTS[variant]})
    _, exact = loss_and_gradients(model, batch, choice)
    _, actual = loss_and_gradients(model, batch, choice, torch.bfloat16)
    with without_nodes():
        _, plain = loss_and_gradients(model, batch, choice, torch.bfloat16)
    for name, gradient in exact.items():
        assert actual[name].dtype == torch.float32
        allowed = 2 * (plain[name] - gradient).abs().max() + 0.02 * gradient.abs().max() + 1e-3
        assert (actual[name] - gradient).abs().max() <= allowed, name


FROZEN = {
    "the lower layers and all before": lambda name: not name.startswith(("decoder.layers.2", "output")),
    "a layer": lambda name: name.startswith("decoder.layers.1"),
    "projections of the memory": lambda name: name.startswith("decoder.layers.1.multihead_attn.in_proj"),
    "all biases": lambda name: name.endswith("bias"),
    "a weight of a joint projection": lambda name: name == "decoder.layers.1.multihead_attn.in_proj_weight",
    "an output projection and a norm": lambda name: name.endswith(
        ("encoder.layers.1.self_attn.out_proj.weight", "norm2.weight")
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters_get_no_gradient_and_all_others_theirs(frozen, norm_first, choice):
    """With plans that were made while all learned."""
    model, batch = model_and_batch(decoder_layers=3, dropout=0.0, norm_first=norm_first, share_embeddings="none")
    loss_and_gradients(model, batch, choice)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    with without_nodes():
        _, wanted = loss_and_gradients(model, batch, choice)
    _, actual = loss_and_gradients(model, batch, choice)
    assert actual.keys() == wanted.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


SAVED = {
    "contiguous": (lambda x: x, torch.Tensor.contiguous),
    "copied": (
        lambda x: x.double() if x.is_floating_point() else x.clone(),
        lambda x: x.float() if x.is_floating_point() else x,
    ),
}


@pytest.mark.parametrize(("saved", "choice"), [("contiguous", "triton"), ("copied", "torch")])
def test_saved_tensors_may_come_back_in_other_memory(saved, choice):
    model, batch = model_and_batch()
    wanted, packed, (pack, unpack) = loss_and_gradients(model, batch, choice), [], SAVED[saved]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or pack(x), unpack):
        actual = loss_and_gradients(model, batch, choice)
    assert packed
    rtol = 0.0 if choice == "torch" else 1e-5
    torch.testing.assert_close(actual, wanted, rtol=rtol, atol=rtol)
