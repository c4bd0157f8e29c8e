"""What the LayerNorm, residual and feed-forward operators share: rows, and the residual connection in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional._backend import use_triton
from fasttfm.functional._dropped import as_factor, kept

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rows(x: Tensor) -> Tensor:
    """x (..., N) as contiguous (M, N)."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.is_contiguous() else x.contiguous()


def shaped(rows: Tensor, like: Tensor) -> Tensor:
    """rows (M, N) in the shape of like (..., N)."""
    return rows if like.dim() == 2 else rows.view(like.shape)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), at a tenth of the host time where there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def by_kernel(backend: str, *tensors: Tensor) -> bool:
    """Whether Triton kernels take these tensors; backend as _backend.chosen() gives it."""
    first = tensors[0]
    if first.is_meta or not use_triton(first, backend) or any(t.dtype not in _KERNEL_DTYPES for t in tensors):
        return False
    return not first.is_cuda or torch.cuda.is_available()  # a fake tensor may name a device that is not there


def add_kept(x: Tensor, residual: Tensor, keep: Tensor, dropout_p: float) -> Tensor:
    """residual + x * keep / (1 - p), in residual's dtype, in float32 inside; all (M, N), or keep empty."""
    into = residual
    if x.dtype is not residual.dtype:  # torch mixes dtypes many times slower than it converts them
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, into = cast(x, dtype), cast(residual, dtype)
    if keep.numel():
        s = torch.addcmul(into, x, as_factor(keep, x.dtype), value=reference.dropout_scale(dropout_p))
    else:
        s = torch.add(into, x)
    return cast(s, residual.dtype)


def branch_gradient(
    ds: Tensor, keep: Tensor, dropout_p: float, seed: Tensor | None, stream: int, dtype: torch.dtype
) -> Tensor:
    """The gradient of x, in dtype, from that of s = residual + dropout(x); both (M, N).

    keep is empty where nothing was dropped, or where a kernel dropped in the forward pass.
    """
    if not keep.numel():
        keep = kept(ds, dropout_p, seed, stream)
    if not keep.numel():
        return ds.to(dtype, copy=True)
    dx = ds * as_factor(keep, ds.dtype)
    return cast(dx.mul_(reference.dropout_scale(dropout_p)), dtype)


def fake_keep(x: Tensor, residual: Tensor, seed: Tensor | None, backend: str) -> Tensor:
    """What keep looks like: PyTorch's route hands the mask to the backward pass, the kernels draw it anew."""
    if seed is None or by_kernel(backend, x, residual):
        return x.new_empty(0, dtype=torch.bool)
    return x.new_empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=torch.bool)
