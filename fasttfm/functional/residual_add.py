"""The residual connection on its own (Vaswani et al. 2017, section 5.4), where no LayerNorm follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import _dropped, _layers
from fasttfm.functional._backend import chosen
from fasttfm.functional._operators import Operator


def residual_add(
    x: Tensor, residual: Tensor, *, dropout_p: float = 0.0, seed: Tensor | None = None, stream: int = 0
) -> Tensor:
    """residual + dropout(x), in residual's dtype: a residual connection that no LayerNorm follows.

    x, residual (..., N), their dtypes may differ. dropout_p in [0, 1], rounded to 1/65536; seed (1,) int64 on x's
    device, drawn from torch's generator when None; stream tells the dropouts of one model apart. Raises ValueError for
    shapes that do not agree or a dropout_p outside [0, 1].
    """
    if x.shape != residual.shape or x.dim() == 0:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape (..., N)")
    seed = _dropped.seed_for(x, dropout_p, seed)
    if seed is None and x.dtype == residual.dtype:
        return residual + x
    return _residual_add(x, residual, dropout_p, seed, stream, chosen())[0]


def _forward(
    x: Tensor, residual: Tensor, dropout_p: float, seed: Tensor | None, stream: int, backend: str
) -> tuple[Tensor, Tensor]:
    x_rows, residual_rows = _layers.rows(x), _layers.rows(residual)
    if _layers.by_kernel(backend, x, residual):
        from fasttfm.kernels import residual_add as kernel

        s = kernel.residual_add(x_rows, residual_rows, dropout_p=dropout_p, seed=seed, stream=stream)
        keep = x.new_empty(0, dtype=torch.bool)
    else:
        keep = _dropped.kept(x_rows, dropout_p, seed, stream)
        s = _layers.add_kept(x_rows, residual_rows, keep, dropout_p)
    return _layers.shaped(s, x), keep


def _forward_fake(
    x: Tensor, residual: Tensor, dropout_p: float, seed: Tensor | None, stream: int, backend: str
) -> tuple[Tensor, Tensor]:
    return residual.new_empty(x.shape), _layers.fake_keep(x, residual, seed, backend)


def _save(ctx: Any, args: tuple, outputs: tuple[Tensor, ...]) -> None:
    x, _, dropout_p, seed, stream, backend = args
    _, keep = outputs
    ctx.mark_non_differentiable(keep)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(keep, seed)
    ctx.dropout = (dropout_p, stream, x.dtype, backend)


def _autograd(ctx: Any, ds: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if ds is None:
        return (None,) * 6
    keep, seed = ctx.saved_tensors
    dropout_p, stream, dtype, backend = ctx.dropout
    return _residual_add_backward(ds, keep, dropout_p, seed, stream, dtype, backend), ds, None, None, None, None


def _backward(
    ds: Tensor, keep: Tensor, dropout_p: float, seed: Tensor | None, stream: int, dtype: torch.dtype, backend: str
) -> Tensor:
    if not keep.numel() and _layers.by_kernel(backend, ds):
        from fasttfm.kernels import residual_add as kernel

        dx = kernel.dropout(_layers.rows(ds), dropout_p=dropout_p, seed=seed, stream=stream, dtype=dtype)
    else:
        dx = _layers.branch_gradient(_layers.rows(ds), keep, dropout_p, seed, stream, dtype)
    return _layers.shaped(dx, ds)


def _backward_fake(
    ds: Tensor, keep: Tensor, dropout_p: float, seed: Tensor | None, stream: int, dtype: torch.dtype, backend: str
) -> Tensor:
    return ds.new_empty(ds.shape, dtype=dtype)


_residual_add_backward = Operator(
    "residual_add_backward(Tensor ds, Tensor keep, float dropout_p, Tensor? seed, int stream, ScalarType dtype,"
    " str backend) -> Tensor",
    _backward,
    _backward_fake,
)
_residual_add = Operator(
    "residual_add(Tensor x, Tensor residual, float dropout_p, Tensor? seed, int stream, str backend)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    save=_save,
    backward=_autograd,
)
