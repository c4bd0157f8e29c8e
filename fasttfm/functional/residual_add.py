"""The residual connection on its own (Vaswani et al. 2017, section 5.4), where no LayerNorm follows it."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.dropout import Dropout, dropout_for, fake_keep_mask, keep_mask
from fasttfm.functional.operator import Operator, unplanned
from fasttfm.functional.rows import add_kept, as_rows, branch_gradient, shaped
from fasttfm.functional.signature import names_arguments


@names_arguments
def residual_add(
    x: Tensor, residual: Tensor, *, dropout_p: float = 0.0, seed: Tensor | None = None, site: int = 0
) -> Tensor:
    """residual + dropout(x), in residual's dtype: a residual connection that no LayerNorm follows.

    x, residual (..., N), their dtypes may differ. dropout_p in [0, 1], rounded to 1/256; seed (1,) int64 on x's
    device, drawn from torch's generator when None; site, below 2^31, tells the dropouts of one model apart. Raises
    ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    if x.shape != residual.shape or x.dim() == 0:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape (..., N)")
    dropout = dropout_for(x.device, dropout_p, seed, site)
    if dropout.seed is None and x.dtype == residual.dtype:
        return residual + x
    return _residual_add(x, residual, dropout, chosen())[0]


class _Call(NamedTuple):
    x: Tensor
    residual: Tensor
    dropout: Dropout
    route: str


class _Saved(NamedTuple):
    keep: Tensor
    dropout: Dropout
    dtype: torch.dtype
    route: str


class _Backward(NamedTuple):
    ds: Tensor
    saved: _Saved


def _compute(call: _Call) -> tuple[Tensor, Tensor]:
    x, residual = as_rows(call.x), as_rows(call.residual)
    if call.route == "triton":
        from fasttfm.kernels import residual_add as kernel

        s = kernel.residual_add(x, residual, **call.dropout._asdict())
        keep = x.new_empty(0, dtype=torch.bool)
    else:
        keep = keep_mask(x, call.dropout)
        s = add_kept(x, residual, keep, call.dropout.dropout_p)
    return shaped(s, call.x), keep


def _compute_backward(call: _Backward) -> Tensor:
    ds, saved = as_rows(call.ds), call.saved
    if saved.route == "triton":
        from fasttfm.kernels import residual_add as kernel

        return shaped(kernel.dropout(ds, dtype=saved.dtype, **saved.dropout._asdict()), call.ds)
    return shaped(branch_gradient(ds, saved.keep, saved.dropout, saved.dtype), call.ds)


_residual_add_backward = Operator(
    "residual_add_backward",
    _Backward,
    "Tensor",
    unplanned(_compute_backward),
    lambda call: call.ds.new_empty(call.ds.shape, dtype=call.saved.dtype),
    reference=lambda call: reference.dropout(call.ds, *call.saved.dropout).to(call.saved.dtype),
).call
_residual_add = Operator(
    "residual_add",
    _Call,
    "(Tensor, Tensor)",
    unplanned(_compute, 1),
    lambda call: (call.residual.new_empty(call.x.shape), fake_keep_mask(call.x, call.dropout, call.route)),
    decide=lambda call: kernel_route(call.route, call.x, call.residual),
    save=lambda call, outputs: (outputs[1], call.dropout, call.x.dtype, call.route),
    saved=_Saved,
    backward=lambda saved, _, ds, *_keep: {"x": _residual_add_backward(ds, saved), "residual": ds},
    rows=("x", "residual"),
).call
