"""Tensors as contiguous rows, and the residual connection on rows in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.dropout import as_factor, dropout_scale


def as_rows(x: Tensor) -> Tensor:
    """x (..., N) as contiguous (M, N)."""
    if x.dim() != 2:
        x = x.flatten(0, -2) if x.dim() > 1 else x[None]  # reshape(-1, 0) is refused
    return x if x.is_contiguous() else x.contiguous()


def shaped(rows: Tensor, like: Tensor) -> Tensor:
    """rows (M, N') with the leading dimensions of like (..., N)."""
    return rows if like.dim() == 2 else rows.view(*like.shape[:-1], rows.shape[-1])


def cast(x: Any, dtype: torch.dtype) -> Any:
    """x.to(dtype), at a tenth of the host time if x has it; None for None."""
    return x if x is None or x.dtype is dtype else x.to(dtype)


def dense(compute: Callable[[Any], Any], call: Any, count: int) -> Callable[[Any], Any]:
    """Return compute, wrapped to make the first count tensors contiguous if those of this call are not."""
    if all(x is None or x.is_contiguous() for x in call[:count]):
        return compute
    kind = type(call)
    return lambda call: compute(kind(*(x if x is None else x.contiguous() for x in call[:count]), *call[count:]))


def add_kept(x: Tensor, residual: Tensor, keep: Tensor, dropout_p: float) -> Tensor:
    """residual + x * keep / (1 - p), in residual's dtype, computed in float32; all (M, N), or keep empty."""
    base = residual
    if x.dtype is not residual.dtype:  # torch's mixed-dtype kernels are many times slower than a conversion
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, base = cast(x, dtype), cast(residual, dtype)
    if keep.numel():
        s = torch.addcmul(base, x, as_factor(keep, x.dtype), value=dropout_scale(dropout_p))
    else:
        s = torch.add(base, x)
    return s if s.dtype is residual.dtype else s.to(residual.dtype)


def branch_gradient(ds: Tensor, keep: Tensor, dropout: Any, dtype: torch.dtype) -> Tensor:
    """The gradient of x, in dtype, from that of s = residual + dropout(x); both (M, N).

    keep: empty without dropout; dropout: as in keep_mask().
    """
    if not keep.numel():
        return ds.to(dtype, copy=True)
    dx = ds * as_factor(keep, ds.dtype)
    dx.mul_(dropout_scale(dropout.dropout_p))
    return dx if dx.dtype is dtype else dx.to(dtype)
