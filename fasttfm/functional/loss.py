"""Cross entropy over rows of logits, by kernel or in plain PyTorch, for both loss operators.

loss = sum over counted rows of  lse - (1 - a) x[target] - a / V * sum over v of x[v]        lse = log sum exp x
d loss / d x[v] = softmax(x)[v] - a / V - (1 - a) [v == target]
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fasttfm.cpu import training_passes
from fasttfm.functional.dropout import wide
from fasttfm.functional.record import WHOLE

LOSS_BLOCK = 1 << 19
"""Float32 logits per block on a CPU: 2 MiB, the L2 caches of two cores. Chosen, not measured."""


def check(target: Tensor, label_smoothing: float, reduction: str) -> None:
    """Check the arguments that all losses share. Raises ValueError."""
    if target.dtype not in WHOLE:
        raise ValueError(f"target is {target.dtype}: it must hold int64 or int32 class indices")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} must lie in [0, 1]")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: choose mean, sum or none")


def weights_of_rows(
    target: Tensor, classes: int, dtype: torch.dtype, ignore_index: int, class_weights: Tensor | None,
    row_weights: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Factor of each row's loss, like target (M,), 0 for ignored rows; None without weights.

    Raises ValueError for weights of another shape, or that require a gradient.
    """
    result = None
    named = ("class_weights", class_weights, (classes,)), ("row_weights", row_weights, target.shape)
    for name, weights, shape in named:
        if weights is None:
            continue
        if weights.shape != shape or not weights.is_floating_point():
            raise ValueError(f"{name} is {tuple(weights.shape)} of {weights.dtype}: it must be {tuple(shape)} floats")
        if weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, but has none: multiply the losses of reduction='none'")
        if weights.device != target.device:
            raise ValueError(f"{name} is on {weights.device}, target on {target.device}: move one of them")
        factor = (weights if weights is row_weights else weights[target.clamp(0, classes - 1)]).to(wide(dtype))
        result = factor if result is None else result * factor
    return None if result is None else result.masked_fill(target == ignore_index, 0.0)


def check_classes(name: str, x: Tensor, dim: int = 1) -> None:
    """Raise ValueError if there are no classes."""
    if x.shape[dim] == 0:
        raise ValueError(f"{name} {tuple(x.shape)} has no classes: at least one is needed")


def _blocks(logits: Tensor, target: Tensor, counted: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor, Any]]:
    """Yield blocks of rows that fit the CPU's cache; one block elsewhere.

    A block: its slice, its logits, at least float32, its target as a column of valid indices, and its ignored rows as a
    column, None if there are none.
    """
    rows, columns = logits.shape
    dtype = wide(logits.dtype)
    step = max(1, min(rows, LOSS_BLOCK // max(1, columns))) if logits.device.type == "cpu" else max(1, rows)
    memory = torch.empty(step, columns, dtype=dtype, device=logits.device) if logits.dtype != dtype else None
    for r in range(0, rows, step):
        part = slice(r, r + step)
        x, t = logits[part], target[part, None]
        x = x if memory is None else memory[: x.shape[0]].copy_(x)
        left = None if counted is None else ~counted[part, None]
        yield part, x, t if left is None else t.masked_fill(left, 0), left


def _picked(x: Tensor, t: Tensor) -> Tensor:
    """x (R, V) at the classes t (R, 1). Raises ValueError for a class out of range, if PyTorch detects it."""
    try:
        return x.gather(1, t)[:, 0]
    except RuntimeError:
        _check_range(x, t)
        raise


def _check_range(x: Tensor, t: Tensor) -> None:
    """Raise ValueError for classes t out of range for x (R, V)."""
    wrong = t[(t < 0) | (t >= x.shape[1])]
    if wrong.numel():
        raise ValueError(
            f"target holds {int(wrong[0])}: classes are numbered from 0 to {x.shape[1] - 1}, "
            "and ignored rows hold ignore_index"
        ) from None


def _loop_target(logits: Tensor, target: Tensor, counted: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """The target for the compiled CPU loop, with class 0 for ignored rows; None if the loop does not apply."""
    scalar = scale is None or not scale.dim()
    if not (training_passes.takes(logits) and type(target) is Tensor and logits.is_contiguous() and scalar):
        return None
    target = target if counted is None else target.masked_fill(~counted, 0)
    _check_range(logits, target)
    return target.contiguous()


def _gradient_(p: Tensor, t: Tensor, label_smoothing: float, scale: Tensor | None, left: Tensor | None) -> Tensor:
    """scale * d loss / d logits from the softmax p of some rows, in place."""
    if label_smoothing:
        p -= label_smoothing / p.shape[1]
    p.scatter_add_(1, t, torch.full_like(t, label_smoothing - 1.0, dtype=p.dtype))
    if scale is not None:
        p *= scale
    return p if left is None else p.masked_fill_(left, 0.0)


def plain(
    logits: Tensor, target: Tensor, scale: Tensor | None, *, label_smoothing: float, ignore_index: int, overwrite: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses (2, R) of logits (R, V), with and without smoothing, at least float32; and statistics (2, R): each row's
    largest logit and its probability.

    overwrite: the logits become scale * d loss / d logits, scale () or (R,), and statistics are None. On the CPU each
    block of rows goes through all steps while it is cached.
    """
    counted = counted_rows(target, ignore_index)
    if (classes := _loop_target(logits, target, counted, scale)) is not None:
        gradient = logits if overwrite else None
        losses, row_stats = training_passes.cross_entropy(logits, classes, counted, label_smoothing, scale, gradient)
        return losses, None if overwrite else row_stats
    losses = logits.new_empty((2, len(logits)), dtype=wide(logits.dtype))
    statistics = None if overwrite else torch.empty_like(losses)
    weights: Tensor | None = None
    for part, x, t, left in _blocks(logits, target, counted):
        weights = torch.empty_like(x) if weights is None else weights
        p = torch.softmax(x, dim=1, out=weights[: x.shape[0]])
        # The log-sum-exp is top - log(share), kept as two terms: their sum would be rounded like the logits.
        top, share = x.amax(dim=1), p.amax(dim=1)
        logarithm = -share.log()
        row_nll = logarithm + (top - _picked(x, t))
        row_loss = row_nll
        if label_smoothing:
            spread = logarithm + (top - x.mean(dim=1))
            row_loss = (1.0 - label_smoothing) * row_nll + label_smoothing * spread  # never inf - inf
        for result, each in zip(losses, (row_loss, row_nll)):
            result[part] = each if left is None else each.masked_fill(left[:, 0], 0.0)
        if statistics is None:
            logits[part] = _gradient_(p, t, label_smoothing, _part(scale, part), left)
        else:
            statistics[0, part], statistics[1, part] = top, share
    return losses, statistics


def _part(scale: Tensor | None, part: slice) -> Tensor | None:
    """The part of a scale () or (R,) for some rows, broadcastable to their logits."""
    return scale if scale is None or not scale.dim() else scale[part, None]


def counted_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """Mask of the rows that count, (R,) bool; None if all do, which is only known on a CPU."""
    counted = target != ignore_index
    readable = target.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if readable and bool(counted.all()) else counted


def plain_gradient(
    scale: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, *, label_smoothing: float, ignore_index: int
) -> Tensor:
    """scale * d loss / d logits, like logits; scale () or (R,); statistics from plain()."""
    counted = counted_rows(target, ignore_index)
    if (classes := _loop_target(logits, target, counted, scale)) is not None:
        return training_passes.cross_entropy_gradient(logits, classes, counted, label_smoothing, scale, statistics)
    gradient = logits.new_empty(logits.shape)
    weights: Tensor | None = None  # a float32 buffer for a half-precision gradient
    for part, x, t, left in _blocks(logits, target, counted):
        if x.dtype == gradient.dtype:
            memory = gradient[part]
        else:
            weights = torch.empty_like(x) if weights is None else weights
            memory = weights[: x.shape[0]]
        p = _gradient_(torch.softmax(x, dim=1, out=memory), t, label_smoothing, _part(scale, part), left)
        if weights is not None:
            gradient[part] = p
    return gradient


def mean_factor(target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """One over the number of counted rows, 0-d; NaN if there are none, as in torch."""
    rows = (target != ignore_index).sum(dtype=dtype)
    return torch.where(rows > 0, rows.reciprocal(), float("nan"))


def side_by_side(logits: Tensor) -> bool:
    """Return whether the logits of a row are adjacent in memory."""
    return logits.stride(1) == 1 or logits.shape[1] <= 1


def losses_of(
    logits: Tensor, target: Tensor, weights: Tensor | None, label_smoothing: float, ignore_index: int, reduction: str,
    route: str, *, overwrite: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:  # fmt: skip
    """Plan losses of one signature, as a function of logits (M, V), target (M,) and row weights, (M,) or None.

    It returns loss and loss without smoothing, 0-d or with reduction none (M,); statistics (2, M) as in plain(), None
    with overwrite, which leaves the gradient in the logits' memory; and the factor of a mean, 0-d, or None. Planning
    reads only shape and strides of logits. A mean has no weights. route: triton or torch.
    """
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "overwrite": overwrite}
    forward: Callable[..., tuple[Tensor, Tensor | None]] = functools.partial(plain, **options)
    dense, dense_target = side_by_side(logits), target.is_contiguous()
    if route == "triton":
        from fasttfm.kernels import cross_entropy as kernel

        like = logits if dense else logits.new_empty(logits.shape)
        forward = kernel.Forward(like, target, factor_step=int(weights is not None), **options)

    def losses(logits: Tensor, target: Tensor, weights: Tensor | None) -> tuple[Any, ...]:
        factor = mean_factor(target, ignore_index, wide(logits.dtype)) if reduction == "mean" else None
        logits, target = logits if dense else logits.contiguous(), target if dense_target else target.contiguous()
        rows, statistics = forward(logits, target, weights if factor is None else factor)
        if weights is not None:
            rows = rows * weights
        if reduction != "none":
            rows = rows.sum(1)
        if factor is not None:
            rows = rows * factor
        loss, nll = rows.unbind()
        return loss.detach(), nll.detach(), statistics, factor

    return losses


def differentiable_losses(
    logits: Tensor, target: Tensor, factor: Tensor | None, label_smoothing: float, ignore_index: int,
    class_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """factor times the loss of each row, in twice differentiable PyTorch."""
    x = logits.to(wide(logits.dtype))
    losses = torch.nn.functional.cross_entropy(
        x, target, None if class_weights is None else class_weights.to(x.dtype), ignore_index=ignore_index,
        reduction="none", label_smoothing=label_smoothing,
    )  # fmt: skip
    return losses if factor is None else losses * factor.to(x.dtype)
