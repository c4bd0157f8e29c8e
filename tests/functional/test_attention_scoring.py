"""attention()'s windows, soft caps, ALiBi, sinks and alignment: both backends against reference.py."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional.attention import backend as attention_backend
from fasttfm.functional.attention import products
from fasttfm.functional.operator import forget_plans
from fasttfm.kernels import masked_softmax
from fasttfm.kernels.attention import backward as attention_backward
from fasttfm.kernels.attention import forward as attention_long
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.attention import mask_gradient
from fasttfm.kernels.attention import short as attention_short
from fasttfm.kernels.tiles.attention import Tile

B, H, L, S = 2, 2, 21, 40

SCORING = {
    "nothing": dict,
    "lengths": lambda: {"key_lengths": torch.tensor([20, 0])},
    "causal": lambda: {"causal": True},
    "causal, no key at first": lambda: {"causal": True, "causal_offset": -3},
    "causal over everything": lambda: {"causal": True, "causal_offset": 60},
    "bool mask": lambda: {"mask": torch.rand(B, 1, L, S) > 0.4},
    "all masks": lambda: {
        "key_lengths": torch.tensor([7, S]), "causal": True, "causal_offset": 2, "mask": torch.rand(L, S) > 0.2,
    },
    "one number": lambda: {"mask": torch.tensor(0.5)},
    "negative scale": lambda: {"scale": -0.3, "causal": True, "causal_offset": -2},  # its product with -inf is inf
    "scale of zero": lambda: {"scale": 0.0, "key_lengths": torch.tensor([S, 3])},
    "window": lambda: {"window": (3, 2)},
    "keys before alone": lambda: {"window": (3, None)},
    "keys past alone": lambda: {"window": (None, 2)},
    "causal window": lambda: {"window": (17, 9), "causal": True},
    "window of itself": lambda: {"window": (0, 0)},
    "window that no query reaches": lambda: {"window": (2, 0), "causal_offset": -50},
    "bottom right": lambda: {"causal": "bottom_right"},
    "bottom right of lengths": lambda: {"causal": "bottom_right", "key_lengths": torch.tensor([S, 7])},
    "bottom right window": lambda: {"causal": "bottom_right", "window": (20, None)},
    "offsets of rows": lambda: {"causal": True, "causal_offset": torch.tensor([2, -3])},
    "offsets of a window": lambda: {"window": (1, 1000), "causal_offset": torch.tensor([-30, 2])},
    "far offsets of a right side": lambda: {"window": (None, 1000), "causal_offset": torch.tensor([-1000, -990])},
    "far offsets of a left side": lambda: {"window": (1000, None), "causal_offset": torch.tensor([1003, 990])},
    "soft cap": lambda: {"softcap": 1.5},
    "slopes": lambda: {"alibi_slopes": torch.rand(H)},
    "slopes of rows": lambda: {"alibi_slopes": torch.rand(B, H), "window": (19, 3), "causal_offset": 2},
    "slopes far off": lambda: {"alibi_slopes": torch.rand(H) / 99, "causal": True, "causal_offset": 99},
    "sinks": lambda: {"sinks": torch.randn(H)},
    "large sink": lambda: {"sinks": torch.tensor([150.0, 0.0])},
    "sinks of nothing": lambda: {"sinks": torch.randn(H), "key_lengths": torch.tensor([0, 9])},
    "sinks of all weight and of none": lambda: {
        "sinks": torch.tensor([torch.inf, -torch.inf]),
        "key_lengths": torch.tensor([0, 9]),
    },
    "largest sinks": lambda: {"sinks": torch.tensor([3.4e38, -3.4e38]), "key_lengths": torch.tensor([0, 9])},
}  # fmt: skip
EVERYTHING = {
    "sinks": torch.randn(H), "alibi_slopes": torch.rand(H), "softcap": 2.0, "window": (18, 1), "causal": "bottom_right",
    "key_lengths": torch.tensor([S, 0]),
}  # fmt: skip
SCORING["all, bool mask"] = lambda: {**EVERYTHING, "mask": torch.rand(B, 1, L, S) > 0.3}
SCORING["all, added mask"] = lambda: {**EVERYTHING, "mask": torch.randn(B, 1, L, S)}


CLOSE = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-10},
    torch.float32: {"atol": 3e-5, "rtol": 3e-5},
    torch.bfloat16: {"atol": 0.06, "rtol": 0.05},
    torch.float16: {"atol": 0.01, "rtol": 0.01},
}


def operands(dtype, key_heads=1, batch=B, width=8):
    """width: of value."""
    return [
        torch.randn(batch, h, n, d, dtype=dtype, requires_grad=True)
        for h, n, d in ((H, L, 16), (key_heads, S, 16), (key_heads, S, width))
    ]


def results(function, tensors, options):
    """The output, and the gradients of the tensors, sinks and mask."""
    options = dict(options)
    leaves = list(tensors)
    for name in ("sinks", "mask"):
        if name in options and options[name].is_floating_point():
            options[name] = options[name].to(tensors[0].dtype).detach().requires_grad_()
            leaves.append(options[name])
    output = function(*tensors, **options)
    grad = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)
    return output, *torch.autograd.grad(output, leaves, grad)


def expected(*tensors, **options):
    return reference.attention(*tensors, **options)[0]


def by_weights(query, key, value, **options):
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return F.attention_weights(query, key, **options) @ value


def small_tiles(monkeypatch, route):
    """Force this route, in tiles small enough that there are several."""
    small = Tile(16, 16, 4, 1)
    for module, name in (
        (attention_long, "FORWARD"),
        (attention_backward, "BACKWARD_QUERIES"),
        (attention_backward, "BACKWARD_KEYS"),
        (mask_gradient, "MASK_GRADIENT"),
    ):
        monkeypatch.setattr(module, name, lambda *a: small)
    for name in ("SHORT_FORWARD", "SHORT_BACKWARD"):
        monkeypatch.setattr(attention_short, name, lambda *size: Tile(16, size[-1], 4, 1))
    if route == "softmax, walked":
        monkeypatch.setattr(masked_softmax, "ONE_PASS", 8)
        monkeypatch.setattr(masked_softmax, "MASKED_SOFTMAX", lambda *a: Tile(4, 16, 4, 1))
    monkeypatch.setattr(attention_launch, "route", lambda *a: route.split(",")[0])
    monkeypatch.setattr(attention_backend, "_is_narrow", lambda *a: False)
    forget_plans()


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("key_heads", [1, H])
@pytest.mark.parametrize("name", SCORING)
def test_the_torch_backend_equals_the_reference(name, key_heads, dtype, p, monkeypatch):
    """Through torch's fused kernel where it supports the call."""
    calls, fused = [], products.fused_forward
    monkeypatch.setattr(products, "fused_forward", lambda *a: calls.append(1) or fused(*a))
    tensors, options = operands(dtype, key_heads, width=16), SCORING[name]()
    supported = dtype == torch.float32 and not p and "softcap" not in options and options.get("scale", 1.0) > 0.0
    supported &= name != "one number"  # whose gradient it does not compute
    options |= {"dropout_p": p, "seed": torch.tensor([6]), "site": 2} if p else {}
    theirs = results(expected, tensors, options)
    for function in (F.attention, by_weights):
        torch.testing.assert_close(results(function, tensors, options), theirs, **CLOSE[dtype])
    assert bool(calls) == supported


@pytest.mark.sample(12)
@pytest.mark.parametrize("route", ["flash", "short", "softmax", "softmax, walked"])
@pytest.mark.parametrize("name", SCORING)
def test_the_kernels_equal_the_reference(name, route, monkeypatch):
    """Half of the cases with dropout."""
    small_tiles(monkeypatch, route)
    tensors, options = operands(torch.float32), SCORING[name]()
    if list(SCORING).index(name) % 2:
        options |= {"dropout_p": 0.3, "seed": torch.tensor([6]), "site": 2}
    theirs = results(expected, tensors, options)
    with F.backend("triton"):
        ours = results(F.attention, tensors, options)
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("route", ["torch", "flash", "softmax"])
@pytest.mark.parametrize(
    "name", ["window", "bottom right", "offsets of rows", "slopes of rows", "large sink", "everything"]
)
def test_packed_sequences_use_their_own_lengths(name, route, monkeypatch):
    """Padding rows past the last sequence, which have no log-sum-exp, add nothing to the gradient of a large sink."""
    small_tiles(monkeypatch, route)
    options = SCORING.get(name, lambda: {k: v for k, v in EVERYTHING.items() if k != "key_lengths"})()
    options |= {"dropout_p": 0.3, "seed": torch.tensor([6]), "site": 2}
    starts = {"cu_seqlens_q": torch.tensor([0, 12, 20]), "cu_seqlens_k": torch.tensor([0, 33, 38])}
    tensors = [x[0].transpose(0, 1).detach().requires_grad_() for x in operands(torch.float32, batch=1)]
    theirs = results(lambda *t, **o: reference.varlen_attention(*t, **starts, **o), tensors, options)
    with F.backend("torch" if route == "torch" else "triton"):
        ours = results(
            lambda *t, **o: F.varlen_attention(*t, **starts, max_seqlen_q=12, max_seqlen_k=33, **o), tensors, options
        )
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=3e-5)


def test_work_grows_with_the_window_and_not_with_the_rows(monkeypatch):
    """Counts the interpreter's products of tiles of keys."""
    small_tiles(monkeypatch, "flash")
    products = []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *a: products.append(1) or dot(*a))

    def products_per_tile(length):
        products.clear()
        tensors = [torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3)]
        with F.backend("triton"):
            results(F.attention, tensors, {"window": (15, 0)})
        return len(products) / (length / 16)

    # Two tiles of keys per tile of queries, in forward (2 products) and both launches of backward (3 and 4).
    assert products_per_tile(128) <= products_per_tile(256) <= 2 * (2 + 3 + 4)


BANDS = {
    "causal": lambda: {"causal": True, "window": (40, 0)},
    "bottom right": lambda: {"causal": "bottom_right", "window": (9, 0)},
    "both sides": lambda: {"window": (30, 11), "causal_offset": -7},
    "one query": lambda: {"window": (30, 0), "causal_offset": 250},
    "lengths": lambda: {"causal": "bottom_right", "window": (20, 0), "key_lengths": torch.tensor([260, 90])},
    "all": lambda: {**EVERYTHING, "key_lengths": torch.tensor([260, 0]), "mask": torch.randn(B, 1, 200, 260)},
    "no row sees a key": lambda: {"window": (1, 0), "causal_offset": 999},
}


@pytest.mark.parametrize("name", BANDS)
def test_a_window_on_a_cpu_skips_keys_outside_it(name, monkeypatch):
    multiplied = []
    forward = products.forward

    def counted(backend, q, k, *others, **output):
        multiplied.append(q.shape[2] * k.shape[2])
        return forward(backend, q, k, *others, **output)

    monkeypatch.setattr(products, "forward", counted)
    options, queries = BANDS[name](), 1 if name == "one query" else 200
    tensors = [torch.randn(B, H, n, 8, dtype=torch.float64, requires_grad=True) for n in (queries, 260, 260)]
    ours, theirs = (results(f, tensors, options) for f in (F.attention, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    assert sum(multiplied) <= queries * 260 * {"lengths": 1, "all": 0.75}.get(name, 0.55)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": (2, -3)}, ValueError, r"window=\(2, -3\) has -3: each side must be an int from 0 up, or None"),
        ({"window": (None, 1 << 62)}, ValueError, r"has 4611686018427387904: it must be below 2\^62; None is no"),
        ({"window": (2.5, 1)}, ValueError, r"window=\(2.5, 1\) has 2.5"),
        ({"window": 3}, TypeError, "window is 3: a tuple or None is needed"),
        ({"softcap": -1.0}, ValueError, r"softcap=-1.0 must be 0 \(off\) or a number from 1e-30 to 1e.30"),
        ({"softcap": float("nan")}, ValueError, "softcap=nan must be"),
        ({"softcap": float("inf")}, ValueError, "softcap=inf must be"),
        ({"softcap": 1e-40}, ValueError, "softcap=1e-40 must be"),
        ({"scale": float("nan")}, ValueError, "scale=nan must be a number between -1e.30 and 1e.30"),
        ({"scale": -1e31}, ValueError, "scale=-1e.31 must be"),
        ({"alibi_slopes": torch.tensor([1.0, torch.nan])}, ValueError, "alibi_slopes must hold numbers between"),
        ({"alibi_slopes": torch.tensor([-torch.inf, 1.0])}, ValueError, "alibi_slopes must hold numbers"),
        ({"causal": "middle"}, ValueError, "causal='middle' must be False, True"),
        ({"causal_offset": 1 << 61, "window": (1, 0)}, ValueError, "causal_offset=2305843009213693952 must be below"),
        ({"key_lengths": torch.tensor([1, 2]).byte()}, ValueError, "key_lengths has dtype torch.uint8: int32 or"),
        ({"causal_offset": torch.tensor([1])}, ValueError, r"causal_offset torch.int64 \(1,\) must be an int"),
        ({"causal_offset": torch.tensor([1.0, 2.0])}, ValueError, "causal_offset torch.float32"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes torch.float32 \(3,\) must be floats \(2,\)"),
        ({"alibi_slopes": torch.ones(2, dtype=torch.int32)}, ValueError, "alibi_slopes torch.int32"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, ValueError, "alibi_slopes requires a gradient"),
        ({"sinks": torch.ones(2, 4)}, ValueError, r"sinks torch.float32 \(2, 4\) must be floats \(2,\)"),
        ({"sinks": torch.ones(2, device="meta")}, ValueError, "sinks is on meta"),
        ({"alibi_slopes": torch.ones(2, device="meta")}, ValueError, "alibi_slopes is on meta"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_in_one_line(options, error, message):
    with pytest.raises(error, match=message) as raised:
        F.attention(*operands(torch.float32), **options)
    assert "\n" not in str(raised.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("route", ["torch", "flash", "short", "softmax", "softmax, walked"])
def test_a_sink_of_inf_takes_all_weight_and_nan_propagates(route, monkeypatch):
    """Where no weight is left the gradients are 0, also that of the sink, whose weight is constant."""
    small_tiles(monkeypatch, route)
    for dtype in (torch.float32, torch.float16):
        tensors = operands(dtype, key_heads=2)
        sinks = torch.tensor([torch.inf, 0.5], dtype=dtype)
        with F.backend("torch" if route == "torch" else "triton"):
            output, *gradients = results(F.attention, tensors, {"sinks": sinks})
            assert F.attention(*tensors, sinks=torch.tensor([torch.nan, 0.5]))[:, 0].isnan().all()
        assert not output[:, 0].any()
        assert output[:, 1].all()
        assert not any(each[:, 0].any() for each in gradients[:3])
        assert gradients[3][0] == 0
        assert gradients[3][1] != 0
        assert all(each.isfinite().all() for each in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_cap_under_autocast_does_not_overflow(dtype):
    tensors, options = operands(torch.float32), {"softcap": 1e-6, "causal": True}
    with torch.autocast("cpu", dtype=dtype):
        ours = F.attention(*tensors, **options)
    torch.testing.assert_close(ours.float(), expected(*tensors, **options), atol=0.05, rtol=0.05)


def test_empty_packed_sequences_have_zero_gradients():
    starts = torch.tensor([0, 0, 0])
    for queries, keys in ((0, 3), (4, 0), (0, 0)):
        tensors = [torch.randn(n, H, 8, requires_grad=True) for n in (queries, keys, keys)]
        sunk = torch.randn(H, requires_grad=True)
        output = F.varlen_attention(*tensors, starts, starts, 0, 0, sinks=sunk, window=(2, 0))
        gradients = torch.autograd.grad(output.sum(), [*tensors, sunk])
        assert not any(each.any() for each in (output, *gradients))


def test_slopes_have_the_precision_of_the_queries():
    tensors = [torch.randn(B, H, n, 8, dtype=torch.float64) for n in (5, 70, 70)]
    slopes = torch.tensor([0.1, 0.7], dtype=torch.float64)  # not representable in float32
    for options in ({"alibi_slopes": slopes}, {"alibi_slopes": slopes.expand(B, H), "causal": "bottom_right"}):
        ours, theirs = (f(*tensors, **options) for f in (F.attention, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-12)


class Passes(TorchDispatchMode):
    """Records the operators with outputs of this many elements or more."""

    sees_through_operators = True

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.names = numbers, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tensors = [x for x in (output if isinstance(output, tuple | list) else [output]) if torch.is_tensor(x)]
        if not function.is_view and any(x.numel() >= self.numbers for x in tensors):
            self.names.append(function.overloadpacket.__name__)
        return output


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        # backward: bmm, softmax, the recomputed tanh and its gradient, the scale
        ({"softcap": 50.0}, ["bmm", "tanh_", "add", "_softmax"], 4),
        ({"sinks": torch.randn(H)}, [], 0),
    ],
)
def test_the_number_of_passes_over_the_scores(options, forward, backward):
    """Product, mask and softmax are three; plain PyTorch takes seven with a cap, and eight in backward."""
    tensors = [torch.randn(B, H, 128, 8, requires_grad=True) for _ in range(3)]
    with Passes(B * H * 128 * 128) as passes:
        output = F.attention(*tensors, causal=True, **options)
        assert passes.names == forward
        passes.names.clear()
        output.sum().backward()
        assert len(passes.names) == backward, passes.names


@pytest.mark.parametrize(
    "options", [{"alibi_slopes": torch.ones(2) / 4}, {"key_lengths": torch.tensor([300])}], ids=str
)
def test_the_addend_of_the_scores_is_computed_once_for_both_passes(options, monkeypatch):
    made, bias = [], products.bias
    monkeypatch.setattr(products, "bias", lambda *given: made.append(1) or bias(*given))
    x = torch.randn(1, 2, 512, 16, requires_grad=True)
    output = F.attention(x, x, x, **options)
    torch.autograd.grad(output.sum(), x)
    assert len(made) == 1
