"""Cross entropy over rows of logits, by kernel or in plain PyTorch: what both loss operators compute with.

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
"""Logits that a loss works on in float32 at a time on a CPU: 2 MiB, the second-level caches of two cores. Chosen, not
measured."""


def check(target: Tensor, label_smoothing: float, reduction: str) -> None:
    """Raises ValueError for what no loss takes."""
    if target.dtype not in WHOLE:
        raise ValueError(f"target is {target.dtype}: it must hold int64 or int32 class numbers")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} must lie in [0, 1]")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: choose mean, sum or none")


def weights_of_rows(
    target: Tensor, classes: int, dtype: torch.dtype, ignore_index: int, class_weights: Tensor | None,
    row_weights: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Factor of each row's loss, like target (M,), 0 where it is ignored; None for 1 everywhere.

    Raises ValueError for weights of another shape or that ask for a gradient.
    """
    result = None
    given = ("class_weights", class_weights, (classes,)), ("row_weights", row_weights, target.shape)
    for name, weights, shape in given:
        if weights is None:
            continue
        if weights.shape != shape or not weights.is_floating_point():
            raise ValueError(f"{name} is {tuple(weights.shape)} of {weights.dtype}: it must be {tuple(shape)} floats")
        if weights.requires_grad:
            raise ValueError(f"{name} asks for a gradient, which it has not: weight what reduction='none' returns")
        if weights.device != target.device:
            raise ValueError(f"{name} is on {weights.device}, target on {target.device}: move one of them")
        each = (weights if weights is row_weights else weights[target.clamp(0, classes - 1)]).to(wide(dtype))
        result = each if result is None else result * each
    return None if result is None else result.masked_fill(target == ignore_index, 0.0)


def check_classes(name: str, x: Tensor, dim: int = 1) -> None:
    """Raises ValueError where there are rows and no class that could be theirs."""
    if x.shape[dim] == 0:
        raise ValueError(f"{name} {tuple(x.shape)} has no classes: at least one is needed")


def _blocks(logits: Tensor, target: Tensor, counted: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor, Any]]:
    """Rows that fit the CPU's cache (all of them elsewhere): where they lie, the logits in float32 at least, the target
    as a column that may be gathered with, and which rows do not count, as a column (None where all do).
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
    """x (R, V) at the classes t (R, 1). Raises ValueError for a class that does not exist, where PyTorch notices."""
    try:
        return x.gather(1, t)[:, 0]
    except RuntimeError:
        _check_numbers(x, t)
        raise


def _check_numbers(x: Tensor, t: Tensor) -> None:
    """Raise ValueError for classes t of x (R, V) that do not exist."""
    wrong = t[(t < 0) | (t >= x.shape[1])]
    if wrong.numel():
        raise ValueError(
            f"target holds {int(wrong[0])}: classes are numbered from 0 to {x.shape[1] - 1}, "
            "and rows that do not count hold ignore_index"
        ) from None


def _for_pass(logits: Tensor, target: Tensor, counted: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """The target as a pass takes it, where one is taken, with class 0 for rows that do not count."""
    whole = scale is None or not scale.dim()
    if not (training_passes.takes(logits) and type(target) is Tensor and logits.is_contiguous() and whole):
        return None
    target = target if counted is None else target.masked_fill(~counted, 0)
    _check_numbers(logits, target)
    return target.contiguous()


def _gradient_(p: Tensor, t: Tensor, label_smoothing: float, scale: Tensor | None, left: Tensor | None) -> Tensor:
    """scale * d loss / d logits from the softmax p of some rows, in p's memory."""
    if label_smoothing:
        p -= label_smoothing / p.shape[1]
    p.scatter_add_(1, t, torch.full_like(t, label_smoothing - 1.0, dtype=p.dtype))
    if scale is not None:
        p *= scale
    return p if left is None else p.masked_fill_(left, 0.0)


def plain(
    logits: Tensor, target: Tensor, scale: Tensor | None, *, label_smoothing: float, ignore_index: int, overwrite: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses (2, R) of logits (R, V), with smoothing and without, in float32 at least, and each row's largest logit and
    its probability, (2, R).

    overwrite: the logits receive scale * d loss / d logits, scale () or (R,), and the second is None. On the CPU a
    block of rows goes through every step while it lies in the cache.
    """
    counted = counted_rows(target, ignore_index)
    if (classes := _for_pass(logits, target, counted, scale)) is not None:
        gradient = logits if overwrite else None
        losses, of_rows = training_passes.cross_entropy(logits, classes, counted, label_smoothing, scale, gradient)
        return losses, None if overwrite else of_rows
    losses = logits.new_empty((2, len(logits)), dtype=wide(logits.dtype))
    statistics = None if overwrite else torch.empty_like(losses)
    weights: Tensor | None = None
    for part, x, t, left in _blocks(logits, target, counted):
        weights = torch.empty_like(x) if weights is None else weights
        p = torch.softmax(x, dim=1, out=weights[: x.shape[0]])
        # top - log(share) is the logarithm of the sum of exponentials; formed, it would be rounded as the logits are.
        top, share = x.amax(dim=1), p.amax(dim=1)
        logarithm = -share.log()
        row_nll = logarithm + (top - _picked(x, t))
        row_loss = row_nll
        if label_smoothing:
            spread = logarithm + (top - x.mean(dim=1))
            row_loss = (1.0 - label_smoothing) * row_nll + label_smoothing * spread  # inf - inf is formed nowhere
        for result, each in zip(losses, (row_loss, row_nll)):
            result[part] = each if left is None else each.masked_fill(left[:, 0], 0.0)
        if statistics is None:
            logits[part] = _gradient_(p, t, label_smoothing, _of_rows(scale, part), left)
        else:
            statistics[0, part], statistics[1, part] = top, share
    return losses, statistics


def _of_rows(scale: Tensor | None, part: slice) -> Tensor | None:
    """A scale () or (R,) beside the logits of some rows."""
    return scale if scale is None or not scale.dim() else scale[part, None]


def counted_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the rows that count, (R,) bool; None where all do and no device has to be waited for to know it."""
    counted = target != ignore_index
    known = target.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if known and bool(counted.all()) else counted


def plain_gradient(
    scale: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, *, label_smoothing: float, ignore_index: int
) -> Tensor:
    """scale * d loss / d logits alone, a tensor like logits; nothing of the loss is computed for it. scale () or (R,);
    statistics: as plain() gave them."""
    counted = counted_rows(target, ignore_index)
    if (classes := _for_pass(logits, target, counted, scale)) is not None:
        return training_passes.cross_entropy_gradient(logits, classes, counted, label_smoothing, scale, statistics)
    gradient = logits.new_empty(logits.shape)
    weights: Tensor | None = None  # in float32, where the gradient is not
    for part, x, t, left in _blocks(logits, target, counted):
        if x.dtype == gradient.dtype:
            memory = gradient[part]
        else:
            weights = torch.empty_like(x) if weights is None else weights
            memory = weights[: x.shape[0]]
        p = _gradient_(torch.softmax(x, dim=1, out=memory), t, label_smoothing, _of_rows(scale, part), left)
        if weights is not None:
            gradient[part] = p
    return gradient


def mean_factor(target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """One over the number of counted rows, 0-d; as in torch, the mean of nothing is not a number."""
    rows = (target != ignore_index).sum(dtype=dtype)
    return torch.where(rows > 0, rows.reciprocal(), float("nan"))


def side_by_side(logits: Tensor) -> bool:
    """Return whether the logits of a row lie side by side."""
    return logits.stride(1) == 1 or logits.shape[1] <= 1


def losses_of(
    logits: Tensor, target: Tensor, weights: Tensor | None, label_smoothing: float, ignore_index: int, reduction: str,
    route: str, *, overwrite: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:  # fmt: skip
    """A function, for one signature, of logits (M, V), target (M,) and weights of the rows, (M,) or None.

    It returns loss and loss without smoothing, 0-d or with reduction none (M,); each row's largest logit and its
    probability, (2, M), None with overwrite, which leaves the gradient in the logits' memory; and a mean's factor, 0-d,
    or None. Of the logits given here shape and strides alone are read. No mean has weights. route: triton or torch.
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
    """factor times the loss of each row, in operations that PyTorch differentiates twice."""
    x = logits.to(wide(logits.dtype))
    losses = torch.nn.functional.cross_entropy(
        x, target, None if class_weights is None else class_weights.to(x.dtype), ignore_index=ignore_index,
        reduction="none", label_smoothing=label_smoothing,
    )  # fmt: skip
    return losses if factor is None else losses * factor.to(x.dtype)
