"""Tensors as rows, and the residual connection on rows in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.dropout import as_factor, dropout_scale


def as_rows(x: Tensor) -> Tensor:
    """x (..., N) as contiguous (M, N)."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.is_contiguous() else x.contiguous()


def shaped(rows: Tensor, like: Tensor) -> Tensor:
    """rows (M, N') with the leading dimensions of like (..., N)."""
    return rows if like.dim() == 2 else rows.view(*like.shape[:-1], rows.shape[-1])


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), at a tenth of the host time where there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def dense(compute: Callable[[Any], Any], call: Any, count: int) -> Callable[[Any], Any]:
    """compute, for calls with the strides of this one, whose first tensors, so many, it is given contiguous."""
    if all(x is None or x.is_contiguous() for x in call[:count]):
        return compute
    kind = type(call)
    return lambda call: compute(kind(*(x if x is None else x.contiguous() for x in call[:count]), *call[count:]))


def add_kept(x: Tensor, residual: Tensor, keep: Tensor, dropout_p: float) -> Tensor:
    """residual + x * keep / (1 - p), in residual's dtype, in float32 inside; all (M, N), or keep empty."""
    base = residual
    if x.dtype is not residual.dtype:  # torch mixes dtypes many times slower than it converts them
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, base = cast(x, dtype), cast(residual, dtype)
    if keep.numel():
        s = torch.addcmul(base, x, as_factor(keep, x.dtype), value=dropout_scale(dropout_p))
    else:
        s = torch.add(base, x)
    return s if s.dtype is residual.dtype else s.to(residual.dtype)


def branch_gradient(ds: Tensor, keep: Tensor, dropout: Any, dtype: torch.dtype) -> Tensor:
    """The gradient of x, in dtype, from that of s = residual + dropout(x); both (M, N). keep is empty where nothing was
    dropped; dropout as keep_mask() takes it."""
    if not keep.numel():
        return ds.to(dtype, copy=True)
    dx = ds * as_factor(keep, ds.dtype)
    dx.mul_(dropout_scale(dropout.dropout_p))
    return dx if dx.dtype is dtype else dx.to(dtype)
