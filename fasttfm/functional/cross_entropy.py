"""Label-smoothed cross entropy of logits (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4).

It keeps the logits for their gradient; linear_cross_entropy never holds those of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.dropout import wide
from fasttfm.functional.loss import (
    check,
    check_classes,
    differentiable_losses,
    losses_of,
    plain_gradient,
    side_by_side,
    weights_of_rows,
)
from fasttfm.functional.operator import Operator, Whole
from fasttfm.functional.signature import names_arguments


@names_arguments
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    class_weights: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy, as torch.nn.functional.cross_entropy defines it for class indices.

    logits (M, V), target (M,) int64 or int32; rows whose target is ignore_index are ignored. reduction: mean over the
    counted rows (NaN if there are none), sum, or none: one loss per row, 0 for ignored ones. Statistics are float32 for
    half precision, also under autocast.
    class_weights (V,), torch's `weight`, and row_weights (M,), without gradients, multiply the losses; the mean is
    weighted. Class weights with label smoothing are computed by PyTorch's own function, at least in float32.
    Returns (loss, loss without smoothing), 0-d or (M,); the second has no gradient.
    Raises ValueError for shapes that do not agree, or another reduction.
    """
    if target.dtype is torch.int32:
        target = target.long()
    total = weights = None
    if class_weights is not None or row_weights is not None:
        _check(_Call(logits, target, None, label_smoothing, ignore_index, reduction, ""))
        weights = weights_of_rows(target, logits.shape[1], logits.dtype, ignore_index, class_weights, row_weights)
        assert weights is not None
        if class_weights is not None and label_smoothing:
            options = {"ignore_index": ignore_index, "class_weights": class_weights, "row_weights": row_weights}
            _, nll = cross_entropy(logits.detach(), target, reduction=reduction, **options)  # type: ignore[arg-type]
            loss = differentiable_losses(logits, target, row_weights, label_smoothing, ignore_index, class_weights)
            if reduction != "none":
                loss = loss.sum() / (weights.sum() if reduction == "mean" else 1.0)
            return loss, nll
        if reduction == "mean":
            total, reduction = weights.sum(), "sum"
            weights = weights / total
    numbers = float(label_smoothing), ignore_index, reduction, backends.current
    loss, nll = _cross_entropy(logits, target, weights, *numbers)
    if total is not None:  # a mean without weight is NaN, even if there is no row
        zero_or_nan = torch.zeros_like(total) / total
        loss, nll = loss + zero_or_nan, nll + zero_or_nan
    return loss, nll


class _Call(NamedTuple):
    logits: Tensor
    target: Whole
    weights: Tensor | None
    label_smoothing: float
    ignore_index: int
    reduction: str
    route: str


class _Saved(NamedTuple):
    logits: Tensor
    target: Whole
    factor: Tensor | None
    """Factor of the losses, () for a mean or (M,)."""
    statistics: Tensor
    """(2, M): each row's largest logit and its probability."""
    label_smoothing: float
    ignore_index: int
    route: str


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


def _check(call: _Call) -> None:
    logits, target = call.logits, call.target
    check(target, call.label_smoothing, call.reduction)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must be (M, V) and (M,)")
    check_classes("logits", logits)


def _plan(call: _Call) -> Callable[[_Call], tuple[Tensor | None, ...]]:
    losses = losses_of(*call, overwrite=False)
    return lambda call: losses(*call[:3])


def _fake(call: _Call) -> tuple[Tensor | None, ...]:
    logits, dtype = call.logits, wide(call.logits.dtype)
    shape = call.target.shape if call.reduction == "none" else ()
    factor = logits.new_empty((), dtype=dtype) if call.reduction == "mean" else None
    losses = logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=dtype)
    return *losses, logits.new_empty(2, logits.shape[0], dtype=dtype), factor


def _plan_backward(call: _Backward) -> Callable[[_Backward], Tensor]:
    grad, (logits, target, factor, _, label_smoothing, ignore_index, route) = call
    dense, dense_target, dense_grad = side_by_side(logits), target.is_contiguous(), grad.is_contiguous()
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    gradient: Callable[..., Tensor] = functools.partial(plain_gradient, **options)
    if route == "triton":
        from fasttfm.kernels import cross_entropy as kernel

        step = (grad if factor is None else grad * factor).dim()
        gradient = kernel.Backward(logits if dense else logits.contiguous(), factor_step=step, **options)

    def compute(call: _Backward) -> Tensor:
        grad, (logits, target, factor, statistics, *_) = call
        scale = grad * factor if factor is not None else grad if dense_grad else grad.contiguous()
        logits, target = logits if dense else logits.contiguous(), target if dense_target else target.contiguous()
        return gradient(scale, logits, target, statistics)

    return compute


def _reference_backward(call: _Backward) -> Tensor:
    def losses(saved: _Saved) -> Tensor:
        logits, target, factor, _, label_smoothing, ignore_index, _ = saved
        each = differentiable_losses(logits, target, factor, label_smoothing, ignore_index)
        return each if call.grad.dim() else each.sum()

    return pulled_back(losses, call.saved, ("logits",), call.grad)[0]


_cross_entropy_backward = Operator(
    "cross_entropy_backward", _Backward, "Tensor", _plan_backward,
    lambda call: call.saved.logits.new_empty(call.saved.logits.shape), reference=_reference_backward,
)  # fmt: skip
_cross_entropy = Operator(
    "cross_entropy", _Call, "(Tensor, Tensor, Tensor, Tensor)", _plan, _fake, checks=_check,
    decide=lambda call: kernel_route(call.route, call.logits),
    save=lambda call, outputs: (
        *call[:2], outputs[3] if call.reduction == "mean" else call.weights, outputs[2], *call[3:5], call.route,
    ),
    saved=_Saved, derivative=_cross_entropy_backward, visible=2,
).call  # fmt: skip
