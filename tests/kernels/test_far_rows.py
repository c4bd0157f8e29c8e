"""Tensors with strides so large that offsets within a tile exceed 32 bits: every attention kernel, interpreted."""

import pytest
import torch
from attention_once import append, decode, gradient_of_mask
from search_step import ROOM, a_step, attend

from fasttfm import functional as F
from fasttfm.kernels import masked_softmax
from fasttfm.kernels.attention import once
from fasttfm.kernels.attention.ancestors import Ancestors
from fasttfm.kernels.attention.launch import masking_arguments

ROWS = 17
STRIDE = 2**31 // 15 + 64  # exceeds 32 bits from row 15 of a tile of 16


@pytest.fixture(scope="module")
def far():
    """far(x): a copy of x (..., ROWS, N) with a row stride of STRIDE, in 5 GB that all copies share. Untouched pages
    take no memory."""
    memory, used = torch.empty(ROWS * STRIDE, dtype=torch.float16), 0

    def copy(x):
        nonlocal used
        first = x.transpose(0, -2)[0].contiguous()
        steps = list(first.unsqueeze(0).transpose(0, -2).stride())
        steps[-2] = STRIDE
        used += first.numel()
        return memory.as_strided(x.shape, steps, used - first.numel()).copy_(x)

    return copy


def heads(*shape):
    return torch.randn(shape, dtype=torch.float16)


def masks(far, which):
    if which == "none":
        return None, None
    mask = heads(1, 1, ROWS, ROWS)
    return mask, far(mask) if which == "rows" else far(mask.mT).mT


@pytest.mark.sample(5)
@pytest.mark.parametrize("mask", ["none", "rows", "columns"])
@pytest.mark.parametrize("route", ["short", "flash", "heads"])
def test_queries_keys_values_masks_and_gradients(take, far, route, mask):
    take(route)
    kernel = "short" if route == "short" else "flash"
    near = [heads(2, 2, ROWS, 8) for _ in range(4)]
    results = []
    for copy, added in zip((torch.clone, far), masks(far, mask)):
        q, k, v, grad, *memory = (copy(x) for x in near + [torch.zeros_like(x) for x in near])
        out, lse = once.forward(kernel, q, k, v, out=(memory[0], torch.empty(2, 2, ROWS)), mask=added)
        gradients = once.backward(kernel, grad, q, k, v, out, lse, out=memory[1:], mask=added)
        results.append([out, lse, *gradients])
        if added is not None:
            results[-1].append(gradient_of_mask(grad, q, k, v, out, lse, added))
    assert all(x.any() and torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("route", ["short", "flash", "heads"])
def test_packed_and_joint_projections(take, far, route):
    take(route)
    joint, starts = heads(3, 2, ROWS, 8), torch.tensor([0, ROWS])

    def solve(x):
        x = x.requires_grad_()
        q, k, v = (part.transpose(0, 1) for part in x)  # (T, H, D)
        outputs = [F.varlen_attention(q, k, v, starts, starts, ROWS, ROWS)]
        projected = x.permute(2, 0, 1, 3)  # (T, 3, H, D)
        outputs.append(F.varlen_packed_qkv_attention(projected, None, starts, starts, ROWS, ROWS))
        outputs.append(F.packed_qkv_attention(projected[None]))
        outputs.append(F.attention(*x[:, None]))
        return *outputs, *(torch.autograd.grad(y.square().sum(), x)[0] for y in outputs)

    results = [solve(x) for x in (joint, far(joint))]
    assert all(x.any() and torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("table", [None, torch.tensor([[1, 0], [0, 2]])])
@pytest.mark.parametrize("queries", [1, ROWS])
def test_a_cache_and_appended_values(far, queries, table):
    """With pages of ROWS keys, and with many queries."""
    lengths = torch.tensor([ROWS, ROWS - 1])
    near = heads(2, 4, queries, 8), *(heads(2 if table is None else 3, 2, ROWS, 8) for _ in range(2)), heads(2, 2, 3, 8)
    results = []
    for copy in (torch.clone, far):
        q, k, v, new = (copy(x) if x.shape[2] == ROWS else x for x in near)
        append(v, new, lengths - 3, table)
        out = decode(q, k, v, lengths, None, table, left=None, right=0, scale=0.3, shares=2)
        results.append((v, out))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_places_of_a_beam_search_step():
    """With a capacity of 2**23 tokens, of which 6 are touched."""
    joint, cache, ancestors, positions = a_step([5], 3, 1, 64, torch.float16)
    near, written = attend(joint, cache, ancestors, positions, heads=1)
    memory, table = torch.empty(3, 2**23, 128, dtype=torch.float16), torch.empty(3, 2**23, dtype=torch.int64)
    memory[:, :6] = cache.view(3, ROOM, 128)[:, :6]
    table[:, :5] = ancestors[:, :5] // ROOM * 2**23 + ancestors[:, :5] % ROOM
    step, out = (joint, memory.flatten(0, 1), table, positions), torch.empty_like(near)
    Ancestors(*step, heads=1, scale=0.3)(*step, out)
    assert torch.equal(out, near)
    assert torch.equal(memory[:, 5], written.view(3, ROOM, 128)[:, 5])


@pytest.mark.parametrize("mask", ["rows", "columns"])
def test_a_mask_between_two_products(far, mask):
    scores = torch.randn(1, 1, ROWS, ROWS)
    near, apart = (
        masked_softmax.Forward(scores)(scores, 0.5, masking_arguments(scores.shape, mask=m))[0]
        for m in masks(far, mask)
    )
    assert torch.equal(near, apart)
