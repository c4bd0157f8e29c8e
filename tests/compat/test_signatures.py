"""Other packages' signatures: against the reference, wrong arguments by name, and equal to the originals."""

import inspect

import pytest
import torch

from fasttfm import reference
from fasttfm.compat import flash_attn, varlen
from fasttfm.functional import attention

B, H, D = 3, 4, 8
SLOPES = torch.tensor([0.5, 0.25, 1.0, 0.1])
OPTIONS = {
    "none": {},
    "keys before": {"window_size": (1, -1)},
    "keys past": {"window_size": (-1, 2)},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (2, 5)},
    "soft cap": {"softcap": 1.5},
    "causal slopes": {"alibi_slopes": SLOPES, "causal": True},
    "all": {"window_size": (3, 1), "softcap": 2.0, "alibi_slopes": SLOPES},
}
WINDOWS = {
    **{f"hides nothing: {window}": {"window_size": window} for window in (None, (None, None), (7, 5), (128, 128))},
    **{f"hides nothing: {window}": {"window_size": window, "causal": True} for window in ((7, 0), (None, 0))},
    **{f"hides a key: {window}": {"window_size": window} for window in ((6, 5), (7, 4), (6, 0))},
}
"""Of 6 queries and 8 keys."""


def plain(q, k, v, causal=False, softmax_scale=None, window_size=None, softcap=0.0, alibi_slopes=None):
    """reference.attention() of one sequence (L, H, D), (S, Hk, D), the last query at the last key."""
    window = tuple(None if side == -1 else side for side in window_size or (None, None))
    options = {"causal": causal, "causal_offset": len(k) - len(q), "window": window, "alibi_slopes": alibi_slopes}
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return reference.attention(q, k, v, scale=softmax_scale, softcap=softcap, **options)[0][0].transpose(0, 1)


def tensors(*shapes, requires_grad=True):
    return [torch.randn(shape).requires_grad_(requires_grad) for shape in shapes]


def assert_same(output, expected, inputs):
    torch.testing.assert_close(output, expected)
    grad = torch.randn(output.shape)
    for ours, theirs in zip(torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [*OPTIONS.values(), *WINDOWS.values()], ids=[*OPTIONS, *WINDOWS])
@pytest.mark.parametrize(("queries", "keys", "key_heads"), [(6, 8, 2), (7, 3, 1)])
def test_flash_attn_func_equals_the_reference(options, queries, keys, key_heads):
    q, k, v = tensors((B, queries, H, D), (B, keys, key_heads, D), (B, keys, key_heads, D))
    output = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.3, **options)
    assert_same(output, torch.stack([plain(*each, softmax_scale=0.3, **options) for each in zip(q, k, v)]), (q, k, v))
    packed = flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.0, 0.3, **options)
    assert torch.equal(packed, output)


def test_each_batch_row_has_its_own_slopes():
    q, k, v = tensors((B, 4, H, D), (B, 6, H, D), (B, 6, H, D))
    slopes = torch.rand(B, H)
    expected = torch.stack([plain(*each[:3], alibi_slopes=each[3]) for each in zip(q, k, v, slopes, strict=True)])
    assert_same(flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes), expected, (q, k, v))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("surplus", [0, 2, torch.tensor([-3, 0, 4])], ids=["none", "one", "each its own"])
def test_packed_sequences_equal_the_reference(options, surplus):
    lengths = torch.tensor([4, 1, 6])
    key_lengths = lengths + surplus
    starts, cu_seqlens_k = (torch.cat((torch.zeros(1), n.cumsum(0))).int() for n in (lengths, key_lengths))
    q, k, v = tensors((11, H, D), *[(int(key_lengths.sum()), 2, D)] * 2)
    places = zip(starts, starts[1:], cu_seqlens_k, cu_seqlens_k[1:])
    expected = torch.cat([plain(q[a:b], k[c:d], v[c:d], **options) for a, b, c, d in places])
    packed = (q, k, v, starts, cu_seqlens_k, 6, int(key_lengths.max()))
    output = flash_attn.flash_attn_varlen_func(*packed, **options)
    assert_same(output, expected, (q, k, v))
    if options.keys() <= {"causal", "window_size"}:
        left, right = options.get("window_size", (-1, -1))
        window = (left, 0 if "causal" in options else right)
        assert torch.equal(varlen.varlen_attn(*packed, window_size=window, enable_gqa=True), output)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}])
def test_max_seqlen_may_be_a_tensor(options):
    """As transformers passes it. On meta, as on a GPU, it is not read from cu_seqlens."""
    (x,), starts, longest = tensors((7, H, D), requires_grad=False), torch.tensor([0, 3, 7]), torch.tensor(4)
    function = flash_attn.flash_attn_varlen_func
    expected = function(x, x, x, starts, starts, 4, 4, **options)
    assert torch.equal(function(x, x, x, starts, starts, longest, longest, **options), expected)
    x, starts = x.to("meta"), starts.to("meta")
    assert function(x, x, x, starts, starts, longest, longest, **options).shape == x.shape
    with pytest.raises(TypeError, match=r"max_seqlen_q is a tensor torch.float32 \(\): an int is needed"):
        function(x, x, x, starts, starts, longest.float(), longest, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors(causal):
    (qkv,) = tensors((B, 5, 3, H, D))
    output = flash_attn.flash_attn_qkvpacked_func(qkv, causal=causal)
    assert torch.equal(output, flash_attn.flash_attn_func(*qkv.unbind(2), causal=causal))
    starts = torch.arange(0, 5 * B + 1, 5, dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 5, causal=causal)
    torch.testing.assert_close(packed, output.flatten(0, 1))
    q, kv = qkv.flatten(0, 1).split([1, 2], dim=1)
    also = flash_attn.flash_attn_varlen_kvpacked_func(q[:, 0], kv, starts, starts, 5, 5, causal=causal)
    assert torch.equal(also, packed)


def test_dropout_equals_attentions():
    q, k, v = tensors((B, 33, H, D), (B, 33, H, D), (B, 33, H, D), requires_grad=False)
    starts = torch.arange(0, 33 * B + 1, 33, dtype=torch.int32)
    outputs = []
    for call in (
        lambda: attention(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.4).transpose(1, 2),
        lambda: flash_attn.flash_attn_func(q, k, v, dropout_p=0.4),
        lambda: varlen.varlen_attn(*(x.flatten(0, 1) for x in (q, k, v)), starts, None, 33, 33, dropout_p=0.4),
    ):
        torch.manual_seed(5)
        outputs.append(call())
    assert torch.equal(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0].flatten(0, 1))
    assert not torch.equal(outputs[0], flash_attn.flash_attn_func(q, k, v, dropout_p=0.4))


def parameters(function):
    return {name: (each.kind, each.default) for name, each in inspect.signature(function).parameters.items()}


def test_varlen_attns_signature_includes_torchs():
    original = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn").varlen_attn
    ours = parameters(varlen.varlen_attn)
    assert ours.pop("dropout_p")
    assert parameters(original).items() <= ours.items()
