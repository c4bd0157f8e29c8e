"""What the LayerNorm, residual and feed-forward operators share: rows, choice of route, dropout in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional._backend import use_triton
from fasttfm.functional.random import draw_seed

_HALF = (torch.float16, torch.bfloat16)
_KERNEL_DTYPES = (torch.float32, *_HALF)


def rows(x: Tensor) -> Tensor:
    """x (..., N) as contiguous (M, N)."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def by_kernel(backend: str, *tensors: Tensor) -> bool:
    """Whether Triton kernels take these tensors; backend as _backend.chosen() gives it."""
    first = tensors[0]
    if first.is_meta or not use_triton(first, backend) or any(t.dtype not in _KERNEL_DTYPES for t in tensors):
        return False
    return not first.is_cuda or torch.cuda.is_available()  # a fake tensor may name a device that is not there


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32 for half precision, dtype itself otherwise."""
    return torch.float32 if dtype in _HALF else dtype


# ---------------------------------------------------------------------------------------------------------- dropout


def seed_for(x: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor | None:
    """The seed that an operator is given: None when nothing is to be dropped, else one drawn now unless it came.

    Raises ValueError unless 0 <= dropout_p <= 1. A p below 1/131072 rounds to no dropout.
    """
    if reference.dropout_threshold(dropout_p) == 0:
        return None
    return draw_seed(x.device) if seed is None else seed


def kept(x: Tensor, dropout_p: float, seed: Tensor | None, stream: int) -> Tensor:
    """The keep-mask of x (M, N), (M, N) bool, or an empty tensor (0,) without a seed."""
    if seed is None:
        return x.new_empty(0, dtype=torch.bool)
    return reference.keep_mask((1, *x.shape), dropout_p, seed, stream)[0].contiguous()


def scale(dropout_p: float, seed: Tensor | None) -> float:
    """What kept values are multiplied by; 1 without a seed."""
    return 1.0 if seed is None else reference.dropout_scale(dropout_p)


def as_factor(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """keep as zeros and ones of dtype. Through int8, because torch converts bool one element at a time on the CPU."""
    return keep.view(torch.int8).to(dtype)


def add_kept(x: Tensor, residual: Tensor, keep: Tensor, dropout_p: float) -> Tensor:
    """residual + x * keep / (1 - p), in residual's dtype, in float32 inside; all (M, N), or keep empty."""
    if not keep.numel():
        return torch.add(residual, x).to(residual.dtype)
    factor = as_factor(keep, x.dtype)
    return torch.addcmul(residual, x, factor, value=reference.dropout_scale(dropout_p)).to(residual.dtype)


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
