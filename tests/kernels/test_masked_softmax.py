"""masked_softmax.py in the interpreter against reference.py: rows in one pass and in two."""

import pytest
import torch
from accuracy import solve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_fixtures import examples
from test_attention_kernels import compare

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels import masked_softmax
from fasttfm.kernels.tiles.attention import Tile


@pytest.fixture(params=["one pass", "two passes"])
def rows(request, monkeypatch):
    if request.param == "two passes":
        monkeypatch.setattr(masked_softmax, "ONE_PASS", 8)
        monkeypatch.setattr(masked_softmax, "MASKED_SOFTMAX", lambda chip, columns: Tile(4, 16, 4, 1))
    with F.backend("triton"):
        yield


def reference_weights(query, key, mask=None, *, dropout_p=0.0, seed=None, site=0, **hidden):
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    scores = reference.attention_mask(scores, mask=mask, **hidden)
    weights = reference.masked_softmax(scores.float() if scores.dtype != torch.float64 else scores).to(query.dtype)
    if seed is None:
        return weights
    keep = reference.keep_mask((weights.shape[0] * weights.shape[1], *weights.shape[2:]), dropout_p, seed, site)
    return weights * keep.view(weights.shape) * reference.dropout_scale(dropout_p)


@pytest.mark.sample(1)
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    L=st.sampled_from([1, 5, 9]),
    S=st.sampled_from([1, 16, 37]),
    lengths=st.sampled_from([None, (1.0, 0.0), (0.7, 0.2)]),
    causal=st.sampled_from([None, 0, -2, 8]),
    mask=st.sampled_from(["none", "bool", "add"]),
    p=st.sampled_from([0.0, 0.3]),
)
def test_weights_equal_reference(rows, dtype, L, S, lengths, causal, mask, p):
    torch.manual_seed(L * S)
    options = {} if causal is None else {"causal": True, "causal_offset": causal}
    if lengths is not None:
        options["key_lengths"] = torch.tensor([int(f * S) for f in lengths], dtype=torch.int32)
    if p:
        options |= {"dropout_p": p, "seed": torch.tensor([-5]), "site": 2}
    inputs = {"query": torch.randn(2, 2, L, 8).to(dtype), "key": torch.randn(2, 2, S, 8).to(dtype)}
    if mask == "bool":
        options["mask"] = torch.rand(2, 1, L, S) > 0.4
    elif mask == "add":
        inputs["mask"] = torch.randn(2, 1, S).to(dtype)

    def ours(**x):
        return F.attention_weights(**x, **options)

    def theirs(**x):
        return reference_weights(**x, **options)

    compare(solve(ours, inputs), solve(theirs, inputs), solve(theirs, inputs, torch.float64))


def test_weights_may_overwrite_the_scores(rows):
    scores = torch.randn(1, 2, 5, 37)
    expected = torch.softmax(scores * 0.5, -1)
    p, kept = masked_softmax.Forward(scores, in_place=True)(scores, 0.5)
    assert p is scores
    assert kept is None
    torch.testing.assert_close(p, expected)


def test_the_gradient_may_overwrite_that_of_the_weights(rows):
    p, grad = torch.softmax(torch.randn(1, 2, 5, 37), -1), torch.randn(1, 2, 5, 37)
    expected = 0.5 * p * (grad - (p * grad).sum(-1, keepdim=True))
    d_scores, kept = masked_softmax.Backward(p, in_place=True, with_kept=True)(grad, p, 0.5)
    assert d_scores is grad
    assert kept is p
    torch.testing.assert_close(d_scores, expected)


def test_backward_redraws_the_dropped_weights_of_forward(rows):
    scores, grad, seed = torch.randn(2, 2, 5, 37), torch.randn(2, 2, 5, 37), torch.tensor([7])
    p, kept = masked_softmax.Forward(scores, dropout_p=0.4)(scores, 0.5, seed=seed, site=3)
    d_scores, repeated = masked_softmax.Backward(p, 0.4, with_kept=True)(grad, p, 0.5, seed, 3)
    torch.testing.assert_close(repeated, kept)
    assert torch.equal(repeated != 0, kept != 0)
    torch.testing.assert_close(d_scores, 0.5 * (kept * grad - p * (kept * grad).sum(-1, keepdim=True)))
