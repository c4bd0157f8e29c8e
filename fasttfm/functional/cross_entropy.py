"""Label-smoothed cross entropy of logits (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4).

Two operators: one computes its gradient in the backward pass; the other, for inplace=True, overwrites the logits with
their gradient while computing the loss, and the backward pass only scales it.
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
from fasttfm.functional.operator import Operator, Overwritten, Whole
from fasttfm.functional.signature import is_flag, names_arguments


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
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy, as torch.nn.functional.cross_entropy defines it for class indices.

    logits (M, V), target (M,) int64 or int32; rows whose target is ignore_index are ignored. reduction: mean over the
    counted rows (NaN if there are none), sum, or none: one loss per row, 0 for ignored ones. Statistics are float32 for
    half precision, also under autocast.
    class_weights (V,), torch's `weight`, and row_weights (M,), without gradients, multiply the losses; the mean is
    weighted. Class weights with label smoothing are computed by PyTorch's own function, at least in float32.
    inplace=True overwrites the logits with their gradient, if they require one, so that no second (M, V) tensor is
    allocated: nothing else may read them, and backward can be called once. Not with reduction none.
    Returns (loss, loss without smoothing), 0-d or (M,); the second has no gradient.
    Raises ValueError for shapes that do not agree, another reduction, or inplace on logits whose rows are not dense.
    """
    if target.dtype is torch.int32:
        target = target.long()
    is_flag("inplace", inplace)
    if inplace and reduction == "none":
        raise ValueError("reduction is 'none': inplace=True needs mean or sum; leave inplace out")
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
    rest = target, weights, float(label_smoothing), ignore_index, reduction, backends.current
    if inplace and torch.is_grad_enabled() and logits.requires_grad:
        loss, nll = _consume(logits.detach(), *rest)
        loss = _consumed(logits, loss, backends.current)
    else:
        loss, nll = _cross_entropy(logits, *rest)
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


def _check(call: _Call | _Consumed) -> None:
    logits, target = call.logits, call.target
    check(target, call.label_smoothing, call.reduction)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must be (M, V) and (M,)")
    check_classes("logits", logits)
    if isinstance(call, _Consumed) and (logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]):
        raise ValueError(
            f"logits have strides {logits.stride()}: inplace=True needs separate rows with stride 1; "
            "call .contiguous() before or leave inplace out"
        )


def _decide(call: _Call | _Consumed) -> str:
    return kernel_route(call.route, call.logits)


def _plan(call: _Call | _Consumed) -> Callable[[_Call | _Consumed], tuple[Tensor | None, ...]]:
    """Compute loss and loss without smoothing; unless in place also statistics and the factor of a mean."""
    overwrite = isinstance(call, _Consumed)
    losses, count = losses_of(*call, overwrite=overwrite), 2 if overwrite else 4
    return lambda call: losses(*call[:3])[:count]


def _fake(call: _Call | _Consumed) -> tuple[Tensor | None, ...]:
    logits, dtype = call.logits, wide(call.logits.dtype)
    shape = call.target.shape if call.reduction == "none" else ()
    losses = logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=dtype)
    if isinstance(call, _Consumed):
        return losses
    factor = logits.new_empty((), dtype=dtype) if call.reduction == "mean" else None
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
    "cross_entropy", _Call, "(Tensor, Tensor, Tensor, Tensor)", _plan, _fake, checks=_check, decide=_decide,
    save=lambda call, outputs: (
        *call[:2], outputs[3] if call.reduction == "mean" else call.weights, outputs[2], *call[3:5], call.route,
    ),
    saved=_Saved, derivative=_cross_entropy_backward, visible=2,
).call  # fmt: skip

# ------------------------------------------------------------------------------------------------------ inplace=True


class _Consumed(NamedTuple):
    logits: Overwritten
    target: Whole
    weights: Tensor | None
    label_smoothing: float
    ignore_index: int
    reduction: str
    route: str


class _Loss(NamedTuple):
    logits: Tensor
    """Overwritten by their gradient."""
    loss: Tensor
    route: str


class _Gradient(NamedTuple):
    logits: Tensor
    returned: list[bool]
    """Not empty once the gradient was returned."""
    route: str


class _Scaling(NamedTuple):
    gradient: Tensor
    factor: Tensor
    logits: Tensor
    """Links the graph to the logits: a second derivative, which would need them, raises, in place of silently treating
    the gradient as a constant."""


class _Scale(NamedTuple):
    factor: Tensor
    gradient: Overwritten
    route: str


def _save_gradient(call: _Loss, output: Tensor) -> tuple:
    torch.autograd.graph.increment_version(call.logits)  # other nodes that saved the logits must raise
    return call.logits, [], call.route


def _return_gradient(_: None, saved: _Gradient, needs_grad: _Loss, grad: Tensor) -> tuple[Tensor | None, None]:
    if saved.returned:
        raise RuntimeError(
            "cross_entropy(inplace=True) was differentiated twice: its gradient, in the logits' memory, was returned "
            "the first time; call it with inplace=False"
        )
    saved.returned.append(True)
    gradient = saved.logits.data  # not detach(): scaling must not bump the version of the saved logits
    if torch.is_grad_enabled():
        gradient = _scale_gradient(gradient, grad, saved.logits)
    else:
        _scale_gradient_(grad, gradient, saved.route)
    return gradient, None


def _plan_scaling(call: _Scale) -> Callable[[_Scale], None]:
    if call.route == "triton":
        from fasttfm.kernels import cross_entropy as kernel

        scale = kernel.Scale(call.gradient)
        return lambda call: scale(call.gradient, call.factor)

    def compute(call: _Scale) -> None:
        if not call.gradient.is_cpu or float(call.factor) != 1.0:
            call.gradient.mul_(call.factor)

    return compute


def _refuse_second(call: _Scaling) -> Tensor:
    raise RuntimeError(
        "cross_entropy(inplace=True) was differentiated twice: its gradient took the logits' memory; call it with "
        "inplace=False"
    )


_scale_gradient = Operator(
    "scale_gradient", _Scaling, "Tensor", lambda call: lambda call: call.gradient * call.factor.to(call.gradient.dtype),
    lambda call: torch.empty_like(call.gradient), reference=_refuse_second,
).call  # fmt: skip
_scale_gradient_ = Operator("scale_gradient_", _Scale, "()", _plan_scaling, lambda call: None).call
_consume = Operator(
    "cross_entropy_consume", _Consumed, "(Tensor, Tensor)", _plan, _fake, checks=_check, decide=_decide
).call
_consumed = Operator(
    "cross_entropy_consumed", _Loss, "Tensor", lambda call: lambda call: call.loss.clone(),
    lambda call: torch.empty_like(call.loss), save=_save_gradient, saved=_Gradient, backward=_return_gradient,
).call  # fmt: skip
