"""Dropout on the plain PyTorch route of the operators: how a keep-mask is kept and applied at the least cost."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.random import draw_seed

_HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32 for half precision, dtype itself otherwise."""
    return torch.float32 if dtype in _HALF else dtype


def active(dropout_p: float, seed: Tensor | None) -> bool:
    """Whether any element can be dropped; p below 1/131072 rounds to no dropout."""
    return seed is not None and reference.dropout_threshold(dropout_p) > 0


def seed_for(x: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor | None:
    """The seed that an operator is given: None when nothing is to be dropped, else one drawn now unless it came.

    Raises ValueError unless 0 <= dropout_p <= 1, and for a seed that kernels would take for another.
    """
    if reference.dropout_threshold(dropout_p) == 0:
        return None
    if seed is None:
        return draw_seed(x.device)
    if seed.dtype is not torch.int64 or seed.shape != (1,) or seed.device != x.device:
        raise ValueError(
            f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: int64 (1,) on {x.device} is needed, "
            "as draw_seed() makes it"
        )
    return seed


def kept(x: Tensor, dropout_p: float, seed: Tensor | None, stream: int) -> Tensor:
    """The keep-mask of x (M, N), (M, N) bool, or an empty tensor (0,) where nothing is dropped."""
    if seed is None or not active(dropout_p, seed):
        return x.new_empty(0, dtype=torch.bool)
    return reference.keep_mask((1, *x.shape), dropout_p, seed, stream)[0].contiguous()


def as_factor(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """keep as zeros and ones of dtype. Through int8, because torch converts bool one element at a time on the CPU."""
    return keep.view(torch.int8).to(dtype)
