"""Other packages' signatures: against the reference, wrong arguments by name, and equal to the originals."""

import inspect

import pytest
import torch

from fasttfm import reference
from fasttfm.compat import flash_attn, varlen
from fasttfm.functional import attention

B, H, D = 3, 4, 8
NAMES = [name for name in vars(flash_attn) if name.startswith("flash_attn")]


def plain(q, k, v, causal=False, scale=None, window=(-1, -1), softcap=0.0, slopes=None):
    """reference.attention() of one sequence (L, H, D), (S, Hk, D), the last query at the last key."""
    sides = tuple(None if side == -1 else side for side in window)
    options = {"causal": causal, "causal_offset": len(k) - len(q), "window": sides, "alibi_slopes": slopes}
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return reference.attention(q, k, v, scale=scale, softcap=softcap, **options)[0][0].transpose(0, 1)


OPTIONS = {
    "window": {"window": (2, 1)},
    "keys before": {"window": (1, -1)},
    "keys past": {"window": (-1, 2)},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": (2, 5)},
    "soft cap": {"softcap": 1.5},
    "slopes": {"slopes": torch.tensor([0.5, 0.25, 1.0, 0.1])},
    "causal slopes": {"slopes": torch.tensor([0.5, 0.25, 1.0, 0.1]), "causal": True},
    "all": {"window": (3, 1), "softcap": 2.0, "slopes": torch.tensor([0.5, 0.25, 1.0, 0.1])},
}
WORDS = {"window": "window_size", "slopes": "alibi_slopes"}


def tensors(*shapes, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


def assert_same(output, expected, inputs):
    torch.testing.assert_close(output, expected)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    for ours, theirs in zip(torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("queries", "keys", "key_heads"), [(5, 5, 4), (3, 7, 2), (7, 3, 1)])
def test_flash_attn_func_equals_the_reference(options, queries, keys, key_heads):
    q, k, v = tensors((B, queries, H, D), (B, keys, key_heads, D), (B, keys, key_heads, D))
    words = {WORDS.get(name, name): value for name, value in options.items()}
    output = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.3, **words)
    assert_same(output, torch.stack([plain(*each, scale=0.3, **options) for each in zip(q, k, v)]), (q, k, v))
    packed = flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.0, 0.3, **words)
    assert torch.equal(packed, output)


def test_each_batch_row_has_its_own_slopes():
    q, k, v = tensors((B, 4, H, D), (B, 6, H, D), (B, 6, H, D))
    slopes = torch.rand(B, H, generator=torch.Generator().manual_seed(3))
    expected = torch.stack([plain(*each[:3], slopes=each[3]) for each in zip(q, k, v, slopes, strict=True)])
    assert_same(flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes), expected, (q, k, v))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("surplus", [0, 2, torch.tensor([-3, 0, 4])], ids=["none", "one", "each its own"])
def test_packed_sequences_equal_the_reference(options, surplus):
    lengths = torch.tensor([4, 1, 6])
    key_lengths = lengths + surplus
    starts, cu_seqlens_k = (torch.cat((torch.zeros(1), n.cumsum(0))).int() for n in (lengths, key_lengths))
    q, k, v = tensors((11, H, D), *[(int(key_lengths.sum()), 2, D)] * 2)
    expected = torch.cat(
        [
            plain(q[a:b], k[c:d], v[c:d], **options)
            for a, b, c, d in zip(starts, starts[1:], cu_seqlens_k, cu_seqlens_k[1:])
        ]
    )
    packed = (q, k, v, starts, cu_seqlens_k, 6, int(key_lengths.max()))
    words = {WORDS.get(name, name): value for name, value in options.items()}
    output = flash_attn.flash_attn_varlen_func(*packed, **words)
    assert_same(output, expected, (q, k, v))
    if not words.keys() <= {"causal", "window_size"}:
        return
    left, right = options.get("window", (-1, -1))
    window = (left, 0) if "causal" in options else (left, right)
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
    assert torch.equal(
        flash_attn.flash_attn_varlen_kvpacked_func(q[:, 0], kv, starts, starts, 5, 5, causal=causal), packed
    )


def test_dropout_equals_attentions():
    q, k, v = tensors((B, 33, H, D), (B, 33, H, D), (B, 33, H, D), requires_grad=False)
    torch.manual_seed(5)
    dropped = flash_attn.flash_attn_func(q, k, v, dropout_p=0.4)
    torch.manual_seed(5)
    expected = attention(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.4).transpose(1, 2)
    assert torch.equal(dropped, expected)
    assert not torch.equal(dropped, flash_attn.flash_attn_func(q, k, v, dropout_p=0.4))
    starts = torch.arange(0, 33 * B + 1, 33, dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    torch.manual_seed(5)
    torch.testing.assert_close(varlen.varlen_attn(*packed, starts, None, 33, 33, dropout_p=0.4), dropped.flatten(0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, r"softcap=-1.0 must be 0 \(off\) or a number from"),
        ({"softmax_scale": float("inf")}, "softmax_scale=inf must be a number between"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes torch.float32 \(3,\) must be floats \(4,\)"),
        ({"window_size": (2, -3)}, r"window_size=\(2, -3\) has -3: each side must be 0 or more, or -1"),
        ({"window_size": (0.5, 1)}, r"window_size=\(0.5, 1\) has 0.5"),
        ({"window_size": (True, "a")}, "has True"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(options, message):
    q, k, v = tensors((B, 5, H, D), (B, 5, H, D), (B, 5, H, D))
    starts = torch.arange(0, 5 * B + 1, 5)
    packed = (*(x.flatten(0, 1) for x in (q, k, v)), starts, starts.clone(), 5, 5)
    for function, given in ((flash_attn.flash_attn_func, (q, k, v)), (flash_attn.flash_attn_varlen_func, packed)):
        with pytest.raises(ValueError, match=message) as raised:
            function(*given, **options)
        assert "\n" not in str(raised.value)


def test_heads_that_do_not_fit_are_refused():
    q, k, v = tensors((6, H, D), (8, 3, D), (8, 3, D))
    starts, cu_seqlens_k = torch.tensor([0, 3, 6]), torch.tensor([0, 3, 8])
    with pytest.raises(ValueError, match="key has 3 heads, which must divide the 4 of query"):
        varlen.varlen_attn(q, k, v, starts, cu_seqlens_k, 3, 5, enable_gqa=True)
    with pytest.raises(ValueError, match="give enable_gqa=True"):
        varlen.varlen_attn(q, k, v, starts, cu_seqlens_k, 3, 5)


@pytest.mark.parametrize(
    ("window", "causal"),
    [(None, False), ((None, None), False), ((7, 5), False), ((128, 128), False), ((7, 0), True), ((None, 0), True)],
)
def test_a_window_that_hides_nothing_is_none(window, causal):
    q, k, v = tensors((2, 6, H, D), (2, 8, H, D), (2, 8, H, D))
    expected = flash_attn.flash_attn_func(q, k, v, causal=causal)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window), expected)
    packed = flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), window_size=window)
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("window", [(6, 5), (7, 4), (6, 0)])
def test_a_window_that_hides_one_key_hides_it(window):
    q, k, v = tensors((2, 6, H, D), (2, 8, H, D), (2, 8, H, D))
    expected = torch.stack([plain(*each, window=window) for each in zip(q, k, v, strict=True)])
    assert_same(flash_attn.flash_attn_func(q, k, v, window_size=window), expected, (q, k, v))


def test_packed_tensors_of_other_shapes_are_refused_by_name():
    q, kv = tensors((2, 6, H, D), (2, 8, 3, H, D))
    with pytest.raises(ValueError, match=r"flash_attn_kvpacked_func: kv \(2, 8, 3, .* 2 in the third from the right"):
        flash_attn.flash_attn_kvpacked_func(q, kv)
    with pytest.raises(TypeError, match="flash_attn_func: k is a list: a tensor is needed"):
        flash_attn.flash_attn_func(q, [1.0], q)


def parameters(function):
    return {name: (each.kind, each.default) for name, each in inspect.signature(function).parameters.items()}


def test_varlen_attns_signature_includes_torchs():
    original = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn").varlen_attn
    ours = parameters(varlen.varlen_attn)
    assert ours.pop("dropout_p")
    assert parameters(original).items() <= ours.items()


@pytest.mark.parametrize("name", NAMES)
def test_flash_attns_signatures_equal_the_originals(name):
    original = pytest.importorskip("flash_attn", reason="needs the package flash_attn")
    assert parameters(getattr(flash_attn, name)) == parameters(getattr(original, name))
