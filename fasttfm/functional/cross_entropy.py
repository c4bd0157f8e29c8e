"""Label-smoothed cross entropy of logits (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4).

Two operators: one leaves the logits alone and computes its gradient when backward comes; the other, for inplace=True,
leaves the gradient in their memory while it computes the loss, and backward only scales it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import wide
from fasttfm.functional._layers import by_kernel
from fasttfm.functional._loss_rows import check, mean_factor, plain_gradient, refuse_second_derivative, sums
from fasttfm.functional._operators import Operator


def _unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def _forward_compute(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, mean: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return sums(_unit_stride(logits), target, label_smoothing, ignore_index, mean, overwrite=False, backend=backend)


def _backward_compute(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lses: Tensor,
    label_smoothing: float,
    ignore_index: int,
    mean: bool,
    backend: str,
) -> Tensor:
    logits = _unit_stride(logits)
    factor = mean_factor(logits, target, ignore_index, mean)
    factor = grad if factor is None else grad * factor
    if by_kernel(backend, logits):
        from fasttfm.kernels import cross_entropy as kernel

        return kernel.backward(
            factor, logits, target.contiguous(), lses, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
    counted = target != ignore_index
    all_counted = logits.device.type == "cpu" and bool(counted.all())
    return plain_gradient(logits, target, label_smoothing, counted=None if all_counted else counted, scale=factor)


def _consume_compute(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, mean: bool, backend: str
) -> tuple[Tensor, Tensor]:
    loss, nll, _ = sums(logits, target, label_smoothing, ignore_index, mean, overwrite=True, backend=backend)
    return loss, nll


def _scale_compute(gradient: Tensor, factor: Tensor, backend: str) -> None:
    if by_kernel(backend, gradient):
        from fasttfm.kernels import cross_entropy as kernel

        kernel.scale(gradient, factor)
    elif gradient.device.type != "cpu" or float(factor) != 1.0:
        gradient.mul_(factor)


def _sums_fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = wide(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty((), dtype=dtype)


def _forward_fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_sums_fake(logits), logits.new_empty(logits.shape[0], dtype=wide(logits.dtype))


def _save(ctx: Any, args: tuple, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    _, nll, lses = outputs
    ctx.mark_non_differentiable(nll, lses)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*args[:2], lses)
    ctx.options = args[2:]


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return (None,) * 6
    return _cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


def _consume_save(ctx: Any, args: tuple, outputs: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(outputs[1])
    ctx.set_materialize_grads(False)
    torch.autograd.graph.increment_version(args[0])  # whoever else saved the logits must hear that they are gone
    ctx.save_for_backward(args[0])
    ctx.consumed = False
    ctx.backend = args[-1]


def _consume_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return (None,) * 6
    if ctx.consumed:
        raise RuntimeError(
            "cross_entropy(inplace=True) was differentiated twice: its gradient, in the logits' memory, went out the "
            "first time; call it with inplace=False"
        )
    refuse_second_derivative("cross_entropy_consume")
    ctx.consumed = True
    gradient = ctx.saved_tensors[0].detach()
    _scale_gradient_(gradient, grad, ctx.backend)
    return gradient, *(None,) * 5


_cross_entropy_backward = Operator(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lses, float label_smoothing, "
    "int ignore_index, bool mean, str backend) -> Tensor",
    _backward_compute,
    lambda grad, logits, *_: logits.new_empty(logits.shape),
)

_scale_gradient_ = Operator(
    "scale_gradient_(Tensor(a!) gradient, Tensor factor, str backend) -> ()", _scale_compute, lambda *_: None
)

_cross_entropy = Operator(
    "cross_entropy(Tensor logits, Tensor target, float label_smoothing, int ignore_index, bool mean, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _forward_compute,
    _forward_fake,
    save=_save,
    backward=_backward,
)

_cross_entropy_consume = Operator(
    "cross_entropy_consume(Tensor(a!) logits, Tensor target, float label_smoothing, int ignore_index, bool mean, "
    "str backend) -> (Tensor, Tensor)",
    _consume_compute,
    _sums_fake,
    save=_consume_save,
    backward=_consume_backward,
)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy, as torch.nn.functional.cross_entropy defines it for class numbers.

    logits (M, V), target (M,) int64; rows whose target is ignore_index count nothing. reduction: mean over the counted
    rows (not a number when there are none) or sum. Statistics are float32 for half precision, also under autocast.
    inplace=True gives up the logits: when they ask for a gradient their memory holds it afterwards, and no second
    (M, V) tensor is made. Nothing else may read them then, and backward can be called once.
    Returns (loss, the loss without smoothing), 0-d; the second has no gradient.
    Raises ValueError for shapes that do not agree, another reduction, or inplace on logits whose rows are not dense.
    """
    check(target, label_smoothing)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must be (M, V) and (M,)")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}: choose mean or sum")
    options = (float(label_smoothing), ignore_index, reduction == "mean", chosen())
    if inplace and torch.is_grad_enabled() and logits.requires_grad:
        if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:
            raise ValueError(
                f"logits have strides {logits.stride()}: inplace=True needs rows of their own with stride 1; "
                "call .contiguous() before or leave inplace out"
            )
        return _cross_entropy_consume(logits, target, *options)
    loss, nll, _ = _cross_entropy(logits, target, *options)
    return loss, nll
