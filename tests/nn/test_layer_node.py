"""With kernels, a layer run as one autograd node gives the results of its operators."""

import pytest
import torch

import fasttfm.nn
from fasttfm.functional import backend
from fasttfm.models import stack
from fasttfm.nn import _layers
from fasttfm.nn.masks import causal_mask

from .twins import padding

WIDTH, HEADS, LENGTH, SOURCE = 16, 2, 5, 6


def layer_of(kind, **changes):
    torch.manual_seed(0)
    layer_class = getattr(fasttfm.nn, f"Transformer{kind}Layer")
    layer = layer_class(WIDTH, HEADS, 24, **{"dropout": 0.0, "batch_first": True, **changes})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def inputs(layer, *lengths):
    shape = (lambda n: (3, n, WIDTH)) if layer.self_attn.batch_first else (lambda n: (n, 3, WIDTH))
    return [torch.randn(shape(n), requires_grad=True) for n in lengths]


def output_and_gradients(layer, inputs, **options):
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    layer.zero_grad()
    with backend("triton"):
        y = layer(*inputs, **options)
        torch.manual_seed(2)
        y.backward(torch.randn_like(y))
    return [y.detach(), *(x.grad for x in inputs), *(p.grad for p in layer.parameters())]


def compare(monkeypatch, layer, inputs, **options):
    calls, node = [], stack.NODE
    monkeypatch.setattr(stack, "NODE", lambda *arguments: calls.append(1) or node(*arguments))
    for _ in range(2):  # plans are created, then cached
        actual = output_and_gradients(layer, inputs, **options)
    assert len(calls) == 2
    monkeypatch.setattr(_layers, "may_run", lambda: False)
    expected = output_and_gradients(layer, inputs, **options)
    assert len(calls) == 2
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


LAYERS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "positions first": {"batch_first": False},
    "positions first, pre-norm, dropout": {"batch_first": False, "norm_first": True, "dropout": 0.2},
    "no biases": {"bias": False},
    "gelu, dropout": {"activation": "gelu", "dropout": 0.2},
}
FLOATS = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))
TARGETS, SOURCES = padding(LENGTH, 3, 2), padding(SOURCE, 3, 4)
ENCODER = {
    "nothing": {},
    "padding": {"src_key_padding_mask": TARGETS},
    "causal": {"is_causal": True},
    "mask": {"src_mask": causal_mask(LENGTH, LENGTH, torch.device("cpu"))},
    "floats": {"src_mask": FLOATS},
    "a mask a head": {"src_mask": torch.rand(3 * HEADS, LENGTH, LENGTH) > 0.7},
    "both": {"src_mask": FLOATS, "src_key_padding_mask": TARGETS},
}
DECODER = {
    "nothing": {},
    "padding": {"tgt_key_padding_mask": TARGETS, "memory_key_padding_mask": SOURCES},
    "causal": {"tgt_is_causal": True, "memory_key_padding_mask": SOURCES},
    "masks": {"tgt_mask": FLOATS, "memory_mask": torch.rand(LENGTH, SOURCE) > 0.6},
    "memory causal": {"tgt_is_causal": True, "memory_is_causal": True},
}
MASKS = [("Encoder", name) for name in ENCODER] + [("Decoder", name) for name in DECODER]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("kind", "masks"), MASKS)
@pytest.mark.parametrize("options", LAYERS)
def test_a_layer(options, kind, masks, monkeypatch):
    layer = layer_of(kind, **LAYERS[options])
    if kind == "Encoder":
        compare(monkeypatch, layer, inputs(layer, LENGTH), **ENCODER[masks])
    else:
        compare(monkeypatch, layer, inputs(layer, LENGTH, SOURCE), **DECODER[masks])


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_packed_rows(kind, norm_first, monkeypatch):
    layer = layer_of(kind, norm_first=norm_first)
    packings = [fasttfm.nn.Packing.from_padding_mask(each) for each in (TARGETS, SOURCES)]
    rows = [torch.randn(each.tokens, WIDTH) for each in packings]
    if kind == "Encoder":
        compare(monkeypatch, layer, rows[:1], packing=packings[0], is_causal=True)
    else:
        compare(monkeypatch, layer, rows, packing=packings[0], memory_packing=packings[1], tgt_is_causal=True)


def test_dropouts_follow_train_and_eval(monkeypatch):
    layer = layer_of("Encoder", dropout=0.5)
    x = inputs(layer, LENGTH)
    for change in (layer.train, layer.eval, lambda: vars(layer.dropout1.train()).update(p=0.9)):
        change()
        compare(monkeypatch, layer, x)
        monkeypatch.undo()


def test_a_fallback_to_operators_draws_one_seed(monkeypatch):
    layer = layer_of("Encoder", dropout=0.5)
    x, mask = inputs(layer, LENGTH), FLOATS.clone().requires_grad_()
    actual = output_and_gradients(layer, x, src_mask=mask)
    monkeypatch.setattr(_layers, "may_run", lambda: False)
    assert all(map(torch.equal, actual, output_and_gradients(layer, x, src_mask=mask)))


def test_inputs_of_two_dtypes_have_plans_of_their_own():
    """Under autocast a layer behind another gets bfloat16."""
    layer, x = layer_of("Encoder"), torch.randn(3, LENGTH, WIDTH)
    with backend("triton"), torch.autocast("cpu", torch.bfloat16):
        assert layer(layer(x)).dtype == torch.bfloat16
