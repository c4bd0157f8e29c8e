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
    return x.reshape(-1, x.shape[-1]).contiguous()


def by_kernel(backend: str, *tensors: Tensor) -> bool:
    """Whether Triton kernels take these tensors; backend as _backend.chosen() gives it."""
    first = tensors[0]
    if first.is_meta or not use_triton(first, backend) or any(t.dtype not in _KERNEL_DTYPES for t in tensors):
        return False
    return not first.is_cuda or torch.cuda.is_available()  # a fake tensor may name a device that is not there


def add_kept(x: Tensor, residual: Tensor, keep: Tensor, dropout_p: float) -> Tensor:
    """residual + x * keep / (1 - p), in residual's dtype, in float32 inside; all (M, N), or keep empty."""
    dtype = torch.promote_types(x.dtype, residual.dtype)  # torch mixes dtypes many times slower than it converts them
    x, into = x.to(dtype), residual.to(dtype)
    if not keep.numel():
        return torch.add(into, x).to(residual.dtype)
    scale = reference.dropout_scale(dropout_p)
    return torch.addcmul(into, x, as_factor(keep, dtype), value=scale).to(residual.dtype)


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
    return dx.mul_(reference.dropout_scale(dropout_p)).to(dtype)


def fake_keep(x: Tensor, residual: Tensor, seed: Tensor | None, backend: str) -> Tensor:
    """What keep looks like: PyTorch's route hands the mask to the backward pass, the kernels draw it anew."""
    if seed is None or by_kernel(backend, x, residual):
        return x.new_empty(0, dtype=torch.bool)
    return x.new_empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=torch.bool)
