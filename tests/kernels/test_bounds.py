"""No kernel reads or writes past its tensors: each lies between guards that must neither matter nor change.

Guards of inputs and fresh memory hold bits that are not a number: what is read past an end, or never written, shows in
a result. Guards of what is made hold others, so that not a number shows when it is written there. Odd sizes, several
tiles each.
"""

import pytest
import torch
from biased_attention import biased_attention
from test_attention_kernels import take  # noqa: F401 (a fixture)

from fasttfm import functional as F
from fasttfm.kernels.chip import INTERPRETER
from fasttfm.kernels.partial_sums import Sums

GUARD = 8192  # bytes before and after
NAN, MADE = 255, 254  # what they are filled with, around inputs and around what is made


class Guards:
    """Memory for tensors, with guards around it."""

    def __init__(self, empty):
        self._empty, self._made = empty, []

    def room(self, shape, dtype, guard=MADE):
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = self._empty(size + 2 * GUARD, dtype=torch.uint8).fill_(guard)
        self._made.append((memory, size, guard))
        return memory[GUARD : GUARD + size].fill_(NAN).view(dtype).view(shape)

    def holding(self, x):
        """x in such memory, its own strides kept; as a leaf."""
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        copy = self.room([x.shape[i] for i in order], x.dtype, NAN).permute([order.index(i) for i in range(x.dim())])
        copy.copy_(x)
        return copy.requires_grad_(x.requires_grad)

    def check(self):
        assert len(self._made) > 1
        for memory, size, guard in self._made:
            assert (memory[:GUARD] == guard).all(), f"written before a tensor of {size} bytes"
            assert (memory[GUARD + size :] == guard).all(), f"written past a tensor of {size} bytes"


@pytest.fixture
def guards(monkeypatch):
    """Every tensor that is made inside has guards."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    found = Guards(empty)

    def make(*shape, dtype=None, device=None, **others):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if others or device not in (None, torch.device("cpu")) or 0 in shape:
            return empty(shape, dtype=dtype, device=device, **others)
        return found.room(shape, dtype or torch.get_default_dtype())

    def make_like(x, *, dtype=None, **others):
        plain = others or not x.is_contiguous() or not x.numel()
        return empty_like(x, dtype=dtype, **others) if plain else found.room(x.shape, dtype or x.dtype)

    def make_new(x, *shape, dtype=None, device=None, **others):
        if others or type(x) is not torch.Tensor:
            return new_empty(x, *shape, dtype=dtype, device=device, **others)
        return make(*shape, dtype=dtype or x.dtype, device=device or x.device)

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch, "empty_like", make_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", make_new)
    return found


def check(guards, call, *inputs):
    """call(*inputs) through kernels between guards, forward and backward, against plain PyTorch."""
    results = []
    for backend in ("torch", "triton"):
        leaves = [guards.holding(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        with F.backend(backend):
            outputs = call(*leaves)
            outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
            wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            grads = [guards.holding(torch.sin(torch.arange(o.numel()) + 1.0).view(o.shape)) for o in outputs]
            results.append([*outputs, *torch.autograd.grad(outputs, wanted, grads)])
    guards.check()
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


SEED = torch.tensor([9])


@pytest.mark.parametrize("route", ["short", "flash", "softmax"])
@pytest.mark.parametrize("mask", ["own", "shared"])
def test_attention(take, guards, route, mask):  # noqa: F811
    take(route)
    shape = (2, 2, 19, 21) if mask == "own" else (1, 2, 1, 21)
    q, k, v = (torch.randn(2, n, 2, 12).transpose(1, 2).requires_grad_() for n in (19, 21, 21))

    def call(q, k, v, mask, lengths, seed):
        return F.attention(q, k, v, mask=mask, key_lengths=lengths, causal=True, dropout_p=0.2, seed=seed)

    check(guards, call, q, k, v, leaf(*shape), torch.tensor([21, 5]), SEED)


@pytest.mark.parametrize("route", ["short", "flash", "softmax"])
def test_attention_of_no_queries(take, guards, route):  # noqa: F811
    take(route)
    nothing = torch.randn(2, 2, 0, 12, requires_grad=True)
    check(guards, lambda q, k, v, mask: F.attention(q, k, v, mask=mask), nothing, *[leaf(2, 2, 5, 12)] * 2, leaf(5))


@pytest.mark.parametrize("route", ["short", "flash"])
def test_query_heads_that_share_keys(take, guards, route):  # noqa: F811
    take(route)

    def call(packed_kv, query, lengths, seed):
        return F.packed_qkv_attention(packed_kv, query, key_lengths=lengths, dropout_p=0.2, seed=seed)

    check(guards, call, leaf(2, 21, 2, 2, 12), leaf(2, 19, 6, 12), torch.tensor([21, 5]), SEED)


@pytest.mark.parametrize("route", ["short", "flash"])
def test_packed_attention(take, guards, route):  # noqa: F811
    take(route)
    starts = torch.tensor([0, 5, 5, 23])

    def call(packed_qkv, starts, seed):
        return F.varlen_packed_qkv_attention(
            packed_qkv, None, starts, starts, 18, 18, causal=True, dropout_p=0.2, seed=seed
        )

    check(guards, call, leaf(25, 3, 2, 12), starts, SEED)


def test_sums_of_biases(take, guards):  # noqa: F811
    take("short")

    def shared(query, packed_kv, lengths, seed, *biases):
        return biased_attention(query, packed_kv, biases=biases, lengths=lengths, p=0.2, seed=seed)

    def packed(packed_qkv, starts, seed, bias):
        return biased_attention(packed_qkv, biases=[bias], starts=starts, longest=18, causal=True, p=0.2, seed=seed)

    check(guards, shared, leaf(2, 19, 6, 12), leaf(2, 21, 2, 2, 12), torch.tensor([21, 5]), SEED, leaf(72), leaf(48))
    check(guards, packed, leaf(25, 3, 2, 12), torch.tensor([0, 5, 5, 23]), SEED, leaf(72))


@pytest.mark.parametrize(("rows", "width", "hidden", "out"), [(37, 33, 70, 19), (3, 1, 31, 33)])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward(guards, activation, rows, width, hidden, out):
    def call(*inputs):
        return F.feed_forward(*inputs[:-1], dropout_p=0.2, seed=inputs[-1], activation=activation)

    check(guards, call, leaf(rows, width), leaf(hidden, width), leaf(hidden), leaf(out, hidden), leaf(out), SEED)


@pytest.mark.parametrize("width", [7, 200])
def test_residual_stream(guards, width):
    def call(x, residual, weight, bias, seed):
        y, s = F.residual_layer_norm(x, residual, weight, bias, dropout_p=0.2, seed=seed)
        return F.residual_add(y, s, dropout_p=0.2, seed=seed, site=1), F.layer_norm(y, weight, bias)

    check(guards, call, leaf(19, width), leaf(19, width), leaf(width), leaf(width), SEED)


@pytest.mark.parametrize(("size", "turned"), [(7, 6), (40, 32)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(guards, size, turned, interleaved):
    def call(x, cos, sin, positions):
        return F.rotary(x, cos, sin, positions, interleaved=interleaved)

    check(guards, call, leaf(2, 3, 5, size), *F.rotary_tables(9, turned), torch.tensor([[0, 8, 2, 2, 1]]))


@pytest.mark.parametrize("classes", [7, 600])
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy(guards, classes, inplace):
    def call(logits, target):
        return F.cross_entropy(logits * 1.0, target, label_smoothing=0.1, ignore_index=1, inplace=inplace)[0]

    check(guards, call, leaf(5, classes), torch.tensor([0, 1, classes - 1, 3, 2]))


def test_embedding(guards):
    def call(tokens, weight, positions, seed):
        return F.embed(tokens, weight, positions, scale=2.0, pad_id=0, first_position=1, dropout_p=0.2, seed=seed)

    check(guards, call, torch.tensor([[0, 10, 3], [3, 3, 1]]), leaf(11, 70), leaf(4, 70), SEED)


def test_sums_of_parts(guards):
    parts = [guards.holding(torch.randn(shape)) for shape in ((33, 31), (3, 65), (64, 1))]
    outs = [guards.room(p.shape[1:], torch.float32) for p in parts]
    Sums(range(3), [p.shape for p in parts], [torch.float32] * 3, INTERPRETER)(parts, outs)
    guards.check()
    for p, out in zip(parts, outs):
        torch.testing.assert_close(out, p.sum(0), atol=1e-5, rtol=1e-5)
