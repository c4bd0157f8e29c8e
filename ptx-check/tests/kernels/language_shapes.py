"""Features of the language that take rows and columns together, the rest: indices, shapes, scans, products' dtypes."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from language import BFLOAT, EXACT, HALF, WHOLE, M, N, feature
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


@feature(lambda x, y: x - x.amax(1, True) + y.sum(0, True))
def _kept_dimensions(x, y):
    return x - tl.max(x, 1, keep_dims=True) + tl.sum(y, 0, keep_dims=True)


@feature(lambda x, y: x.sum(1), shape=(M,), dtype=torch.int8, low=-100, high=100, **EXACT)
def _sum_in_int64(x, y):
    return tl.sum(x, 1, dtype=tl.int64)


@feature(lambda x, y: x.sum(1).int(), shape=(M,), dtype=torch.int16, low=-100, high=100, **EXACT)
def _sum_of_int16(x, y):
    return tl.sum(x, 1)


@feature(lambda x, y: functools.reduce(torch.bitwise_or, x.unbind(1)), shape=(M,), **WHOLE)
def _reduce_or(x, y):
    return tl.reduce_or(x, 1)


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


@feature(lambda x, y: x.view(4, 4, N).sum(1), shape=(4, N))
def _sum_over_the_middle(x, y):
    return tl.sum(tl.reshape(x, (4, 4, x.shape[1])), 1)


@feature(lambda x, y: x.amin(0).float() + y.amax(0), shape=(N,), **BFLOAT)
def _extrema_of_bfloat16(x, y):
    return tl.min(x, 0) + tl.max(y, 0)


@feature(lambda x, y: x / x.sum(), low=0.1)
def _share_of_the_sum(x, y):
    return x / tl.sum(x)


@feature(lambda x, y: x.exp().sum(1) + y.amax(1), shape=(M,))
def _methods(x, y):
    return x.exp().sum(1) + y.max(1)


@feature(lambda x, y: torch.softmax(x, 1))
def _softmax_of_rows(x, y):
    return tl.softmax(x, 1, keep_dims=True)


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


@feature(lambda x, y: x.cumsum(0, dtype=torch.int32), **WHOLE)
def _cumsum_of_whole_numbers(x, y):
    return tl.cumsum(x, 0)


@feature(lambda x, y: x.cumsum(1, dtype=torch.int32), dtype=torch.int8, low=-100, high=100, **EXACT)
def _cumsum_in_int32(x, y):
    return tl.cumsum(x, 1, dtype=tl.int32)


@feature(lambda x, y: x.flip(1).cumprod(1).flip(1), low=0.5, high=1.5)
def _cumprod_in_reverse(x, y):
    return tl.cumprod(x, 1, reverse=True)


@feature(lambda x, y: x.flatten().sort().values, dtype=torch.float16, **EXACT)
def _sort_of_all(x, y):
    return tl.sort(tl.ravel(x))


@feature(lambda x, y: x.topk(4, 1).values, shape=(M, 4), **WHOLE)
def _topk_of_whole_numbers(x, y):
    return tl.topk(x, 4)


@feature(lambda x, y: torch.cat((x, y), 1).sort(1).values, shape=(M, 2 * N), **EXACT)
def _bitonic_merge(x, y):
    return tl.bitonic_merge(tl.cat(tl.sort(x), tl.sort(y, descending=True), dim=1))


@feature(lambda x, y: x.flip(0), **WHOLE)
def _flip_of_rows(x, y):
    return tl.flip(x, 0)


@feature(lambda x, y: x.gather(0, (y * 7).long().abs() % M), **EXACT)
def _gather_along_rows(x, y):
    return tl.gather(x, tl.abs((y * 7).to(tl.int32)) % x.shape[0], 0)


@feature(lambda x, y: torch.bincount(x[x < 40], minlength=64).int(),
         shape=(64,), dtype=torch.int32, low=0, high=64, **EXACT)  # fmt: skip
def _histogram_with_a_mask(x, y):
    flat = tl.ravel(x)
    return tl.histogram(flat, 64, mask=flat < 40)


# ------------------------------------------------------------------------------------------------------------ shapes


@feature(lambda x, y: torch.cat((x, y)), shape=(2 * M, N), **EXACT)
def _cat(x, y):
    return tl.cat(x, y, dim=0)


@feature(lambda x, y: x.sum() + y.sum(), shape=(1,), **WHOLE)
def _cat_in_any_order(x, y):
    return tl.sum(tl.cat(tl.ravel(x), tl.ravel(y), can_reorder=True))[None].to(tl.int64)


@feature(lambda x, y: x.sum(1)[:, None] + torch.zeros(M, N))
def _broadcast_to(x, y):
    return tl.broadcast_to(tl.sum(x, 1)[:, None], (x.shape[0], x.shape[1]))


@feature(lambda x, y: x.amax(1)[:, None] - y.amax(0)[None, :])
def _broadcast(x, y):
    a, b = tl.broadcast(tl.max(x, 1)[:, None], tl.max(y, 0)[None, :])
    return a - b


@feature(lambda x, y: x.sum(0)[None, :] + y)
def _expand_dims(x, y):
    return tl.expand_dims(tl.sum(x, 0), 0) + y


@feature(lambda x, y: x, **EXACT)
def _squeeze_unsqueeze(x, y):
    return tl.squeeze(tl.unsqueeze(x, 1), 1)


@feature(lambda x, y: x.view(N, M) + y.view(N, M), **EXACT)
def _view(x, y):
    return tl.view(x, (x.shape[1], x.shape[0])) + tl.reshape(y, x.shape[1], x.shape[0])


@feature(lambda x, y: x.amax(), shape=(1,), **EXACT)
def _reshape_in_any_order(x, y):
    return tl.max(tl.reshape(x, (x.shape[0] * x.shape[1],), can_reorder=True))[None]


@feature(lambda x, y: x.view(4, 4, N).transpose(0, 1), **EXACT)
def _trans_of_three(x, y):
    return tl.trans(tl.reshape(x, (4, 4, x.shape[1])), 1, 0, 2)


@feature(lambda x, y: x.T + y.T, **WHOLE)
def _methods_of_shape(x, y):
    return x.T + y.permute(1, 0)


@feature(lambda x, y: torch.stack((torch.stack((x, y), 2), torch.stack((y, x), 2)), 3), shape=(M, N, 2, 2), **WHOLE)
def _join_of_joins(x, y):
    return tl.join(tl.join(x, y), tl.join(y, x))


@feature(lambda x, y: x.view(M, N // 2, 2).sum(2, dtype=torch.int16),
         shape=(M, N // 2), dtype=torch.int16, low=-99, high=99, **EXACT)  # fmt: skip
def _split_of_int16(x, y):
    a, b = tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)).split()
    return a + b


@feature(lambda x, y: torch.full((M, N), 2.5) + torch.arange(N), **EXACT)
def _full_zeros_arange(x, y):
    return tl.full(x.shape, 2.5, tl.float32) + tl.zeros(x.shape, tl.float32) + tl.arange(0, x.shape[1])[None, :]


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


@feature(lambda x, y: x.float() @ y.float().T + 1, shape=(M, M), **HALF)
def _dot_into_sums(x, y):
    return tl.dot(x, tl.trans(y), tl.full((x.shape[0], x.shape[0]), 1.0, tl.float32))


@feature(lambda x, y: x.float() @ y.float().T, shape=(M, M), tolerance=1e-4, dtype=torch.bfloat16)
def _dot_of_bfloat16(x, y):
    return tl.dot(x, tl.trans(y))


@feature(lambda x, y: (x.float() @ y.float().T).half().float() @ y.float(), **HALF)
def _dot_of_a_dot(x, y):
    return tl.dot(tl.dot(x, tl.trans(y)).to(tl.float16), y)


@feature(lambda x, y: x.float().T @ y.float(), shape=(N, N), **HALF)
def _dot_of_a_transposed_tile(x, y):
    return tl.dot(tl.trans(x), y)


@feature(lambda x, y: x.int() @ y.int().T * 2, shape=(M, M), dtype=torch.int8, low=-128, high=128, since=80, **EXACT)
def _dot_of_int8_into_sums(x, y):
    return tl.dot(x, tl.trans(y), tl.dot(x, tl.trans(y), out_dtype=tl.int32), out_dtype=tl.int32)


@feature(lambda x, y: x @ y.T, shape=(M, M), tolerance=1e-4, since=80)
def _dot_in_three_of_bfloat16(x, y):
    return tl.dot(x, tl.trans(y), input_precision="bf16x3")


@feature(lambda x, y: x @ y.T, shape=(M, M), since=80)
def _dot_in_six_of_bfloat16(x, y):
    return tl.dot(x, tl.trans(y), input_precision="bf16x6")


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
