"""Checks of the values in cu_seqlens and positions: on a CPU, and on a GPU with FASTTFM_CHECK=1."""

import pytest
import torch

from fasttfm import functional as F
from fasttfm.functional import backends


def packed(starts, most=3, cu_seqlens_k=None, joint=False):
    x, starts = torch.randn(6, 2, 8), torch.tensor(starts)
    keys = starts if cu_seqlens_k is None else torch.tensor(cu_seqlens_k)
    if joint:
        return F.varlen_packed_qkv_attention(torch.stack((x, x, x), 1), None, starts, keys, most, most)
    return F.varlen_attention(x, x, x, starts, keys, most, most)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("starts", "options", "message"),
    [
        ([0, 3, 6], {"most": 2}, "max_seqlen_q is 2 but a sequence of cu_seqlens_q has 3"),
        ([0, 3, 6], {"cu_seqlens_k": [0, 2, 6]}, "max_seqlen_k is 3 but a sequence of cu_seqlens_k has 4"),
        ([0, 3, 6], {"most": 1 << 31}, r"max_seqlen_q is 2147483648: it must be below 2\^31"),
        ([0, 3, 6], {"most": 1 << 70}, r"max_seqlen_q is 1180591620717411303424: it must be"),
        ([0, 0, 0], {"most": -1}, "max_seqlen_q is -1: it must be below .* not negative"),
        ([0, 4, 3], {"most": 6}, "cu_seqlens_q must rise from 0 to at most 6 rows: 0, 4, 3"),
        ([-1, 3, 6], {"most": 6}, "cu_seqlens_q must rise"),
        ([0, 3, 7], {"most": 6}, "cu_seqlens_q must rise from 0 to at most 6 rows"),
        ([0, 3, 6], {"cu_seqlens_k": [0, 3, 7], "most": 6}, "cu_seqlens_k must rise"),
    ],
)
def test_wrong_cu_seqlens_are_refused_on_a_cpu(starts, options, message, joint):
    with pytest.raises(ValueError, match=message):
        packed(starts, **options, joint=joint)


@pytest.mark.parametrize("joint", [False, True])
def test_padding_allocates_for_the_longest_sequence_not_for_max_seqlen(joint):
    """On a CPU: 2^31 - 1 would not fit."""
    torch.manual_seed(1)
    expected = packed([0, 3, 6], joint=joint)
    torch.manual_seed(1)
    assert torch.equal(packed([0, 3, 6], most=(1 << 31) - 1, joint=joint), expected)


@pytest.mark.parametrize("positions", [[-1, 0, 1], [0, 1, 4]])
def test_positions_outside_the_tables_are_refused_on_a_cpu(positions):
    x, tables = torch.randn(1, 2, 3, 8), F.rotary_tables(4, 8)
    F.rotary(x, *tables, torch.arange(3))  # of the same signature
    with pytest.raises(ValueError, match="the tables have rows 0 to 3"):
        F.rotary(x, *tables, torch.tensor(positions))


WITHOUT_GRADIENT = {
    "alibi_slopes": ((2,), lambda x: F.attention(*X[:, None], alibi_slopes=x)),
    "mask": ((5, 5), lambda x: F.packed_qkv_attention(X.permute(2, 0, 1, 3)[None], mask=x)),
    "cos": ((5, 4), lambda x: F.rotary(X[:1], x, x.detach())),
    "class_weights": ((8,), lambda x: F.cross_entropy(X[0, 0], torch.arange(5), class_weights=x)[0]),
    "row_weights": ((5,), lambda x: F.linear_cross_entropy(X[0, 0], X[1, 0], torch.arange(5), row_weights=x)[0]),
}
"""A shape of each argument that takes no gradient, and a function of it."""
X = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_parameters_that_take_no_gradient_are_refused_only_where_gradients_are_recorded(name):
    shape, function = WITHOUT_GRADIENT[name]
    x = torch.rand(shape)
    expected, parameter = function(x), torch.nn.Parameter(x)
    with pytest.raises(ValueError, match="gradient"):
        function(parameter)
    with torch.no_grad():
        assert torch.equal(function(parameter), expected)


def test_values_on_a_gpu_are_checked_only_on_request(monkeypatch):
    class OnGpu:
        is_cpu, is_cuda = False, True

    monkeypatch.setattr(torch, "Tensor", OnGpu)
    assert not backends.values_are_checked(OnGpu())
    monkeypatch.setattr(backends, "checks_on_gpu", True)
    assert backends.values_are_checked(OnGpu())
