"""LayerNorm and RMSNorm of rows by PyTorch, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.dropout import wide
from fasttfm.functional.rows import as_rows, cast


class Normalised(NamedTuple):
    """Tensors that a norm leaves for its backward pass."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) -> y in x's dtype or wider, mean (M,), rstd (M,), by torch's own kernel, in float32 at least."""
    dtype = wide(x.dtype)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dim() != 1:
            raise ValueError(f"layer_norm: {name} {tuple(parameter.shape)} is in parts, which only kernels add up")
    if x.is_cpu and weight is None and x.dtype != dtype:
        weight = torch.ones(x.shape[-1], dtype=dtype)
    # Half-precision x with float32 parameters is a pair that torch takes on the CPU alone, statistics in float32.
    taken = x if x.is_cpu else cast(x, dtype)
    y, mean, rstd = torch.native_layer_norm(taken, [x.shape[-1]], *_cast(weight, bias, dtype), eps)
    return y, mean.view(-1), rstd.view(-1)


def normalise_backward(dy: Tensor, saved: Normalised) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias of rows (M, N); the latter two empty where there is no such parameter."""
    # All in float32: on half precision torch's CPU kernel is slower, and its dweight is off by a sixth at 4,096 rows
    # in bfloat16, because it sums in half precision.
    x, mean, rstd, weight, bias = saved
    dtype = wide(x.dtype)
    x, mean = as_rows(x), mean.view(-1, 1)
    if x.dtype is not dtype:  # torch forms x * rstd - mean * rstd, whose difference a mean of 1e4 leaves no digit of
        x = x.to(dtype).sub_(mean)
        mean = torch.zeros_like(mean)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        cast(dy, dtype),
        x,
        [x.shape[-1]],
        mean,
        rstd.view(-1, 1),
        *_cast(weight, bias, dtype),
        [True, weight is not None, bias is not None],
    )
    gradients = [dx, dweight, dbias]
    for place, like in enumerate((saved.x, weight, bias)):
        gradients[place] = x.new_empty(0) if like is None else cast(gradients[place], like.dtype)
    return gradients[0], gradients[1], gradients[2]


def _cast(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Both in dtype."""
    return None if weight is None else cast(weight, dtype), None if bias is None else cast(bias, dtype)


def normalise_rms(s: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """s (M, N) -> y in float32 at least, rstd (M,) in the place of a mean, and rstd."""
    precise = cast(s, wide(s.dtype))
    rstd = torch.rsqrt(precise.square().mean(-1) + eps)
    y = precise * rstd[:, None]
    return y if weight is None else y.mul_(weight), rstd, rstd


def normalise_rms_backward(
    dy: Tensor, ds: Tensor | None, rows: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows (M, N), ds added, and of weight, empty where there is none; no bias has one."""
    dtype, rstd = wide(rows.dtype), rstd[:, None]
    gradient, normal = cast(dy, dtype), cast(rows, dtype) * rstd
    dweight = rows.new_empty(0) if weight is None else cast((gradient * normal).sum(0), weight.dtype)
    if weight is not None:
        gradient = gradient * weight
    total = (gradient - normal * (gradient * normal).mean(-1, keepdim=True)).mul_(rstd)
    if ds is not None:
        total += ds
    return cast(total, rows.dtype), dweight, rows.new_empty(0)
