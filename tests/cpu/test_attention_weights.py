"""Attention weights and their gradient in compiled loops on a CPU, against PyTorch's products."""

import pytest
import torch

from fasttfm.cpu import attention_pass, thread_team
from fasttfm.cpu.linear import frozen_weights
from fasttfm.functional.attention import products
from fasttfm.functional.attention.call import Options

pytest.importorskip("numba")

B, H, L, S, D = 3, 4, 160, 37, 32
SEED = torch.tensor([-(2**62) - 12345])
needs_pairs = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="needs AVX512_BF16")

dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)], ids=str
)


def options(lengths=None, causal=False, offset=0, mask=None, p=0.0):
    lengths = None if lengths is None else torch.tensor(lengths)
    return Options(lengths, mask, causal, offset, p, 0.17, SEED if p else None, 5)


CASES = {
    "all": options(),
    "lengths": options([0, 7, 37]),
    "causal": options(causal=True, offset=4),
    "causal with empty rows": options([30, 1, 37], True, -3),
    "dropout": options([20, 7, 37], True, p=0.3),
    "bool": options(mask=torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(1)) < 0.1),
    "floats": options([20, 7, 37], mask=torch.randn(H, 1, S)),
}


def heads(dtype, number, length, seed=0, layout="heads last"):
    x = (2 * torch.randn(B, length, number, D, generator=torch.Generator().manual_seed(seed))).to(dtype)
    if layout == "at an odd address":
        x = torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape)
    elif layout == "every third number":
        x = torch.stack((x, x, x), -1).flatten(-2)[..., ::3]
    return x.transpose(1, 2)


def tolerance(dtype):
    """Two roundings of dtype, and the rounding of float32 scores up to 40, summed in another order."""
    return 2 * torch.finfo(dtype).eps + 1e-5


def check(case, dtype, key_heads, layout="heads last"):
    query, grad = heads(dtype, H, L, layout=layout), heads(dtype, H, L, 1)
    key, value = heads(dtype, key_heads, S, 2, layout), heads(dtype, key_heads, S, 3)
    assert attention_pass.weighs(query, key, case)
    p = attention_pass.weights(query, key, case)
    expected = products.weights(products.scores(query, key), case.scale, case)[0].to(dtype)
    torch.testing.assert_close(p, expected, rtol=tolerance(dtype), atol=1e-6)
    kept = products.drop(expected, case)
    expected_gradient, _ = products.scores_gradient(products.scores(grad, value), expected, kept, case, False)
    gradient = attention_pass.scores_gradient(grad, value, expected, kept, case)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance(dtype), atol=2e-5)


@dtypes
@pytest.mark.parametrize("case", CASES)
def test_weights_and_their_gradient_are_those_of_pytorch(case, dtype):
    check(CASES[case], dtype, H)


@pytest.mark.parametrize("layout", ["heads last", "at an odd address", "every third number"])
@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=needs_pairs, id="pairs")])
def test_bfloat16_and_pairs_of_it_in_any_layout(pairs, layout, monkeypatch):
    monkeypatch.setattr(attention_pass, "_multiplies_pairs", lambda x: pairs)
    check(CASES["lengths"], torch.bfloat16, 2, layout)


def test_few_scores_odd_head_sizes_mixed_dtypes_and_searches_are_not_supported():
    query, key = heads(torch.bfloat16, H, L), heads(torch.bfloat16, H, S)
    assert not attention_pass.weighs(query[:, :, :9], key, options())
    assert not attention_pass.weighs(query[..., :24], key[..., :24], options())
    assert not attention_pass.weighs(query, key.half(), options())
    with torch.no_grad(), frozen_weights(torch.nn.Linear(2, 2)):
        assert not attention_pass.weighs(query, key, options())


def test_any_number_of_threads_gives_the_same_bits(threads):
    def solve(dtype):
        query, key = heads(dtype, H, L), heads(dtype, H, S)
        p = attention_pass.weights(query, key, CASES["dropout"])
        return p, attention_pass.scores_gradient(query, key, p, None, CASES["dropout"])

    for dtype in (torch.float32, torch.bfloat16):
        threads(1)
        expected = solve(dtype)
        for count in (2, 8):
            threads(count)
            assert thread_team.team()[0] == count
            assert all(map(torch.equal, solve(dtype), expected))
