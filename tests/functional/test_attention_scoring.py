"""attention()'s masks, windows, soft caps, ALiBi, sinks and alignment against reference.py: each by name on every
route, and in random combinations, layouts and transformations.
"""

import random
from typing import NamedTuple

import pytest
import torch
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

from .agreement import attended
from .agreement import attention_of_the_reference as expected


class Sizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int


NAMED = Sizes(2, 2, 21, 40)
B, H, L, S = NAMED


def per(count, *numbers):
    """These numbers in turn, one for each of count rows or heads."""
    return torch.tensor(numbers).repeat(count)[:count]


def masked(*shape):
    return torch.randn(shape).masked_fill(torch.rand(shape) > 0.6, -torch.inf)


SCORING = {
    "nothing": lambda n: {},
    "lengths": lambda n: {"key_lengths": per(n.batch, 20, 0)},
    "causal": lambda n: {"causal": True},
    "causal, no key at first": lambda n: {"causal": True, "causal_offset": -3},
    "causal over everything": lambda n: {"causal": "top_left", "causal_offset": 60},
    "bool mask": lambda n: {"mask": torch.rand(n.batch, 1, n.queries, n.keys) > 0.4},
    "mask of keys": lambda n: {"mask": masked(n.batch, 1, 1, n.keys)},
    "all masks": lambda n: {
        "key_lengths": per(n.batch, 7, S).int(), "causal": True, "causal_offset": 2,
        "mask": torch.rand(n.queries, n.keys) > 0.2,
    },
    "one number": lambda n: {"mask": torch.tensor(0.5)},
    "negative scale": lambda n: {"scale": -0.3, "causal": True, "causal_offset": -2},  # its product with -inf is inf
    "scale of zero": lambda n: {"scale": 0.0, "key_lengths": per(n.batch, S, 3)},
    "offset beyond 32 bits": lambda n: {"causal": True, "causal_offset": 1 << 31},
    "offset below 32 bits": lambda n: {"causal": True, "causal_offset": -(1 << 31)},
    "window": lambda n: {"window": (3, 2)},
    "keys before alone": lambda n: {"window": (3, None)},
    "keys past alone": lambda n: {"window": (None, 2)},
    "causal window": lambda n: {"window": (17, 9), "causal": True},
    "window of itself": lambda n: {"window": (0, 0)},
    "window that no query reaches": lambda n: {"window": (2, 0), "causal_offset": -50},
    "bottom right": lambda n: {"causal": "bottom_right"},
    "bottom right of lengths": lambda n: {"causal": "bottom_right", "key_lengths": per(n.batch, S, 7)},
    "bottom right window": lambda n: {"causal": "bottom_right", "window": (20, None)},
    "offsets of rows": lambda n: {"causal": True, "causal_offset": per(n.batch, 2, -3)},
    "offsets of a window": lambda n: {"window": (1, 1000), "causal_offset": per(n.batch, -30, 2).int()},
    "far offsets of a right side": lambda n: {"window": (None, 1000), "causal_offset": per(n.batch, -1000, -990)},
    "far offsets of a left side": lambda n: {"window": (1000, None), "causal_offset": per(n.batch, 1003, 990)},
    "window wider than 32 bits": lambda n: {"window": (10**12, 10**12), "causal_offset": 1000},
    "soft cap": lambda n: {"softcap": 1.5},
    "lowest soft cap": lambda n: {"softcap": 1e-6},
    "highest soft cap": lambda n: {"softcap": 1e30},
    "slopes": lambda n: {"alibi_slopes": torch.rand(n.heads, dtype=torch.float64)},  # in the precision of the scores
    "slopes of rows": lambda n: {"alibi_slopes": torch.rand(n.batch, n.heads), "window": (19, 3), "causal_offset": 2},
    "slopes far off": lambda n: {"alibi_slopes": torch.rand(n.heads) / 99, "causal": True, "causal_offset": 99},
    "steep slopes up": lambda n: {"alibi_slopes": -1e3 * torch.rand(n.heads).bfloat16()},
    "sinks": lambda n: {"sinks": torch.randn(n.heads)},
    "large sink": lambda n: {"sinks": per(n.heads, 150.0, 0.0)},
    "sinks of nothing": lambda n: {"sinks": torch.randn(n.heads), "key_lengths": per(n.batch, 0, 9)},
    "sinks of all weight and of none": lambda n: {
        "sinks": per(n.heads, torch.inf, -torch.inf), "key_lengths": per(n.batch, 0, 9),
    },
    "largest sinks": lambda n: {"sinks": per(n.heads, 3.4e38, -3.4e38), "key_lengths": per(n.batch, 0, 9)},
    "all, bool mask": lambda n: {**everything(n), "mask": torch.rand(n.batch, 1, n.queries, n.keys) > 0.3},
    "all, added mask": lambda n: {**everything(n), "mask": torch.randn(n.batch, 1, n.queries, n.keys)},
}  # fmt: skip


def everything(n):
    return {
        "sinks": torch.randn(n.heads), "alibi_slopes": torch.rand(n.heads), "softcap": 2.0, "window": (18, 1),
        "causal": "bottom_right", "key_lengths": per(n.batch, S, 0),
    }  # fmt: skip


CLOSE = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-10},
    torch.float32: {"atol": 3e-5, "rtol": 3e-5},
    torch.bfloat16: {"atol": 0.06, "rtol": 0.05},
    torch.float16: {"atol": 0.01, "rtol": 0.01},
}
DROPPED = {"dropout_p": 0.3, "seed": torch.tensor([6]), "site": 2}


def operands(dtype=torch.float32, key_heads=1, batch=B, width=8):
    """width: of value."""
    return [
        torch.randn(batch, h, n, d, dtype=dtype) for h, n, d in ((H, L, 16), (key_heads, S, 16), (key_heads, S, width))
    ]


def by_weights(query, key, value, **options):
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return F.attention_weights(query, key, **options) @ value


def small_tiles(monkeypatch, route):
    """Force this route, in tiles small enough that there are several; returns its backend."""
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
    return F.backend("torch" if route == "torch" else "triton")


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("key_heads", [1, H])
@pytest.mark.parametrize("name", SCORING)
def test_the_torch_backend_equals_the_reference(name, key_heads, dtype, p, monkeypatch):
    """Through torch's fused kernel where it supports the call."""
    calls, fused = [], products.fused_forward
    monkeypatch.setattr(products, "fused_forward", lambda *a: calls.append(1) or fused(*a))
    tensors, options = operands(dtype, key_heads, width=16), SCORING[name](NAMED)
    supported = dtype == torch.float32 and not p and "softcap" not in options and options.get("scale", 1.0) > 0.0
    supported &= name not in ("one number", "mask of keys")  # whose gradient it does not compute
    options |= DROPPED if p else {}
    theirs, close = attended(expected, tensors, options, dtype), dict(CLOSE[dtype])
    if name == "steep slopes up":  # its backward pass rounds a log-sum-exp of up to 39 * 1e3 to float32
        close["rtol"] = max(close["rtol"], 2.0**-24 * 39e3)
    for function in (F.attention, by_weights):
        torch.testing.assert_close(attended(function, tensors, options, dtype), theirs, **close)
    assert bool(calls) == supported


@pytest.mark.sample(12)
@pytest.mark.parametrize("route", ["flash", "short", "softmax", "softmax, walked"])
@pytest.mark.parametrize("name", SCORING)
def test_the_kernels_equal_the_reference(name, route, monkeypatch):
    """Half of the cases with dropout."""
    tensors, options = operands(), SCORING[name](NAMED) | (DROPPED if list(SCORING).index(name) % 2 else {})
    theirs = attended(expected, tensors, options)
    with small_tiles(monkeypatch, route):
        ours = attended(F.attention, tensors, options)
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("route", ["torch", "flash", "softmax"])
@pytest.mark.parametrize("name", [
    "causal, no key at first", "offset beyond 32 bits", "offset below 32 bits", "window", "bottom right",
    "offsets of rows", "slopes of rows", "large sink", "everything",
])  # fmt: skip
def test_packed_sequences_use_their_own_lengths(name, route, monkeypatch):
    """Padding rows past the last sequence, which have no log-sum-exp, add nothing to the gradient of a large sink."""
    options = SCORING.get(name, everything)(NAMED) | DROPPED
    options.pop("key_lengths", None)
    starts = {"cu_seqlens_q": torch.tensor([0, 12, 20]), "cu_seqlens_k": torch.tensor([0, 33, 38])}
    tensors = [x[0].transpose(0, 1) for x in operands(batch=1)]
    theirs = attended(reference.varlen_attention, tensors, options | starts)
    with small_tiles(monkeypatch, route):
        ours = attended(F.varlen_attention, tensors, options | starts | {"max_seqlen_q": 12, "max_seqlen_k": 33})
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=3e-5)


# ------------------------------------------------------------------------------------------------------- random calls

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
LENGTHS = (0, 1, 2, 5, 17, 70, 130)
LAYOUTS = {
    "contiguous": lambda new, b, h, n, w: new(b, h, n, w),
    "heads last": lambda new, b, h, n, w: new(b, n, h, w).transpose(1, 2),
    "steps": lambda new, b, h, n, w: new(b, h, n, 2 * w + 1)[..., 1::2],
    "expanded": lambda new, b, h, n, w: new(1, h, n, w).expand(b, -1, -1, -1),
    "transposed": lambda new, b, h, n, w: new(b, h, w, n).transpose(2, 3),
}


def drawn(seed, dtypes=tuple(RELATIVE), lengths=LENGTHS, dropout=True):
    """A dtype, tensors of any layout, and three of the options above together."""
    torch.manual_seed(seed)
    pick = random.Random(seed).choice
    dtype, n = pick(dtypes), Sizes(pick((0, 1, 1, 2, 3)), pick((1, 2, 4, 6)), pick(lengths), pick(lengths))
    key_heads, width = pick([h for h in range(1, n.heads + 1) if n.heads % h == 0]), pick((1, 4, 8, 16))
    shapes = (n.heads, n.queries, width), (key_heads, n.keys, width), (key_heads, n.keys, pick((width, 1, 5)))
    tensors = [
        LAYOUTS[pick(list(LAYOUTS))](lambda *x: torch.randn(x, dtype=torch.float64).to(dtype), n.batch, *shape)
        for shape in shapes
    ]
    options = {"scale": pick((0.0, 1.0, 0.3, -0.5, 8))} if pick((True, False)) else {}
    names = [name for name in SCORING if not name.startswith("offset be")]  # float32 rounds distances of 2^31
    for name in (pick(names) for _ in range(3)):
        options |= SCORING[name](n)
    if dropout and pick((True, False)):
        options |= {"dropout_p": pick((0.1, 0.5, 1.0)), "seed": torch.tensor([seed]), "site": pick((0, 3))}
    return dtype, tensors, options


def assert_all_the_same(seeds, **given):
    for seed in seeds:
        dtype, tensors, options = drawn(seed, **given)
        try:
            theirs = attended(expected, tensors, options, torch.float64)
            for got, right in zip(attended(F.attention, tensors, options), theirs, strict=True):
                close = max(RELATIVE[dtype], RELATIVE[got.dtype])
                size = max(1.0, float(right.abs().max())) if right.numel() else 1.0
                torch.testing.assert_close(got.double(), right, atol=close * size, rtol=close)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {[x.shape for x in tensors]}, {options}") from error


@pytest.mark.parametrize("route", ["flash", "softmax"])
def test_kernels_compute_any_call(route, monkeypatch):
    monkeypatch.setattr(attention_launch, "route", lambda *size: route)
    with F.backend("triton"):
        assert_all_the_same(range(2000, 2012), dtypes=tuple(RELATIVE)[1:], lengths=LENGTHS[:5])


@pytest.mark.sample(3)
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_pytorch_computes_any_call(first):
    assert_all_the_same(range(first, first + 50))


def in_a_map(tensors, options):
    """vmap over queries and values."""
    q, k, v = tensors
    output = torch.vmap(lambda q, v: F.attention(q, k, v, **options))(torch.stack((q, 2 * q)), torch.stack((v, -v)))
    return output, torch.stack((expected(q, k, v, **options), expected(2 * q, k, -v, **options)))


def in_a_map_of_places(tensors, options):
    """vmap over offsets, lengths, sinks, slopes and masks, along their last dimension."""
    options = options | {"causal": True, "causal_offset": torch.arange(len(tensors[0]))}
    names = ("causal_offset", "key_lengths", "sinks", "alibi_slopes", "mask")
    mapped = {name: x for name, x in options.items() if name in names}
    rest = {name: x for name, x in options.items() if name not in mapped}

    def of(function):
        return lambda *x: function(*tensors, **rest, **dict(zip(mapped, x)))

    ones = list(mapped.values())
    others = [x.roll(1, -1) if x.dim() else x for x in ones]
    output = torch.vmap(of(F.attention), in_dims=-1)(*(torch.stack(pair, -1) for pair in zip(ones, others)))
    return output, torch.stack((of(expected)(*ones), of(expected)(*others)))


@pytest.mark.parametrize("way", [in_a_map, in_a_map_of_places])
def test_transformations_of_any_call(way):
    for seed in range(1000, 1020):
        _, tensors, options = drawn(seed, dtypes=(torch.float64,), lengths=LENGTHS[1:5], dropout=False)
        if not len(tensors[0]):
            continue
        for name in ("sinks", "mask", "alibi_slopes"):
            if name in options and options[name].is_floating_point():
                options[name] = options[name].double()
        ours, theirs = way(tensors, options | {"softcap": 1.5})
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, msg=f"seed {seed}: {options}")


# --------------------------------------------------------------------------------------------------------------- work


def test_work_grows_with_the_window_and_not_with_the_rows(monkeypatch):
    """Counts the interpreter's products of tiles of keys."""
    products, dot = [], InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *a: products.append(1) or dot(*a))

    def products_per_tile(length):
        products.clear()
        with small_tiles(monkeypatch, "flash"):
            attended(F.attention, [torch.randn(1, 1, length, 16)] * 3, {"window": (15, 0)})
        return len(products) / (length / 16)

    # Two tiles of keys per tile of queries, in forward (2 products) and both launches of backward (3 and 4).
    assert products_per_tile(128) <= products_per_tile(256) <= 2 * (2 + 3 + 4)


BANDS = {
    "causal": lambda: {"causal": True, "window": (40, 0)},
    "bottom right": lambda: {"causal": "bottom_right", "window": (9, 0)},
    "both sides": lambda: {"window": (30, 11), "causal_offset": -7},
    "one query": lambda: {"window": (30, 0), "causal_offset": 250},
    "lengths": lambda: {"causal": "bottom_right", "window": (20, 0), "key_lengths": torch.tensor([260, 90])},
    "all": lambda: {**everything(NAMED), "key_lengths": torch.tensor([260, 0]), "mask": torch.randn(B, 1, 200, 260)},
    "no row sees a key": lambda: {"window": (1, 0), "causal_offset": 999},
}


@pytest.mark.parametrize("name", BANDS)
def test_a_window_on_a_cpu_skips_keys_outside_it(name, monkeypatch):
    multiplied, forward = [], products.forward

    def counted(backend, q, k, *others, **output):
        multiplied.append(q.shape[2] * k.shape[2])
        return forward(backend, q, k, *others, **output)

    monkeypatch.setattr(products, "forward", counted)
    options, queries = BANDS[name](), 1 if name == "one query" else 200
    tensors = [torch.randn(B, H, n, 8, dtype=torch.float64) for n in (queries, 260, 260)]
    ours, theirs = (attended(f, tensors, options, torch.float64) for f in (F.attention, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    assert sum(multiplied) <= queries * 260 * {"lengths": 1, "all": 0.75}.get(name, 0.55)
