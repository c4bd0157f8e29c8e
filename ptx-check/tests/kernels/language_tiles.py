"""Features of the language that take rows and columns together: reductions, scans, sorting, shapes, products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from language import EXACT, HALF, M, N, feature, formula
from torch import Tensor

ROWS = {"shape": (M,)}

# ---------------------------------------------------------------------------------------- reductions, scans, sorting


@feature(lambda x, y: x.max(1).values + 100 * x.max(1).indices + y.argmin(1), **ROWS)
def _max_with_indices(x, y):
    most, where = tl.max(x, 1, return_indices=True)
    return most + 100 * where + tl.argmin(y, 1)


@triton.jit
def _together(mean, squares, count, other_mean, other_squares, other_count):
    total = count + other_count
    apart = other_mean - mean
    mean += apart * other_count / total
    return mean, squares + other_squares + apart * apart * count * other_count / total, total


@feature(lambda x, y: x.mean(1) + x.var(1), **ROWS)
def _welford(x, y):
    mean, squares, count = tl.reduce((x, tl.zeros_like(x), tl.full(x.shape, 1.0, tl.float32)), 1, _together)
    return mean + squares / (count - 1)


@triton.jit
def _linear(a, b, c, d):
    return a * c, b * c + d


def _scanned(x, y):
    h = [y[:, 0]]
    for t in range(1, N):
        h.append(h[-1] * x[:, t] + y[:, t])
    return torch.stack(h, 1)


@feature(_scanned, low=0.0, high=1.0)
def _associative_scan(x, y):
    _, h = tl.associative_scan((x, y), 1, _linear)
    return h


formula("topk", "tl.topk(x, 8)", lambda x, y: x.topk(8, 1).values, shape=(M, 8), **EXACT)


@feature(lambda x, y: torch.bincount(x[x < 40], minlength=64).int(),
         shape=(64,), dtype=torch.int32, low=0, high=64, **EXACT)  # fmt: skip
def _histogram_with_a_mask(x, y):
    flat = tl.ravel(x)
    return tl.histogram(flat, 64, mask=flat < 40)


# ------------------------------------------------------------------------------------------------------------ shapes


formula("gather", "tl.gather(x, tl.abs((y * 7).to(tl.int32)) % x.shape[1], 1)",
        lambda x, y: x.gather(1, (y * 7).long().abs() % N), **EXACT)  # fmt: skip
formula("permute", "tl.permute(tl.reshape(x, (4, 4, x.shape[1])), (2, 0, 1))",
        lambda x, y: x.view(4, 4, N).permute(2, 0, 1), **EXACT)  # fmt: skip


@triton.jit
def _selu(x):
    if x > 0:
        return x
    else:
        return 1.5 * (tl.exp(x) - 1)


@feature(lambda x, y: torch.where(x > 0, x, 1.5 * torch.expm1(x)))
def _map_elementwise(x, y):
    return tl.map_elementwise(_selu, x)


# ---------------------------------------------------------------------------------------------------------- products


SQUARE = {"shape": (M, M)}
formula("dot_of_a_dot", "tl.dot(tl.dot(x, tl.trans(y)).to(tl.float16), y)",
        lambda x, y: (x.float() @ y.float().T).half().float() @ y.float(), **HALF)  # fmt: skip
formula("dot_of_a_transposed_tile", "tl.dot(tl.trans(x), y)",
        lambda x, y: x.float().T @ y.float(), shape=(N, N), **HALF)  # fmt: skip
for name, precision, options in (
    ("dot_in_full", "ieee", {}),
    ("dot_in_tf32", "tf32", {"tolerance": 1e-2, "since": 80}),
    ("dot_in_three_of_tf32", "tf32x3", {"tolerance": 1e-4, "since": 80}),
    ("dot_in_six_of_bfloat16", "bf16x6", {"since": 80}),
):
    expression = f'tl.dot(x, tl.trans(y), input_precision="{precision}")'
    formula(name, expression, lambda x, y: x @ y.T, **options, **SQUARE)
formula("batched_dot", "tl.dot(tl.reshape(x, (2, 16, 16)), tl.reshape(y, (2, 16, 16))).to(tl.float16)",
        lambda x, y: x.view(2, 16, 16) @ y.view(2, 16, 16), shape=(2, 16, 16), **HALF)  # fmt: skip


def _of_fp4(x: Tensor) -> Tensor:
    """Two numbers a byte, the lower four bits first."""
    codes = torch.stack((x & 15, x >> 4), -1).flatten(1).long()
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))


@feature(lambda x, y: _of_fp4(x) @ _of_fp4(y).T * 2, dtype=torch.uint8, low=0, high=256, since=80,
         refused=("sm_120",), **SQUARE)  # fmt: skip
def _dot_scaled_of_fp4(x, y):
    of_x = tl.full((x.shape[0], 2), 127, tl.uint8)
    of_y = tl.full((y.shape[0], 2), 128, tl.uint8)
    return tl.dot_scaled(x, of_x, "e2m1", tl.trans(y), of_y, "e2m1")
