"""Residual connection with dropout, without a norm (Vaswani et al. 2017, section 5.4)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional import backends
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.dropout import LEAST_P, draw_seed, dropout_for, empty_mask, keep_mask
from fasttfm.functional.operator import Operator, Whole, without_views
from fasttfm.functional.rows import add_kept, as_rows, branch_gradient, dense, shaped
from fasttfm.functional.signature import names_arguments


@names_arguments
def residual_add(
    x: Tensor, residual: Tensor, *, dropout_p: float = 0.0, seed: Tensor | None = None, site: int = 0
) -> Tensor:
    """residual + dropout(x), in residual's dtype: a residual connection without a norm.

    x, residual (..., N), whose dtypes may differ. dropout_p in [0, 1], rounded to 1/256; seed (1,) int64 on x's
    device, drawn from torch's generator if None; site, below 2^31, tells the dropouts of one model apart. Raises
    ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    if dropout_p <= LEAST_P:
        seed = None
        if dropout_p >= 0 and x.dtype is residual.dtype and x.shape == residual.shape != ():
            return residual + x
    elif seed is None:
        seed = draw_seed(x.device)
    return _residual_add(x, residual, dropout_p, seed, site, backends.current)[0]


class _Call(NamedTuple):
    x: Tensor
    residual: Tensor
    dropout_p: float
    seed: Whole | None
    """None: nothing is dropped."""
    site: int
    route: str


class _Saved(NamedTuple):
    keep: Tensor | None
    dropout_p: float
    seed: Whole | None
    site: int
    dtype: torch.dtype
    """x's."""
    route: str


class _Backward(NamedTuple):
    ds: Tensor
    saved: _Saved


def _checks(call: _Call) -> None:
    x, residual, *_ = call
    if x.shape != residual.shape or x.dim() == 0:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape (..., N)")
    dropout_for(x.device, call.dropout_p, call.seed, call.site)


def _plan(call: _Call) -> Callable[[_Call], tuple[Tensor, Tensor | None]]:
    """Compute residual + dropout(x), and the keep mask, None from a kernel."""
    if call.route == "torch":
        return without_views(_compute_by_torch, internal=1)
    from fasttfm.kernels.residual_add import Add

    add = Add(call.x.shape, call.x.device, call.dropout_p)

    def compute(call: _Call) -> tuple[Tensor, None]:
        x, residual, _, seed, site, _ = call
        return add(x, residual, torch.empty_like(residual), seed, site), None

    return dense(compute, call, 2)


def _compute_by_torch(call: _Call) -> tuple[Tensor, Tensor | None]:
    rows = as_rows(call.x)
    keep = keep_mask(rows, call)
    s = add_kept(rows, as_rows(call.residual), keep, call.dropout_p)
    return shaped(s, call.x), None if call.seed is None else keep


def _fake(call: _Call) -> tuple[Tensor, Tensor | None]:
    return call.residual.new_empty(call.x.shape), empty_mask(call)


def _plan_backward(call: _Backward) -> Callable[[_Backward], Tensor]:
    """Compute the gradient of x, dropout applied to ds."""
    if call.saved.route == "torch":
        return without_views(_compute_backward_by_torch)
    from fasttfm.kernels.residual_add import Add

    drop = Add(call.ds.shape, call.ds.device, call.saved.dropout_p)

    def compute(call: _Backward) -> Tensor:
        ds, (_, _, seed, site, dtype, _) = call
        return drop(ds, None, ds.new_empty(ds.shape, dtype=dtype), seed, site)

    return dense(compute, call, 1)


def _compute_backward_by_torch(call: _Backward) -> Tensor:
    ds, saved = call
    keep = ds.new_empty(0) if saved.keep is None else saved.keep
    return shaped(branch_gradient(as_rows(ds), keep, saved, saved.dtype), ds)


def _reference_backward(call: _Backward) -> Tensor:
    ds, (_, dropout_p, seed, site, dtype, _) = call
    return reference.dropout(ds, dropout_p, seed, site).to(dtype)


_residual_add_backward = Operator(
    "residual_add_backward", _Backward, "Tensor", _plan_backward,
    lambda call: call.ds.new_empty(call.ds.shape, dtype=call.saved.dtype), reference=_reference_backward,
)  # fmt: skip
OPERATOR = Operator(
    "residual_add", _Call, "(Tensor, Tensor)", _plan, _fake, checks=_checks,
    decide=lambda call: kernel_route(call.route, call.x, call.residual),
    save=lambda call, outputs: (outputs[1], *call[2:5], call.x.dtype, call.route), saved=_Saved,
    backward=lambda backward, saved, _, ds, *_keep: (backward(_residual_add_backward.record((ds, saved))), ds, None),
    derivative=_residual_add_backward, visible=1, rows=("x", "residual"), free=("site",),
)  # fmt: skip
_residual_add = OPERATOR.call
