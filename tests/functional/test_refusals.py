"""Wrong values and combinations are refused in one line that says why. Wrong types, dtypes and shapes of each argument:
test_wrong_calls.py.
"""

import pytest
import torch
from torch import tensor

from fasttfm import functional as F
from fasttfm.functional import backends

X = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
Q = X[:1]
COS, LOGITS, TARGET, SQUARE = torch.zeros(9, 4), torch.zeros(3, 4), tensor([0, 3, 1]), torch.ones(8, 8)


def attend(**options):
    return F.attention(Q, Q, Q, **options)


def rotate(x, length, positions=None, size=4):
    return F.rotary(x, *torch.zeros(2, length, size), positions)


def embed(tokens, **options):
    return F.embed(tensor([tokens]), SQUARE, torch.ones(4, 8), **options)


def loss(target=TARGET, logits=LOGITS, **options):
    return F.cross_entropy(logits, target, **options)


def sdpa(query, mask=None, key=None, **options):
    x, key = torch.ones(query), torch.ones(query if key is None else key)
    return F.scaled_dot_product_attention(x, key, key, None if mask is None else torch.ones(mask).bool(), **options)


def constant(values):
    """A parameter without a gradient."""
    return torch.nn.Parameter(tensor(values), requires_grad=False)


def packed(starts, most=3, keys=None, joint=False, make=tensor):
    x, starts = torch.randn(6, 2, 8), make(starts)
    keys = starts if keys is None else tensor(keys)
    if joint:
        return F.varlen_packed_qkv_attention(torch.stack((x, x, x), 1), None, starts, keys, most, most)
    return F.varlen_attention(x, x, x, starts, keys, most, most)


REFUSED = {
    # attention
    "window=(2, -3) has -3: each side must be an int from 0 up": lambda: attend(window=(2, -3)),
    "window is 3: a tuple or None is needed": lambda: attend(window=3),
    "softcap=-1.0 must be 0 (off) or a number from 1e-30": lambda: attend(softcap=-1.0),
    "scale=-1e+31 must be": lambda: attend(scale=-1e31),
    "alibi_slopes must hold numbers between": lambda: attend(alibi_slopes=tensor([-torch.inf, 1.0])),
    "alibi_slopes torch.float32 (3,) must be floats (2,)": lambda: attend(alibi_slopes=torch.ones(3)),
    "sinks torch.float32 (2, 4) must be floats (2,)": lambda: attend(sinks=torch.ones(2, 4)),
    "causal='middle' must be False, True": lambda: attend(causal="middle"),
    "causal_offset=2305843009213693952 must be below": lambda: attend(causal_offset=1 << 61, window=(1, 0)),
    "causal_offset torch.int64 (2,) must be an int": lambda: attend(causal_offset=tensor([1, 1])),
    "causal_offset torch.float32": lambda: attend(causal_offset=tensor([1.0])),
    "attn_mask has dtype torch.int64": lambda: F.scaled_dot_product_attention(Q, Q, Q, torch.ones(5, 5).long()),
    "both given": lambda: sdpa((5, 8), (5, 5), is_causal=True),
    "attn_mask (1, 5, 5) does not broadcast to (": lambda: sdpa((5, 8), (1, 5, 5)),
    "attn_mask (5, 4) does not broadcast to (": lambda: sdpa((4, 5, 8), (5, 4)),
    "multiple of the heads": lambda: sdpa((2, 6, 5, 8), key=(2, 4, 7, 8), enable_gqa=True),
    "which need equally many": lambda: F.scaled_dot_product_attention(Q, Q, Q[:, :1], enable_gqa=True),
    # packed sequences
    "max_seqlen_q is 2 but a sequence of cu_seqlens_q has 3": lambda **o: packed([0, 3, 6], 2, **o),
    "max_seqlen_q is 2147483648: it must be below 2^31": lambda **o: packed([0, 3, 6], 1 << 31, **o),
    "max_seqlen_q is -1: it must be below": lambda **o: packed([0, 0, 0], -1, **o),
    "cu_seqlens_q must rise from 0 to at most 6 rows: 0, 4, 3": lambda **o: packed([0, 4, 3], 6, **o),
    "cu_seqlens_k must rise": lambda **o: packed([0, 3, 6], 6, [0, 3, 7], **o),
    "cu_seqlens_q must rise from 0 to at most 6 rows: 0, 3, 8": lambda **o: packed([0, 3, 8], 6, make=constant, **o),
    # rotary positions
    "R from 2 to the head size 4": lambda: rotate(X[None, 0, :, :, :4], 9),
    "needs positions": lambda: rotate(X[0], 9),
    "5 positions and the tables 3": lambda: rotate(X, 3),
    "int32 or int64 (5,) or (1, 5) or (3, 5)": lambda: rotate(X, 9, torch.arange(4)),
    "of one dtype": lambda: F.rotary(X, COS, COS.half()),
    "the tables have rows 0 to 8": lambda: rotate(X, 9, tensor([0, 1, 2, 3, 9])),
    "the tables have rows 0 to 8: ": lambda: rotate(X, 9, tensor([-1, 1, 2, 3, 8])),
    "even": lambda: F.rotary_tables(4, 7),
    "base=0.0": lambda: F.rotary_tables(4, 8, base=0.0),
    "bands=(0, 1.0, 4.0)": lambda: F.rotary_tables(4, 8, bands=(0, 1.0, 4.0)),
    "bands=(3, 1.0, inf)": lambda: F.rotary_tables(4, 8, bands=(3, 1.0, torch.inf)),
    # embeddings and losses
    "tokens reach from 0 to 8: weight (8, 8) has rows 0 to 7": lambda: embed([0, 8]),
    "tokens reach from -1 to 3": lambda: embed([-1, 3]),
    "at least 5, 8": lambda: embed([1, 2], first_position=3),
    "begin at position -1": lambda: embed([1, 2], first_position=-1),
    "target holds 4: classes are numbered from 0 to 3": lambda: loss(tensor([0, 4, 1])),
    "target holds -7": lambda: loss(tensor([0, -7, 1])),
    "label_smoothing 1.5": lambda: loss(label_smoothing=1.5),
    "class_weights is (5,) of torch.float32: it must be (4,) floats": lambda: loss(class_weights=torch.ones(5)),
    "row_weights is (4,) of torch.float32: it must be (3,) floats": lambda: loss(row_weights=torch.ones(4)),
}
"""Words of the error -> the call."""


@pytest.mark.parametrize("words", REFUSED)
def test_a_call_is_refused_in_one_line_that_says_why(words):
    for options in ({}, {"joint": True}) if "seqlen" in words else ({},):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            REFUSED[words](**options)
        assert words.removesuffix(": ") in str(raised.value)
        assert "\n" not in str(raised.value)


WITHOUT_GRADIENT = {
    "alibi_slopes": ((2,), lambda x: F.attention(*X[:, None], alibi_slopes=x)),
    "mask": ((5, 5), lambda x: F.packed_qkv_attention(X.permute(2, 0, 1, 3)[None], mask=x)),
    "cos": ((5, 4), lambda x: F.rotary(X[:1], x, x.detach())),
    "class_weights": ((8,), lambda x: F.cross_entropy(X[0, 0], torch.arange(5), class_weights=x)[0]),
    "row_weights": ((5,), lambda x: F.linear_cross_entropy(X[0, 0], X[1, 0], torch.arange(5), row_weights=x)[0]),
}
"""A shape of each argument that takes no gradient, and a function of it."""


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_parameters_that_take_no_gradient_are_refused_only_where_gradients_are_recorded(name):
    """Also by a plan that was made without gradients."""
    shape, function = WITHOUT_GRADIENT[name]
    x = torch.rand(shape)
    expected, parameter = function(x), torch.nn.Parameter(x)
    with torch.no_grad():
        assert torch.equal(function(parameter), expected)
    with pytest.raises(ValueError, match="gradient"):
        function(parameter)


def test_values_on_a_gpu_are_checked_only_on_request(monkeypatch):
    class OnGpu:
        is_cpu, is_cuda = False, True

    monkeypatch.setattr(torch, "Tensor", OnGpu)
    assert not backends.values_are_checked(OnGpu())
    monkeypatch.setattr(backends, "checks_on_gpu", True)
    assert backends.values_are_checked(OnGpu())
