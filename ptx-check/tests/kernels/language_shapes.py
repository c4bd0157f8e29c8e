"""Features of the language that take rows and columns together, the rest: indices, shapes, scans, products' dtypes."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from language import EXACT, HALF, WHOLE, M, N, feature, formula
from torch import Tensor

# -------------------------------------------------------------------------------------------------------- reductions


@feature(lambda x, y: x.max(1).values + 100 * x.max(1).indices, shape=(M,))
def _max_with_indices(x, y):
    most, where = tl.max(x, 1, return_indices=True)
    return most + 100 * where


@feature(lambda x, y: x.min(0).values + 100 * x.min(0).indices, shape=(N,))
def _min_with_indices(x, y):
    least, where = tl.min(x, 0, return_indices=True, return_indices_tie_break_left=False)
    return least + 100 * where


formula("sum_in_int64", "tl.sum(x, 1, dtype=tl.int64)",
        lambda x, y: x.sum(1), shape=(M,), dtype=torch.int8, low=-100, high=100, **EXACT)  # fmt: skip
formula("sum_of_int16", "tl.sum(x, 1)",
        lambda x, y: x.sum(1).int(), shape=(M,), dtype=torch.int16, low=-100, high=100, **EXACT)  # fmt: skip
formula("reduce_or", "tl.reduce_or(x, 1)",
        lambda x, y: functools.reduce(torch.bitwise_or, x.unbind(1)), shape=(M,), **WHOLE)  # fmt: skip


@triton.jit
def _together(mean, squares, count, other_mean, other_squares, other_count):
    total = count + other_count
    apart = other_mean - mean
    mean += apart * other_count / total
    return mean, squares + other_squares + apart * apart * count * other_count / total, total


@feature(lambda x, y: x.mean(1) + x.var(1), shape=(M,))
def _welford(x, y):
    mean, squares, count = tl.reduce((x, tl.zeros_like(x), tl.full(x.shape, 1.0, tl.float32)), 1, _together)
    return mean + squares / (count - 1)


# ------------------------------------------------------------------------------------------------ scans, orders, bins


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@feature(lambda x, y: x.cummax(1).values, **EXACT)
def _scan_of_maxima(x, y):
    return tl.associative_scan(x, 1, _larger)


@feature(lambda x, y: x.flip(1).cummax(1).values.flip(1), **WHOLE)
def _scan_in_reverse(x, y):
    return tl.associative_scan(x, 1, _larger, reverse=True)


formula("cumsum_in_int32", "tl.cumsum(x, 1, dtype=tl.int32)",
        lambda x, y: x.cumsum(1, dtype=torch.int32), dtype=torch.int8, low=-100, high=100, **EXACT)  # fmt: skip
formula("bitonic_merge", "tl.bitonic_merge(tl.cat(tl.sort(x), tl.sort(y, descending=True), dim=1))",
        lambda x, y: torch.cat((x, y), 1).sort(1).values, shape=(M, 2 * N), **EXACT)  # fmt: skip


@feature(lambda x, y: torch.bincount(x[x < 40], minlength=64).int(),
         shape=(64,), dtype=torch.int32, low=0, high=64, **EXACT)  # fmt: skip
def _histogram_with_a_mask(x, y):
    flat = tl.ravel(x)
    return tl.histogram(flat, 64, mask=flat < 40)


# ------------------------------------------------------------------------------------------------------------ shapes


formula("cat", "tl.cat(x, y, dim=0)", lambda x, y: torch.cat((x, y)), shape=(2 * M, N), **EXACT)


@feature(lambda x, y: x.amax(1)[:, None] - y.amax(0)[None, :])
def _broadcast(x, y):
    a, b = tl.broadcast(tl.max(x, 1)[:, None], tl.max(y, 0)[None, :])
    return a - b


formula("full_zeros_arange",
        "tl.full(x.shape, 2.5, tl.float32) + tl.zeros(x.shape, tl.float32) + tl.arange(0, x.shape[1])[None, :]",
        lambda x, y: torch.full((M, N), 2.5) + torch.arange(N), **EXACT)  # fmt: skip


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


formula("dot_into_sums", "tl.dot(x, tl.trans(y), tl.full((x.shape[0], x.shape[0]), 1.0, tl.float32))",
        lambda x, y: x.float() @ y.float().T + 1, shape=(M, M), **HALF)  # fmt: skip
formula("dot_of_bfloat16", "tl.dot(x, tl.trans(y))",
        lambda x, y: x.float() @ y.float().T, shape=(M, M), tolerance=1e-4, dtype=torch.bfloat16)  # fmt: skip
formula("dot_of_a_dot", "tl.dot(tl.dot(x, tl.trans(y)).to(tl.float16), y)",
        lambda x, y: (x.float() @ y.float().T).half().float() @ y.float(), **HALF)  # fmt: skip
formula("dot_of_a_transposed_tile", "tl.dot(tl.trans(x), y)",
        lambda x, y: x.float().T @ y.float(), shape=(N, N), **HALF)  # fmt: skip
formula("dot_of_int8_into_sums",
        "tl.dot(x, tl.trans(y), tl.dot(x, tl.trans(y), out_dtype=tl.int32), out_dtype=tl.int32)",
        lambda x, y: x.int() @ y.int().T * 2,
        shape=(M, M), dtype=torch.int8, low=-128, high=128, since=80, **EXACT)  # fmt: skip
formula("dot_in_three_of_bfloat16", 'tl.dot(x, tl.trans(y), input_precision="bf16x3")',
        lambda x, y: x @ y.T, shape=(M, M), tolerance=1e-4, since=80)  # fmt: skip
formula("dot_in_six_of_bfloat16", 'tl.dot(x, tl.trans(y), input_precision="bf16x6")',
        lambda x, y: x @ y.T, shape=(M, M), since=80)  # fmt: skip


def _scaled(x: Tensor, y: Tensor) -> Tensor:
    return x.view(torch.float8_e5m2).float() / 4 @ (y.view(torch.float8_e5m2).float() * 2).T


@feature(_scaled, shape=(M, M), dtype=torch.uint8, low=0, high=0x70, since=80, refused=("sm_120",))
def _dot_scaled_of_fp8(x, y):
    of_x = tl.full((x.shape[0], 1), 125, tl.uint8)
    of_y = tl.full((y.shape[0], 1), 128, tl.uint8)
    return tl.dot_scaled(x, of_x, "e5m2", tl.trans(y), of_y, "e5m2")


def _of_fp4(x: Tensor) -> Tensor:
    """Two numbers a byte, the lower four bits first."""
    codes = torch.stack((x & 15, x >> 4), -1).flatten(1).long()
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))


@feature(lambda x, y: _of_fp4(x) @ _of_fp4(y).T * 2, shape=(M, M), dtype=torch.uint8, low=0, high=256, since=80,
         refused=("sm_120",))  # fmt: skip
def _dot_scaled_of_fp4(x, y):
    of_x = tl.full((x.shape[0], 2), 127, tl.uint8)
    of_y = tl.full((y.shape[0], 2), 128, tl.uint8)
    return tl.dot_scaled(x, of_x, "e2m1", tl.trans(y), of_y, "e2m1")
