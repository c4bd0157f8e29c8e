"""The reference's norms, residual connection, feed-forward network, dropout, loss and embedding against
torch.nn; gradcheck.
"""

import functools

import pytest
import torch
from torch import nn

from fasttfm import reference

SEED = torch.tensor([42])
DROPPED = {"dropout_p": 0.3, "seed": SEED, "site": 2}
torch_loss = functools.partial(nn.functional.cross_entropy, reduction="sum")


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.cos(torch.arange(ours.numel(), dtype=torch.float64)).view(ours.shape)
    mine, others = (torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True) for y in (ours, theirs))
    torch.testing.assert_close(mine, others, rtol=1e-11, atol=1e-12)


NORMS = {
    "layer": (nn.LayerNorm, nn.functional.layer_norm, reference.layer_norm, reference.residual_layer_norm),
    "rms": (nn.RMSNorm, nn.functional.rms_norm, reference.rms_norm, reference.residual_rms_norm),
}


def affine_parameters(kind, draw):
    return [draw() for _ in range(2 if kind == "layer" else 1)]


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_equal_torchs(kind, eps, affine):
    module, _, ours, _ = NORMS[kind]
    norm = module(13, eps=eps, elementwise_affine=affine, dtype=torch.float64)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = double(3, 5, 13)
    parameters = list(norm.parameters()) or affine_parameters(kind, lambda: None)
    assert_same(ours(x, *parameters, eps), norm(x), [x, *norm.parameters()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_half_precision_are_rounded_once(kind, dtype):
    _, theirs, ours, _ = NORMS[kind]
    x, parameters = torch.randn(4, 40).to(dtype), affine_parameters(kind, lambda: torch.randn(40))
    exact = theirs(x.double(), (40,), *(each.double() for each in parameters), eps=1e-6)
    assert torch.equal(ours(x, *parameters, 1e-6), exact.to(dtype))


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("kind", NORMS)
def test_residual_norms_are_dropout_sum_and_norm(kind, p):
    _, theirs, _, ours = NORMS[kind]
    x, residual, parameters = double(4, 6, 10), double(4, 6, 10), affine_parameters(kind, lambda: double(10))
    keep = reference.keep_mask((1, 24, 10), p, SEED, 3).view(4, 6, 10)
    y, s = ours(x, residual, *parameters, 1e-6, dropout_p=p, seed=SEED, site=3)
    expected = residual + x * keep * reference.dropout_scale(p)
    assert_same(s, expected, [x, residual])
    assert_same(y, theirs(expected, (10,), *parameters, eps=1e-6), [x, residual, *parameters])
    assert_same(reference.residual_add(x, residual, dropout_p=p, seed=SEED, site=3), expected, [x, residual])
    assert torch.equal(reference.residual_add(x, residual, dropout_p=p), residual + x)  # no seed, no dropout


@pytest.mark.parametrize(
    ("name", "activation", "bias"),
    [
        ("relu", nn.ReLU(), True),
        ("relu", nn.ReLU(), False),
        ("gelu", nn.GELU(), True),
        ("gelu_tanh", nn.GELU("tanh"), True),
    ],
)
def test_feed_forward_equals_two_linear_layers(name, activation, bias):
    layers = nn.Sequential(nn.Linear(7, 19, bias), activation, nn.Linear(19, 5, bias)).double()
    first, _, second = layers
    x = (3 * double(2, 3, 7)).detach().requires_grad_()
    ours = reference.feed_forward(x, first.weight, first.bias, second.weight, second.bias, activation=name)
    assert_same(ours, layers(x), [x, *layers.parameters()])


def test_dropout_is_on_the_hidden_activation_and_keeps_the_expectation():
    x, weight1, weight2 = double(6, 7), double(19, 7), double(5, 19)
    keep = reference.keep_mask((1, 6, 19), 0.4, SEED)[0]
    hidden = torch.relu(x @ weight1.T) * keep * reference.dropout_scale(0.4)
    ours = reference.feed_forward(x, weight1, None, weight2, None, dropout_p=0.4, seed=SEED)
    assert_same(ours, hidden @ weight2.T, [x, weight1, weight2])
    mean = reference.dropout(torch.ones(512, 512, dtype=torch.float64), 0.1, SEED).mean()
    assert abs(mean - 1) < 5 * (0.1 / 0.9) ** 0.5 / 512


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_cross_entropy_equals_torchs(label_smoothing, ignore_index):
    logits, hidden, weight, target = double(7, 11), double(7, 5), double(11, 5), torch.tensor([1, 10, 0, 3, 3, 0, 7])
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    for leaves, function, x in (
        ([logits], reference.cross_entropy, logits),
        ([hidden, weight], reference.linear_cross_entropy, hidden @ weight.T),
    ):
        loss, nll = function(*leaves, target, **options)
        expected = torch_loss(x, target, **options)
        torch.testing.assert_close(nll, torch_loss(x, target, ignore_index=ignore_index))
        assert_same(loss, expected, leaves)


def test_all_targets_ignored():
    logits = double(7, 11)
    loss, nll = reference.cross_entropy(logits, torch.zeros(7, dtype=torch.int64), ignore_index=0, label_smoothing=0.1)
    loss.backward()
    assert loss == nll == 0
    assert (logits.grad == 0).all()


def test_half_precision_logits_have_a_float32_loss():
    logits, target = double(7, 11).bfloat16(), torch.arange(7)
    loss, nll = reference.cross_entropy(logits, target)
    assert loss.dtype == nll.dtype == torch.float32
    assert loss.item() == pytest.approx(torch_loss(logits.double(), target).item(), rel=1e-6)


@pytest.mark.parametrize("pad_id", [None, 0])
def test_embed_equals_torchs_embedding_scaled_plus_positions(pad_id):
    weight, positions = double(9, 6), double(10, 6)
    tokens = torch.tensor([[1, 2, 0], [8, 0, 0]])
    actual = reference.embed(tokens, weight, positions, scale=6**0.5, first_position=4, pad_id=pad_id)
    expected = nn.functional.embedding(tokens, weight, padding_idx=pad_id) * 6**0.5 + positions[4:7]
    expected = expected if pad_id is None else expected * (tokens != pad_id)[..., None]
    assert_same(actual, expected, [weight, positions])


TOKENS, LENGTHS, TARGET = torch.tensor([[1, 2, 0], [8, 0, 0]]), torch.tensor([4, 2]), torch.tensor([1, 0, 4])
SMOOTHED = {"label_smoothing": 0.1, "ignore_index": 0}
DIFFERENTIABLE = {
    "attention": (
        lambda q, k, v, m: reference.attention(q, k, v, mask=m, causal=True, key_lengths=LENGTHS, **DROPPED)[0],
        [(2, 2, 3, 4), (2, 2, 4, 4), (2, 2, 4, 3), (1, 3, 4)],
    ),
    "residual_layer_norm": (lambda *x: reference.residual_layer_norm(*x, **DROPPED), [(3, 6), (3, 6), (6,), (6,)]),
    "residual_add": (lambda *x: reference.residual_add(*x, **DROPPED), [(3, 6), (3, 6)]),
    "feed_forward": (lambda *x: reference.feed_forward(*x, **DROPPED), [(3, 6), (9, 6), (9,), (4, 9), (4,)]),
    "cross_entropy": (lambda x: reference.cross_entropy(x, TARGET, **SMOOTHED), [(3, 5)]),
    "linear_cross_entropy": (lambda h, w: reference.linear_cross_entropy(h, w, TARGET, **SMOOTHED), [(3, 4), (5, 4)]),
    "embed": (lambda w, p: reference.embed(TOKENS, w, p, scale=2.0, pad_id=0, **DROPPED), [(9, 6), (5, 6)]),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_equal_finite_differences(name):
    function, shapes = DIFFERENTIABLE[name]
    assert torch.autograd.gradcheck(function, [double(*shape) for shape in shapes], fast_mode=True)
