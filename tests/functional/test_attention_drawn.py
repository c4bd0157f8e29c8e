"""Random calls of attention() against reference.py in float64, with every combination of arguments."""

import math
import random

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels.attention import launch as attention_launch

CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
LENGTHS = (0, 1, 2, 5, 17, 70, 130)


class Drawn:
    """A random call: tensors of any layout, and options."""

    def __init__(self, seed, dtypes=tuple(CLOSE), lengths=LENGTHS):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        pick = self.random.choice
        self.dtype, self.batch, self.heads = pick(dtypes), pick((0, 1, 1, 2, 3)), pick((1, 2, 4, 6))
        key_heads = pick([h for h in range(1, self.heads + 1) if self.heads % h == 0])
        self.queries, self.keys, width = pick(lengths), pick(lengths), pick((1, 4, 8, 16))
        shapes = (
            (self.heads, self.queries, width),
            (key_heads, self.keys, width),
            (key_heads, self.keys, pick((width, 1, 5))),
        )
        self.tensors = [self.laid_out(*shape) for shape in shapes]
        kinds = (self.places, self.scores, self.masks, self.dropout)
        self.options = {name: value for kind in kinds for name, value in kind().items() if self.random.random() < 0.5}
        if "dropout_p" in self.options:
            self.options |= {"seed": torch.tensor([seed]), "site": pick((0, 3))}

    def numbers(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)

    def laid_out(self, heads, length, width):
        batch = self.batch
        kind = self.random.choice(("contiguous", "heads last", "steps", "expanded", "transposed"))
        if kind == "heads last":
            return self.numbers(batch, length, heads, width).transpose(1, 2)
        if kind == "steps":
            return self.numbers(batch, heads, length, 2 * width + 1)[..., 1::2]
        if kind == "expanded":
            return self.numbers(1, heads, length, width).expand(batch, -1, -1, -1)
        if kind == "transposed":
            return self.numbers(batch, heads, width, length).transpose(2, 3)
        return self.numbers(batch, heads, length, width)

    def places(self):
        pick = self.random.choice
        offsets = torch.randint(-self.keys - 3, self.keys + 3, (self.batch,), generator=self.generator)
        sides = [pick((None, 0, 0, 1, 3, 17, 60, 10**12)) for _ in range(2)]
        return {
            "window": tuple(sides),
            "causal": pick((True, "top_left", "bottom_right", False)),
            "causal_offset": pick((0, -3, 5, -1000, 1000, offsets, offsets.int())),
        }

    def scores(self):
        pick = self.random.choice
        slopes = self.numbers(*pick(((self.heads,), (self.batch, self.heads))), dtype=torch.bfloat16)
        sinks = self.numbers(self.heads, dtype=pick((torch.float32, self.dtype)))
        if pick((True, False, False)):
            sinks[0] = pick((-math.inf, 100.0, math.inf))
        return {
            "softcap": pick((1e-6, 0.1, 1.5, 50, 1e30)),
            "alibi_slopes": (slopes.abs() * pick((1, 0, -1, 1e4))).to(pick((torch.float32, self.dtype, torch.float64))),
            "sinks": sinks,
            "scale": pick((0.0, 1.0, 0.3, -0.5, 8)),
        }

    def masks(self):
        pick = self.random.choice
        rows, columns = self.queries, self.keys
        shape = pick(
            (
                (self.batch, self.heads, rows, columns),
                (self.batch, 1, 1, columns),
                (rows, columns),
                (1,),
                (),
                (columns,),
            )
        )
        added = self.numbers(*shape, dtype=pick((torch.float32, self.dtype)))
        hidden = torch.rand(shape, generator=self.generator) > pick((0.3, 0.9))
        least, most = pick(((0, 1), (-2, 5)))
        lengths = torch.randint(least, columns + most, (self.batch,), generator=self.generator)
        return {
            "mask": pick((hidden, added, added.masked_fill(hidden, -math.inf))),
            "key_lengths": pick((lengths, lengths.int())),
        }

    def dropout(self):
        return {"dropout_p": self.random.choice((0.1, 0.5, 1.0))}


def results(function, call, wide=False):
    """The output, and the gradients of all inputs that may take one, in float64 if wide."""

    def leaf(x):
        return (x.double() if wide else x).detach().requires_grad_()

    tensors = [leaf(x) for x in call.tensors]
    options = dict(call.options)
    for name, x in options.items():
        if name in ("sinks", "mask") and x.is_floating_point():
            options[name] = leaf(x)
    output = function(*tensors, **options)
    grad = torch.linspace(-1, 1, max(output.numel(), 2), dtype=torch.float64)[: output.numel()].view(output.shape)
    leaves = [
        *tensors,
        *(options[name] for name in ("sinks", "mask") if getattr(options.get(name), "requires_grad", False)),
    ]
    gradients = torch.autograd.grad(output, leaves, grad.to(output.dtype), allow_unused=True, materialize_grads=True)
    return [output.detach(), *gradients]


def expected(*tensors, **options):
    return reference.attention(*tensors, **options)[0]


def assert_same(call):
    ours, theirs = results(F.attention, call), results(expected, call, wide=True)
    for got, right in zip(ours, theirs, strict=True):
        close = max(CLOSE[call.dtype], CLOSE[got.dtype])
        size = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(got.double(), right, atol=close * size, rtol=close)


@pytest.mark.parametrize("route", ["flash", "softmax"])
def test_kernels_compute_any_call(route, monkeypatch):
    monkeypatch.setattr(attention_launch, "route", lambda *size: route)
    for seed in range(2000, 2012):
        try:
            call = Drawn(seed, dtypes=tuple(CLOSE)[1:], lengths=LENGTHS[:5])
            with F.backend("triton"):
                assert_same(call)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {[x.shape for x in call.tensors]}, {call.options}") from error


@pytest.mark.sample(3)
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_pytorch_computes_any_call(first):
    for seed in range(first, first + 50):
        try:
            assert_same(call := Drawn(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {[x.shape for x in call.tensors]}, {call.options}") from error


def in_a_map(call):
    """vmap over queries and values."""
    q, k, v = call.tensors
    output = torch.vmap(lambda q, v: F.attention(q, k, v, **call.options))(
        torch.stack((q, 2 * q)), torch.stack((v, -v))
    )
    return output, torch.stack((expected(q, k, v, **call.options), expected(2 * q, k, -v, **call.options)))


def in_a_map_of_places(call):
    call.options |= {"causal": True, "causal_offset": torch.arange(call.batch)}
    mapped = {name: x for name, x in call.options.items() if name in ("causal_offset", "sinks", "alibi_slopes", "mask")}
    rest = {name: x for name, x in call.options.items() if name not in mapped}

    def both(function):
        return lambda *x: function(*call.tensors, **rest, **dict(zip(mapped, x)))

    ones = list(mapped.values())
    output = torch.vmap(both(F.attention))(*(torch.stack((x, x.roll(1, -1)) if x.dim() else (x, x)) for x in ones))
    others = [x.roll(1, -1) if x.dim() else x for x in ones]
    return output, torch.stack((both(expected)(*ones), both(expected)(*others)))


def in_a_gradient(call):
    def of(function):
        return torch.func.grad(lambda *x: function(*x, **call.options).sin().sum(), (0, 1, 2))(*call.tensors)

    return of(F.attention), of(expected)


def in_a_graph(call):
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: F.attention(*x, **call.options), backend="aot_eager", fullgraph=True)
    return compiled(*call.tensors), expected(*call.tensors, **call.options)


def of_second_order(call):
    def of(function):
        x = [t.detach().requires_grad_() for t in call.tensors]
        first = torch.autograd.grad(function(*x, **call.options).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), x, materialize_grads=True)

    return of(F.attention), of(expected)


@pytest.mark.parametrize("way", [in_a_map, in_a_map_of_places, in_a_gradient, in_a_graph, of_second_order])
def test_transformations_of_any_call(way):
    for seed in range(1000, 1006 if way is in_a_graph else 1020):
        call = Drawn(seed, dtypes=(torch.float64,), lengths=LENGTHS[1:5])
        if not call.batch:
            continue
        for name in ("dropout_p", "seed", "site"):
            call.options.pop(name, None)
        for name in ("sinks", "mask", "alibi_slopes"):
            if name in call.options and call.options[name].is_floating_point():
                call.options[name] = call.options[name].double()
        call.options["softcap"] = 1.5
        ours, theirs = way(call)
        note = f"seed {seed}: {call.options}"
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, msg=note)
