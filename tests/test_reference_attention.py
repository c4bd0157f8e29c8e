"""reference.attention against torch's attention in float64, and a worked example."""

import math

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from fasttfm import reference


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same(actual, expected, leaf_tensors):
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaf_tensors, grad), torch.autograd.grad(expected, leaf_tensors, grad)
    )


@pytest.mark.parametrize("kind", ["none", "bool", "added", "causal", "lengths", "all"])
def test_equals_torch(kind):
    q, k, v = random(3, 2, 6, 8), random(3, 2, 9, 8), random(3, 2, 9, 5)
    allowed = torch.ones(3, 1, 6, 9, dtype=torch.bool)
    options, added, leaf_tensors = {}, torch.zeros(1, dtype=torch.float64), [q, k, v]
    if kind == "bool":
        allowed = allowed & (torch.rand(3, 2, 6, 9) > 0.4)
        allowed[..., 4] = True
        options["mask"] = allowed
    if kind in ("added", "all"):
        added = options["mask"] = random(2, 1, 9)
        leaf_tensors.append(added)
    if kind in ("causal", "all"):
        allowed = allowed & torch.ones(6, 9, dtype=torch.bool).tril(2)
        options |= {"causal": True, "causal_offset": 2}
    if kind in ("lengths", "all"):
        lengths = torch.tensor([9, 1, 5])
        allowed = allowed & (torch.arange(9) < lengths[:, None])[:, None, None]
        options["key_lengths"] = lengths
    expected = scaled_dot_product_attention(q, k, v, attn_mask=added.masked_fill(~allowed, -math.inf))
    assert_same(reference.attention(q, k, v, **options)[0], expected, leaf_tensors)


def test_a_row_with_no_key_to_attend_gives_zeros_and_no_gradient():
    q, k, v = random(2, 1, 3, 4), random(2, 1, 5, 4), random(2, 1, 5, 4)
    output, weights = reference.attention(q, k, v, key_lengths=torch.tensor([0, 5]))
    assert not output[0].any()
    assert not weights[0].any()
    for gradient in torch.autograd.grad(output.square().sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()
        assert not gradient[0].any()


def test_dropout_scales_kept_weights_and_returns_them_undropped():
    q, k = random(1, 2, 30, 8), random(1, 2, 40, 8)
    values = torch.eye(40, dtype=torch.float64).expand(1, 2, 40, 40)  # so that the output is the weights after dropout
    kept, weights = reference.attention(q, k, values, dropout_p=0.25, seed=torch.tensor([1]))
    torch.testing.assert_close(weights, torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(8), -1))
    torch.testing.assert_close(kept[kept != 0], weights[kept != 0] / 0.75)
    assert 0.70 < (kept != 0).double().mean() < 0.80


def test_packed_sequences_equal_the_padded_batch():
    lengths_q, lengths_k = torch.tensor([4, 0, 2]), torch.tensor([5, 3, 1])
    q, k, v = random(3, 2, 4, 8), random(3, 2, 5, 8), random(3, 2, 5, 6)
    options = {"causal": True, "dropout_p": 0.3, "seed": torch.tensor([9]), "site": 4}
    padded, _ = reference.attention(q, k, v, key_lengths=lengths_k, **options)

    def pack(x, lengths):
        return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])

    starts = [pad(n.cumsum(0), (1, 0)) for n in (lengths_q, lengths_k)]
    packed = reference.varlen_attention(pack(q, lengths_q), pack(k, lengths_k), pack(v, lengths_k), *starts, **options)
    torch.testing.assert_close(packed, pack(padded, lengths_q))


# --------------------------------------------------------------------------------- messi smile brightly: three words

X = [[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]]
W_Q = [[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]]
W_K = [[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]]
W_V = [[0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]]
SCORES = [[2, 4, 4], [4, 16, 12], [4, 12, 10]]
WEIGHTS = [[0.13613, 0.43194, 0.43194], [0.00089, 0.90884, 0.09027], [0.00744, 0.75471, 0.23785]]
Z = [[1.8639, 6.3194, 1.7042], [1.9991, 7.8141, 0.2735], [1.9926, 7.4796, 0.7359]]


def test_worked_example():
    query, key, value = ((torch.tensor(X) @ torch.tensor(w)).float()[None, None] for w in (W_Q, W_K, W_V))
    assert (query @ key.transpose(-2, -1))[0, 0].tolist() == SCORES
    output, weights = reference.attention(query, key, value)
    torch.testing.assert_close(weights[0, 0], torch.tensor(WEIGHTS), atol=5e-6, rtol=0)
    torch.testing.assert_close(output[0, 0], torch.tensor(Z), atol=5e-5, rtol=0)
