"""RMSNorm, alone and fused with the residual connection and its dropout.

Source: Zhang and Sennrich 2019, section 4; T5 and Llama normalise so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.backends import chosen
from fasttfm.functional.dropout import Dropout, dropout_for, fake_keep_mask, keep_mask, wide
from fasttfm.functional.layer_norm import norm_route
from fasttfm.functional.operator import Gradients, Operator
from fasttfm.functional.rows import add_kept, as_rows, branch_gradient, cast, shaped
from fasttfm.functional.signature import names_arguments


@names_arguments
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, equation 4).

    x (..., N) of any floating dtype and strides; weight (N,) of any floating dtype, or None. Everything is computed in
    float32 for half precision and rounded once. Returns (..., N) in x's dtype, under autocast too. Raises ValueError
    for shapes that do not agree.
    """
    _check(x, weight)
    return _rms_norm(x, None, weight, eps, Dropout(0.0, None, 0), chosen())[0]


@names_arguments
def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x) and y = rms_norm(s) in one pass; returns (y, s).

    x, residual (..., N), their dtypes may differ; y comes in x's dtype, s in residual's. dropout_p in [0, 1], rounded
    to 1/256; seed (1,) int64 on x's device, drawn from torch's generator when None; site, below 2^31, tells the
    dropouts of one model apart. Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    _check(x, weight)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape")
    y, s, *_ = _rms_norm(x, residual, weight, eps, dropout_for(x.device, dropout_p, seed, site), chosen())
    return y, s


def _check(x: Tensor, weight: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} must have a last dimension of at least 1 to normalise")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} must be ({x.shape[-1]},), the last dimension of x {tuple(x.shape)}"
        )


class _Call(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    eps: float
    dropout: Dropout
    route: str


class _Saved(NamedTuple):
    s: Tensor
    """What was normalised."""
    rstd: Tensor
    weight: Tensor | None
    keep: Tensor
    dropout: Dropout
    dtype: torch.dtype
    """Of x."""
    joined: bool
    """Whether there was a residual."""
    route: str

    @property
    def one_gradient(self) -> bool:
        """True if x and residual have the same gradient, which is then computed once."""
        return not self.joined or (self.dtype == self.s.dtype and self.dropout.seed is None)


class _Backward(NamedTuple):
    dy: Tensor
    ds: Tensor | None
    saved: _Saved


def _decide(call: _Call) -> str:
    return norm_route(call.route, call.x, call.x if call.residual is None else call.residual)


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s (empty without a residual), rstd (M,), and dropout's mask, empty but on PyTorch's route."""
    x, residual, weight, eps, dropout, route = call
    rows = as_rows(x)
    stream = None if residual is None else as_rows(residual)
    keep = x.new_empty(0, dtype=torch.bool)
    if route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        y, summed, _, rstd = kernel.forward(rows, weight, None, eps, residual=stream, rms=True, **dropout._asdict())
        s = None if stream is None else summed
    else:
        s = None
        if stream is not None:
            keep = keep_mask(rows, dropout)
            s = add_kept(rows, stream, keep, dropout.dropout_p)
        taken = rows if s is None else s
        precise = cast(taken, wide(taken.dtype))
        rstd = torch.rsqrt(precise.square().mean(-1) + eps)
        y = precise * rstd[:, None]
        y = cast(y if weight is None else y.mul_(weight), x.dtype)
    return shaped(y, x), x.new_empty(0) if s is None else shaped(s, x), rstd, keep


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, residual = call.x, call.residual
    taken = x if residual is None else residual
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=wide(taken.dtype))
    return x.new_empty(x.shape), s, rstd, fake_keep_mask(x, call.dropout, call.route)


def _save(call: _Call, outputs: tuple[Tensor, ...]) -> _Saved:
    _, s, rstd, keep = outputs
    joined = call.residual is not None
    return _Saved(s if joined else call.x, rstd, call.weight, keep, call.dropout, call.x.dtype, joined, call.route)


def _differentiate(
    saved: _Saved, wanted: _Call, dy: Tensor | None, ds: Tensor | None, _rstd: None, _keep: None
) -> Gradients:
    if dy is None:  # y went unused
        dy = saved.s.new_zeros(saved.s.shape, dtype=saved.dtype)
    dx, dresidual, dweight = _rms_norm_backward(dy, ds if saved.joined else None, saved)
    return {
        "x": dresidual if saved.one_gradient else dx,
        "residual": dresidual if saved.joined else None,
        "weight": None if saved.weight is None else dweight,
    }


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (empty where it equals residual's), of what was normalised, and of weight."""
    saved = call.saved
    s, weight, absent = saved.s, saved.weight, saved.s.new_empty(0)
    dy, ds, rows = as_rows(call.dy), None if call.ds is None else as_rows(call.ds), as_rows(s)
    if saved.route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        dx, dresidual, dweight, _, _ = kernel.backward(
            dy, None, ds, rows, None, saved.rstd, weight, None, None,
            x_dtype=None if saved.one_gradient else saved.dtype, **saved.dropout._asdict(),
        )  # fmt: skip
        return absent if dx is None else shaped(dx, s), shaped(dresidual, s), dweight
    dtype = wide(s.dtype)
    rstd = saved.rstd[:, None]
    gradient, normal = cast(dy, dtype), cast(rows, dtype) * rstd
    dweight = absent if weight is None else cast((gradient * normal).sum(0), weight.dtype)
    if weight is not None:
        gradient = gradient * weight
    total = gradient - normal * (gradient * normal).mean(-1, keepdim=True)
    total = total.mul_(rstd)
    if ds is not None:
        total += ds
    dresidual = cast(total, s.dtype)
    dx = absent if saved.one_gradient else branch_gradient(dresidual, saved.keep, saved.dropout, saved.dtype)
    return dx if dx is absent else shaped(dx, s), shaped(dresidual, s), dweight


def _fake_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor]:
    saved, s = call.saved, call.saved.s
    dx = s.new_empty(0) if saved.one_gradient else s.new_empty(s.shape, dtype=saved.dtype)
    return dx, s.new_empty(s.shape), s.new_empty(0) if saved.weight is None else torch.empty_like(saved.weight)


_rms_norm_backward = Operator(
    "rms_norm_backward", _Backward, "(Tensor, Tensor, Tensor)", _compute_backward, _fake_backward
)
_rms_norm = Operator(
    "rms_norm",
    _Call,
    "(Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    decide=_decide,
    save=_save,
    backward=_differentiate,
    rows=("x", "residual"),
    differentiable=2,
)
