"""Features of the language that take rows and columns together: reductions, scans, sorting, shapes, products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from language import DOUBLE, EXACT, HALF, WHOLE, M, N, feature, formula

formula("sum", "tl.sum(x, 1)", lambda x, y: x.sum(1), shape=(M,))
formula("sum_of_whole_numbers", "tl.sum(x, 1)", lambda x, y: x.sum(1, dtype=torch.int32), shape=(M,), **WHOLE)
formula("max_and_min_of_whole_numbers", "tl.max(x, 1) + tl.min(y, 1)",
        lambda x, y: x.amax(1) + y.amin(1), shape=(M,), **WHOLE)  # fmt: skip
formula("argmax", "tl.argmax(x, 1) + 100 * tl.argmin(y, 1)",
        lambda x, y: x.argmax(1).int() + 100 * y.argmin(1).int(), shape=(M,), **EXACT)  # fmt: skip
formula("xor_sum", "tl.xor_sum(x, 1)",
        lambda x, y: torch.from_numpy(__import__("numpy").bitwise_xor.reduce(x.numpy(), 1)),
        shape=(M,), **WHOLE)  # fmt: skip


@triton.jit
def _times(a, b):
    return a * b


@feature(lambda x, y: x.prod(1), shape=(M,), low=0.5, high=1.5)
def _reduce(x, y):
    return tl.reduce(x, 1, _times)


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


formula("cumsum", "tl.cumsum(x, 1)", lambda x, y: x.cumsum(1))
formula("cumprod", "tl.cumprod(x, 1)", lambda x, y: x.cumprod(1), low=0.5, high=1.5)
formula("sort", "tl.sort(x)", lambda x, y: x.sort(1).values, **EXACT)
formula("sort_downwards", "tl.sort(x, descending=True)", lambda x, y: x.sort(1, descending=True).values, **WHOLE)
formula("topk", "tl.topk(x, 8)", lambda x, y: x.topk(8, 1).values, shape=(M, 8), **EXACT)
formula("flip", "tl.flip(x, 1)", lambda x, y: x.flip(1), **EXACT)
formula("gather", "tl.gather(x, tl.abs((y * 7).to(tl.int32)) % x.shape[1], 1)",
        lambda x, y: x.gather(1, (y * 7).long().abs() % N), **EXACT)  # fmt: skip
formula("histogram", "tl.histogram(tl.reshape(x, (x.shape[0] * x.shape[1],)), 64)",
        lambda x, y: torch.bincount(x.flatten(), minlength=64).int(),
        shape=(64,), dtype=torch.int32, low=0, high=64)  # fmt: skip


@feature(lambda x, y: x.view(M, N // 2, 2)[..., 0] - x.view(M, N // 2, 2)[..., 1], shape=(M, N // 2), **EXACT)
def _split(x, y):
    a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return a - b


formula("join", "tl.join(x, y)", lambda x, y: torch.stack((x, y), 2), shape=(M, N, 2), **EXACT)
formula("trans", "tl.trans(x)", lambda x, y: x.T, **EXACT)
formula("permute", "tl.permute(tl.reshape(x, (4, 4, x.shape[1])), (2, 0, 1))",
        lambda x, y: x.view(4, 4, N).permute(2, 0, 1), **EXACT)  # fmt: skip
formula("dot_of_half", "tl.dot(x, tl.trans(y)).to(tl.float16)",
        lambda x, y: x @ y.T, shape=(M, M), **HALF | {"tolerance": 1e-2})  # fmt: skip
formula("dot_in_full", 'tl.dot(x, tl.trans(y), input_precision="ieee")', lambda x, y: x @ y.T, shape=(M, M))
formula("dot_in_tf32", 'tl.dot(x, tl.trans(y), input_precision="tf32")',
        lambda x, y: x @ y.T, shape=(M, M), tolerance=1e-2, since=80)  # fmt: skip
formula("dot_in_three_of_tf32", 'tl.dot(x, tl.trans(y), input_precision="tf32x3")',
        lambda x, y: x @ y.T, shape=(M, M), tolerance=1e-4, since=80)  # fmt: skip
formula("dot_of_int8", "tl.dot(x, tl.trans(y))",
        lambda x, y: x.int() @ y.int().T,
        shape=(M, M), dtype=torch.int8, low=-128, high=128, since=80, **EXACT)  # fmt: skip
formula("dot_of_fp8_e5m2", "tl.dot(x.to(tl.float8e5), tl.trans(y.to(tl.float8e5)))",
        lambda x, y: x.to(torch.float8_e5m2).float() @ y.to(torch.float8_e5m2).float().T,
        shape=(M, M), tolerance=1e-4)  # fmt: skip
formula("dot_of_fp8_e4m3", "tl.dot(x.to(tl.float8e4nv), tl.trans(y.to(tl.float8e4nv)))",
        lambda x, y: x.to(torch.float8_e4m3fn).float() @ y.to(torch.float8_e4m3fn).float().T,
        shape=(M, M), tolerance=1e-4, since=89)  # fmt: skip
formula("dot_of_float64", "tl.dot(x, tl.trans(y))", lambda x, y: x @ y.T, shape=(M, M), **DOUBLE)
formula("dot_summed_in_half", "tl.dot(x, tl.trans(y), out_dtype=tl.float16)",
        lambda x, y: x @ y.T, shape=(M, M), dtype=torch.float16, tolerance=3e-2, since=70)  # fmt: skip
formula("batched_dot", "tl.dot(tl.reshape(x, (2, 16, 16)), tl.reshape(y, (2, 16, 16))).to(tl.float16)",
        lambda x, y: x.view(2, 16, 16) @ y.view(2, 16, 16),
        shape=(2, 16, 16), dtype=torch.float16, tolerance=1e-2)  # fmt: skip
