"""Cross entropy fused with the output projection, which never keeps the logits.

The forward pass overwrites the logits with their gradient, multiplies it out to the gradients of hidden and weight, and
frees it. Saved are these, (M, N) and (V, N), with hidden and weight for a second derivative; the backward pass only
scales them.
"""

from collections.abc import Callable
from functools import reduce
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.cross_entropy import cross_entropy
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.dropout import wide
from fasttfm.functional.loss import check, check_classes, differentiable_losses, losses_of, mean_factor, weights_of_rows
from fasttfm.functional.operator import Operator, Whole
from fasttfm.functional.rows import as_rows
from fasttfm.functional.signature import is_flag, names_arguments


@names_arguments
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "sum",
    class_weights: Tensor | None = None,
    row_weights: Tensor | None = None,
    low_memory: bool = False,
) -> tuple[Tensor, Tensor]:
    """cross_entropy(hidden weight^T, target) without keeping the logits.

    hidden (..., N), weight (V, N), target (...) int64 or int32; float32, float16, bfloat16 or float64. Under autocast
    the products have its precision; gradients have the dtypes of hidden and weight.
    Rows whose target is ignore_index are ignored. The gradients of hidden and weight are computed in the forward pass,
    if required; backward only scales them.
    reduction, class_weights (V,) and row_weights (...): as in cross_entropy(). Reduction none, and class weights with
    label smoothing, keep the logits.
    low_memory: process the rows in chunks whose logits take about as much memory as hidden, which costs more and
    smaller matrix products; always on a CPU, where it is faster.
    Returns (loss, loss without smoothing), 0-d or with reduction none (...), float32 (float64 for float64); the second
    has no gradient.
    Raises ValueError for shapes that do not agree.
    """
    if target.dtype is torch.int32:
        target = target.long()
    shape, weights = target.shape, None
    kept = reduction == "none" or (class_weights is not None and label_smoothing)
    if kept or hidden.ndim != 2 or class_weights is not None or row_weights is not None:
        _check(_Call(hidden, weight, target, None, label_smoothing, 0, reduction, False, False, low_memory, None, ""))
        if row_weights is not None:
            if row_weights.shape != shape:
                raise ValueError(f"row_weights is {tuple(row_weights.shape)}: it must be {tuple(shape)}, as target is")
            row_weights = row_weights.reshape(-1)
        hidden, target = as_rows(hidden), target.reshape(-1)
        if kept:
            loss, nll = cross_entropy(
                kept_logits(hidden, weight), target, label_smoothing=label_smoothing, ignore_index=ignore_index,
                reduction=reduction, class_weights=class_weights, row_weights=row_weights,
            )  # fmt: skip
            return (loss.view(shape), nll.view(shape)) if reduction == "none" else (loss, nll)
        weights = weights_of_rows(target, weight.shape[0], hidden.dtype, ignore_index, class_weights, row_weights)
    recorded = torch.is_grad_enabled()
    return _linear_cross_entropy(
        hidden, weight, target, weights, float(label_smoothing), ignore_index, reduction,
        recorded and hidden.requires_grad, recorded and weight.requires_grad, low_memory, None, backends.current,
    )  # fmt: skip


def kept_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden weight^T + bias (M, V), kept for the backward pass: hidden (M, N), weight (V, N), bias (V,)."""
    if bias is not None and (bias.dtype, bias.device) != (weight.dtype, weight.device):
        raise ValueError(f"bias is {bias.dtype} on {bias.device}, weight {weight.dtype} on {weight.device}")
    # An empty call runs the operator's checks of dtypes and devices.
    target = hidden.new_empty(0, dtype=torch.int64)
    _linear_cross_entropy(
        hidden[:0], weight, target, None, 0.0, -100, "sum", False, False, False, None, backends.current
    )
    return torch.nn.functional.linear(hidden, weight, bias)


class _Call(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Whole
    weights: Tensor | None
    label_smoothing: float
    ignore_index: int
    reduction: str
    need_hidden: bool
    need_weight: bool
    low_memory: bool
    dtype: torch.dtype | None
    """Dtype of the products under autocast."""
    route: str


class _Saved(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Whole
    weights: Tensor | None
    d_hidden: Tensor
    d_weight: Tensor
    factor: Tensor | None
    """Factor of a mean."""
    label_smoothing: float
    ignore_index: int
    dtype: torch.dtype
    """Dtype of the products."""


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


LOSS_CHUNK = 1 << 22
"""Logits per chunk on a CPU: 8 MiB in half precision. Chosen, not measured."""


def _check(call: _Call) -> None:
    hidden, weight, target, *_ = call
    check(target, call.label_smoothing, call.reduction)
    if hidden.shape[:-1] != target.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} must be "
            "(..., N), (V, N) and (...)"
        )
    check_classes("weight", weight, 0)
    is_flag("low_memory", call.low_memory)


def _chunk(call: _Call) -> int:
    """Rows per chunk."""
    rows, columns = max(1, call.target.numel()), call.weight.shape[0]
    if call.hidden.is_cpu:
        return max(1, min(rows, LOSS_CHUNK // columns))
    if not call.low_memory:
        return rows
    # Logits about as large as hidden, in whole tiles of the matrix products.
    return min(rows, -(-rows * call.hidden.shape[-1] // columns // 256) * 256)


def _plan(call: _Call) -> Callable[[_Call], tuple[Tensor | None, ...]]:
    """Compute both losses, the gradients of hidden and weight, empty if not needed, and the factor of a mean."""
    dtype, ignore_index, products = call.dtype or call.hidden.dtype, call.ignore_index, _products(call)
    # Ignored rows are skipped on a CPU only: counting them on a device would make the host wait.
    skips = call.route == "torch" and call.hidden.is_cpu and not torch.compiler.is_compiling()

    def compute(call: _Call) -> tuple[Tensor | None, ...]:
        hidden, weight, target, weights, *_ = call
        x, w, t, row_weights, counted, factor = hidden, weight, target, weights, None, None
        if skips:
            counted = (target != ignore_index).nonzero()[:, 0]
            if counted.numel() < target.numel():
                x, t, row_weights = hidden[counted], target[counted], None if weights is None else weights[counted]
        x, w = x if x.dtype is dtype else x.to(dtype), w if w.dtype is dtype else w.to(dtype)
        loss, nll, d_x, d_weight = products(x, w, t, row_weights)
        d_hidden = d_x if d_x.dtype is hidden.dtype else d_x.to(hidden.dtype)
        if counted is not None and call.need_hidden and len(counted) < len(hidden):
            d_hidden = d_hidden.new_zeros(hidden.shape).index_copy_(0, counted, d_hidden)
        if call.reduction == "mean":
            factor = mean_factor(target, ignore_index, loss.dtype) if weights is None else weights.sum().reciprocal()
            zero_or_nan = factor * 0.0  # an empty mean is NaN, and its gradients are 0, as in torch
            factor = factor.nan_to_num(0.0, 0.0, 0.0)
            loss, nll = loss * factor + zero_or_nan, nll * factor + zero_or_nan
        return loss, nll, d_hidden, d_weight if d_weight.dtype is weight.dtype else d_weight.to(weight.dtype), factor

    return compute


def _products(call: _Call) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of x (M, N), weight, target and row weights that computes both losses and both gradients, in
    chunks of _chunk() rows."""
    need_hidden, need_weight, columns = call.need_hidden, call.need_weight, call.weight.shape[0]
    rows, most = call.target.numel(), _chunk(call)
    # On a GPU rows start at multiples of 16 elements, for tensor cores and wide loads, whatever the vocabulary.
    stride = columns if call.hidden.is_cpu else -(-columns // 16) * 16

    chunk_losses, last_losses = (
        losses_of(
            torch.empty(n, stride, dtype=torch.float32, device="meta")[:, :columns], call.target, call.weights,
            call.label_smoothing, call.ignore_index, "sum", call.route, overwrite=need_hidden or need_weight,
        )
        for n in (min(rows, most), rows % most)
    )  # fmt: skip

    def at_once(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        memory = None if stride == columns else x.new_empty(x.shape[0], stride)[:, :columns]
        logits = torch.mm(x, weight.t(), out=memory)
        loss, nll, *_ = chunk_losses(logits, target, weights)
        d_x = torch.mm(logits, weight) if need_hidden else x.new_empty(0)
        return loss, nll, d_x, torch.mm(logits.t(), x) if need_weight else x.new_empty(0)

    def by_chunks(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        if x.shape[0] <= most:
            return at_once(x, weight, target, weights)
        d_x, d_weight = x.new_empty(x.shape if need_hidden else (0,)), x.new_empty(0)
        losses, memory, precise = [], x.new_empty(most, stride)[:, :columns], wide(x.dtype)
        row_weights = repeat(None) if weights is None else weights.split(most)
        for r, part, t, w in zip(range(0, x.shape[0], most), x.split(most), target.split(most), row_weights):
            logits = torch.mm(part, weight.t(), out=memory[: part.shape[0]])
            losses.append((chunk_losses if part.shape[0] == most else last_losses)(logits, t, w)[:2])
            if need_hidden:
                torch.mm(logits, weight, out=d_x[r : r + most])
            # Summed in half precision within a chunk, in float32 across chunks.
            if need_weight and not r:
                d_weight = torch.mm(logits.t(), part).to(precise)
            elif need_weight and x.dtype is precise:
                d_weight.addmm_(logits.t(), part)
            elif need_weight:
                d_weight += torch.mm(logits.t(), part)
        loss, nll = (reduce(torch.add, each) for each in zip(*losses))
        return loss, nll, d_x, d_weight

    return by_chunks if most < rows else at_once


def _fake(call: _Call) -> tuple[Tensor, ...]:
    hidden, weight, mean = call.hidden, call.weight, call.reduction == "mean"
    loss, nll, factor = (hidden.new_empty((), dtype=wide(call.dtype or hidden.dtype)) for _ in range(3))
    d_hidden = hidden.new_empty(hidden.shape if call.need_hidden else (0,))
    d_weight = weight.new_empty(weight.shape if call.need_weight else (0,))
    return loss, nll, d_hidden, d_weight, factor if mean else hidden.new_empty(0)


def _scale(call: _Backward) -> tuple[Tensor, ...]:
    grad, saved = call
    grad = grad if saved.factor is None else grad * saved.factor
    return tuple(torch._foreach_mul([saved.d_hidden, saved.d_weight], grad))  # one launch


def _reference_backward(call: _Backward) -> list[Tensor]:
    grad, saved = call

    def loss(saved: _Saved) -> Tensor:
        hidden, weight, target, weights, _, _, _, label_smoothing, ignore_index, dtype = saved
        logits = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))
        return differentiable_losses(logits, target, weights, label_smoothing, ignore_index).sum()

    gradients = pulled_back(loss, saved, ("hidden", "weight"), grad if saved.factor is None else grad * saved.factor)
    return [x if computed.numel() else computed for x, computed in zip(gradients, (saved.d_hidden, saved.d_weight))]


def _flops(call: _Call) -> int:
    """FLOPs of the products of both passes: the gradients are computed with the loss."""
    return (1 + call.need_hidden + call.need_weight) * 2 * call.hidden.numel() * call.weight.shape[0]


_backward = Operator(
    "linear_cross_entropy_backward", _Backward, "(Tensor, Tensor)", lambda call: _scale,
    lambda call: (torch.empty_like(call.saved.d_hidden), torch.empty_like(call.saved.d_weight)),
    reference=_reference_backward,
)  # fmt: skip
_linear_cross_entropy = Operator(
    "linear_cross_entropy", _Call, "(Tensor, Tensor, Tensor, Tensor, Tensor)", _plan, _fake, checks=_check,
    decide=lambda call: kernel_route(call.route, call.hidden),
    save=lambda call, outputs: (
        *call[:4], *outputs[2:4], outputs[4] if call.reduction == "mean" else None, *call[4:6],
        call.dtype or call.hidden.dtype,
    ),
    saved=_Saved, derivative=_backward, visible=2, flops=_flops,
    autocast=lambda call, dtype: call if call.hidden.dtype == torch.float64 else call._replace(dtype=dtype),
).call  # fmt: skip
