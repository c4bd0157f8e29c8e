"""Label-smoothed cross entropy of logits (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4).

Two operators: one leaves the logits alone and computes its gradient when backward comes; the other, for inplace=True,
leaves the gradient in their memory while it computes the loss, and backward only scales it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.dropout import wide
from fasttfm.functional.loss import (
    check,
    check_classes,
    counted_rows,
    differentiable_loss,
    losses_of,
    mean_factor,
    plain_gradient,
    weights_of_rows,
)
from fasttfm.functional.operator import Gradients, Operator, Overwritten, Whole, unplanned
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
    """Label-smoothed cross entropy, as torch.nn.functional.cross_entropy defines it for class numbers.

    logits (M, V), target (M,) int64 or int32; rows whose target is ignore_index count nothing. reduction: mean over the
    counted rows (not a number when there are none), sum, or none: a loss for each row, 0 where it is ignored.
    Statistics are float32 for half precision, also under autocast.
    class_weights (V,), torch's `weight`, and row_weights (M,), without gradients, multiply the losses; the mean is
    weighted. Class weights beside label smoothing are computed by PyTorch's own function, in float32 at least.
    inplace=True gives up the logits: when they ask for a gradient their memory holds it afterwards, and no second
    (M, V) tensor is made. Nothing else may read them then, and backward can be called once; not with reduction none.
    Returns (loss, the loss without smoothing), 0-d or (M,); the second has no gradient.
    Raises ValueError for shapes that do not agree, another reduction, or inplace on logits whose rows are not dense.
    """
    target = check(target, label_smoothing, reduction)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must be (M, V) and (M,)")
    check_classes("logits", logits)
    is_flag("inplace", inplace)
    if inplace and reduction == "none":
        raise ValueError("reduction is 'none': inplace=True needs mean or sum; leave inplace out")
    weights = weights_of_rows(target, logits.shape[1], logits.dtype, ignore_index, class_weights, row_weights)
    if weights is not None and class_weights is not None and label_smoothing:
        given = {"ignore_index": ignore_index, "class_weights": class_weights, "row_weights": row_weights}
        _, nll = cross_entropy(logits.detach(), target, reduction=reduction, **given)  # type: ignore[arg-type]
        loss = _smoothed_by_class(logits, target, class_weights, row_weights, label_smoothing, ignore_index)
        if reduction != "none":
            loss = loss.sum() / (weights.sum() if reduction == "mean" else 1.0)
        return loss, nll
    total = None
    if weights is not None and reduction == "mean":
        total, reduction = weights.sum(), "sum"
        weights = weights / total
    options = _Loss(float(label_smoothing), ignore_index, reduction)
    if inplace and torch.is_grad_enabled() and logits.requires_grad:
        if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:
            raise ValueError(
                f"logits have strides {logits.stride()}: inplace=True needs separate rows with stride 1; "
                "call .contiguous() before or leave inplace out"
            )
        loss, nll = _cross_entropy_consume(logits, target, weights, options, chosen())
    else:
        loss, nll, _ = _cross_entropy(logits, target, weights, options, chosen())
    if total is not None:  # where there is no row, whose weight would say it, the mean is not a number either
        nothing = torch.zeros_like(total) / total
        loss, nll = loss + nothing, nll + nothing
    return loss, nll


def _smoothed_by_class(
    logits: Tensor, target: Tensor, class_weights: Tensor, row_weights: Tensor | None, smoothing: float, ignored: int
) -> Tensor:
    """The loss of each row, smoothed over classes that weigh differently, by PyTorch."""
    x = logits.to(wide(logits.dtype))
    loss = torch.nn.functional.cross_entropy(
        x, target, class_weights.to(x.dtype), ignore_index=ignored, reduction="none", label_smoothing=smoothing
    )
    return loss if row_weights is None else loss * row_weights.to(x.dtype)


class _Loss(NamedTuple):
    label_smoothing: float
    ignore_index: int
    reduction: str


class _Call(NamedTuple):
    logits: Tensor
    target: Whole
    weights: Tensor | None
    loss: _Loss
    route: str


class _Saved(NamedTuple):
    call: _Call
    statistics: Tensor
    """(2, M): each row's largest logit and its probability."""


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


def _decide(call: _Call | _Consumed) -> str:
    return kernel_route(call.route, call.logits)


def _unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    return losses_of(
        _unit_stride(call.logits), call.target, call.weights, *call.loss, overwrite=False, route=call.route
    )


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    statistics = call.logits.new_empty(2, call.logits.shape[0], dtype=wide(call.logits.dtype))
    return *_fake_sums(call), statistics


def _fake_sums(call: _Call | _Consumed) -> tuple[Tensor, Tensor]:
    logits, dtype = call.logits, wide(call.logits.dtype)
    shape = call.target.shape if call.loss.reduction == "none" else ()
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=dtype)


def _compute_backward(call: _Backward) -> Tensor:
    grad, ((logits, target, weights, loss, route), statistics) = call
    logits = _unit_stride(logits)
    factor = mean_factor(logits, target, loss.ignore_index, loss.reduction) if weights is None else weights
    factor = grad.contiguous() if factor is None else grad * factor
    if route == "triton":
        from fasttfm.kernels import cross_entropy as kernel

        options: dict[str, Any] = {"label_smoothing": loss.label_smoothing, "ignore_index": loss.ignore_index}
        return kernel.backward(factor, logits, target.contiguous(), statistics, **options)
    counted = counted_rows(target, loss.ignore_index)
    return plain_gradient(logits, target, loss.label_smoothing, counted=counted, scale=factor, statistics=statistics)


def _by_reference(call: _Call) -> Tensor:
    return differentiable_loss(call.logits, call.target, call.weights, *call.loss)


_cross_entropy_backward = Operator(
    "cross_entropy_backward",
    _Backward,
    "Tensor",
    unplanned(_compute_backward),
    lambda call: call.saved.call.logits.new_empty(call.saved.call.logits.shape),
    reference=lambda call: pulled_back(_by_reference, call.saved.call, ("logits",), call.grad)[0],
).call
_cross_entropy = Operator(
    "cross_entropy",
    _Call,
    "(Tensor, Tensor, Tensor)",
    unplanned(_compute, 1),
    _fake,
    decide=_decide,
    save=lambda call, outputs: (call, outputs[2]),
    saved=_Saved,
    backward=lambda saved, _, grad, *_others: {"logits": _cross_entropy_backward(grad, saved)},
).call

# ------------------------------------------------------------------------------------------------------ inplace=True


class _Consumed(NamedTuple):
    logits: Overwritten
    target: Whole
    weights: Tensor | None
    loss: _Loss
    route: str


class _Gradient(NamedTuple):
    logits: Tensor
    """Whose memory holds the gradient."""
    returned: list[bool]
    """Not empty once it went out."""
    route: str


class _Scaling(NamedTuple):
    gradient: Tensor
    factor: Tensor
    logits: Tensor
    """Through which what was differentiated can be reached: a second derivative, for which the logits are gone, ends in
    a message, where the gradient would silently count as a constant."""


class _Scale(NamedTuple):
    gradient: Overwritten
    factor: Tensor
    route: str


def _consume(call: _Consumed) -> tuple[Tensor, Tensor]:
    loss, nll, _ = losses_of(call.logits, call.target, call.weights, *call.loss, overwrite=True, route=call.route)
    return loss, nll


def _save_gradient(call: _Consumed, outputs: tuple[Tensor, Tensor]) -> _Gradient:
    torch.autograd.graph.increment_version(call.logits)  # whoever else saved the logits must hear that they are gone
    return _Gradient(call.logits, [], call.route)


def _return_gradient(saved: _Gradient, wanted: _Consumed, grad: Tensor, _: None) -> Gradients:
    if saved.returned:
        raise RuntimeError(
            "cross_entropy(inplace=True) was differentiated twice: its gradient, in the logits' memory, went out the "
            "first time; call it with inplace=False"
        )
    saved.returned.append(True)
    gradient = saved.logits.data  # not detach(): scaling must not count as a change of the saved logits
    if torch.is_grad_enabled():
        return {"logits": _scale_gradient(gradient, grad, saved.logits)}
    _scale_gradient_(gradient, grad, saved.route)
    return {"logits": gradient}


def _scale_in_place(call: _Scale) -> None:
    if call.route == "triton":
        from fasttfm.kernels import cross_entropy as kernel

        kernel.scale(call.gradient, call.factor)
    elif call.gradient.device.type != "cpu" or float(call.factor) != 1.0:
        call.gradient.mul_(call.factor)


def _refuse_second(call: _Scaling) -> Tensor:
    raise RuntimeError(
        "cross_entropy(inplace=True) was differentiated twice: its gradient took the logits' memory; call it with "
        "inplace=False"
    )


_scale_gradient = Operator(
    "scale_gradient",
    _Scaling,
    "Tensor",
    unplanned(lambda call: call.gradient * call.factor.to(call.gradient.dtype)),
    lambda call: torch.empty_like(call.gradient),
    reference=_refuse_second,
).call
_scale_gradient_ = Operator("scale_gradient_", _Scale, "()", unplanned(_scale_in_place), lambda call: None).call
_cross_entropy_consume = Operator(
    "cross_entropy_consume",
    _Consumed,
    "(Tensor, Tensor)",
    unplanned(_consume),
    _fake_sums,
    decide=_decide,
    save=_save_gradient,
    backward=_return_gradient,
).call
