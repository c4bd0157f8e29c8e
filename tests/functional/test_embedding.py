"""embed on the torch route: against the reference, autograd, autocast, wrong arguments."""

import pytest
import torch

from fasttfm import reference
from fasttfm.functional import embed

SEED = torch.tensor([11])


def draw(dtype=torch.float32, vocabulary=30, width=12, table=9):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, vocabulary, (3, 5), generator=generator)
    tokens[1, 3:] = 0
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    positions = torch.randn(table, width, generator=generator).to(dtype).requires_grad_()
    return tokens, weight, positions


def solve(function, tokens, weight, positions, **options):
    y = function(tokens, weight, positions, **options)
    factor = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return y.detach(), *torch.autograd.grad(y, [t for t in (weight, positions) if t is not None], factor)


OPTIONS = {"scale": 3.5, "pad_id": 0, "first_position": 2, "dropout_p": 0.3, "seed": SEED, "site": 4}


@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("pad_id", [None, 0])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3, 1.0])
def test_equals_the_reference_in_float64(with_positions, pad_id, dropout_p):
    tokens, weight, positions = draw(torch.float64)
    options = OPTIONS | {"pad_id": pad_id, "dropout_p": dropout_p}
    inputs = (tokens, weight, positions if with_positions else None)
    torch.testing.assert_close(solve(embed, *inputs, **options), solve(reference.embed, *inputs, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_weights_are_summed_in_float32(dtype):
    tokens = torch.full((4, 500), 3)
    weight = torch.zeros(5, 8, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(embed(tokens, weight), weight, torch.ones(4, 500, 8, dtype=dtype))
    assert gradient.dtype == dtype
    assert (gradient[3] == 2000).all()  # adding ones in bfloat16 would stop at 256


def test_gradients_are_deterministic_and_computed_if_needed():
    tokens, weight, positions = draw()
    both = solve(embed, tokens, weight, positions, **OPTIONS)
    repeated = solve(embed, tokens, weight, positions, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(both, repeated, strict=True))
    y = embed(tokens, weight, positions, **OPTIONS)
    factor = torch.linspace(-1, 1, y.numel()).view(y.shape)
    for x, expected in zip((weight, positions, weight), (both[1], both[2], both[1]), strict=True):
        assert torch.equal(torch.autograd.grad(y, x, factor, retain_graph=True)[0], expected)
    embed(tokens, weight, positions.detach(), **OPTIONS).sum().backward()
    assert positions.grad is None
    embed(tokens, weight.detach(), positions, **OPTIONS).sum().backward()
    assert positions.grad is not None


def test_weight_may_change_before_the_backward_pass():
    tokens, weight, _ = draw()
    y = embed(tokens, weight, scale=2.0)
    with torch.no_grad():
        weight.zero_()
    y.sum().backward()
    assert weight.grad.sum().item() == tokens.numel() * 12 * 2


def test_no_tokens():
    _, weight, positions = draw()
    y = embed(torch.zeros(0, 5, dtype=torch.int64), weight, positions)
    assert y.shape == (0, 5, 12)
    y.sum().backward()
    assert (weight.grad == 0).all()


def test_autocast_keeps_the_dtype_of_weight():
    tokens, weight, positions = draw()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(embed(tokens, weight, positions, **OPTIONS), embed(tokens, weight, positions, **OPTIONS))
        assert embed(tokens, weight, positions).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(5, dtype=torch.int64)}, r"must be \(B, L\) and \(V, N\)"),
        ({"tokens": torch.zeros(3, 5)}, "tokens are torch.float32: they must be int64"),
        ({"tokens": torch.tensor([[0, 30]])}, r"tokens reach from 0 to 30: weight \(30, 12\) has rows 0 to 29"),
        ({"tokens": torch.tensor([[-1, 3]]), "pad_id": None}, "tokens reach from -1 to 3"),
        ({"first_position": 5}, r"at least 10, 12"),
        ({"first_position": -1}, "begin at position -1"),
        ({"positions": torch.zeros(9, 11)}, "12"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(change, message):
    tokens, weight, positions = draw()
    with pytest.raises(ValueError, match=message):
        embed(**({"tokens": tokens, "weight": weight, "positions": positions} | change))
