"""Cross entropy of hidden states together with the product that makes their logits.

The gradient with respect to the logits needs nothing that the loss did not just read. So the forward pass computes it
in the logits' memory, multiplies it out to the gradients of hidden and weight while it is there, and lets the logits
go: what waits for backward is (M, N) and (V, N), with hidden and weight for a second derivative, and backward is a
scaling.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.cross_entropy import cross_entropy
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.dropout import wide
from fasttfm.functional.loss import check, check_classes, differentiable_loss, losses_of, mean_factor, weights_of_rows
from fasttfm.functional.operator import Gradients, Operator, Whole, unplanned
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
    the products are computed in its precision from weights and hidden states as they are, and gradients come in their
    dtype.
    Rows whose target is ignore_index count nothing. The gradients are computed here, in the forward pass, when hidden
    or weight asks for one; backward only scales them.
    reduction, class_weights (V,) and row_weights (...): as cross_entropy() takes them. A loss for each row
    (reduction none), and class weights beside label smoothing, keep the logits.
    low_memory: the logits exist for some rows at a time, about as many as fill the memory of hidden, which costs more
    and smaller matrix products; on the CPU it is always so, because there it is the faster way.
    Returns (loss, the loss without smoothing), 0-d or with reduction none (...), float32 (float64 for float64); the
    second has no gradient.
    Raises ValueError for shapes that do not agree.
    """
    target = check(target, label_smoothing, reduction)
    if hidden.shape[:-1] != target.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} must be "
            "(..., N), (V, N) and (...)"
        )
    check_classes("weight", weight, 0)
    is_flag("low_memory", low_memory)
    need_hidden, need_weight = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if row_weights is not None and row_weights.shape != target.shape:
        raise ValueError(f"row_weights is {tuple(row_weights.shape)}: it must be {tuple(target.shape)}, as target is")
    of_rows = None if row_weights is None else row_weights.reshape(-1)
    if reduction == "none" or (class_weights is not None and label_smoothing):
        given: dict[str, Any] = {"class_weights": class_weights, "row_weights": of_rows, "reduction": reduction}
        losses = cross_entropy(
            kept_logits(rows, weight), labels, label_smoothing=label_smoothing, ignore_index=ignore_index, **given
        )
        return (losses[0].view(target.shape), losses[1].view(target.shape)) if reduction == "none" else losses
    weights = weights_of_rows(labels, weight.shape[0], rows.dtype, ignore_index, class_weights, of_rows)
    options = _Options(float(label_smoothing), ignore_index, need_hidden, need_weight, low_memory, None)
    loss, nll, _, _ = _linear_cross_entropy(rows, weight, labels, weights, options, chosen())
    if reduction == "mean":
        factor = mean_factor(rows, labels, ignore_index, reduction) if weights is None else weights.sum().reciprocal()
        assert factor is not None  # it is a mean
        nothing = factor * 0.0  # not a number, which gradients of the mean of nothing are not: they are 0, as in torch
        factor = factor.nan_to_num(0.0, 0.0, 0.0)
        loss, nll = loss * factor + nothing, nll * factor + nothing
    return loss, nll


def kept_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden weight^T + bias (M, V), which wait for backward: hidden (M, N), weight (V, N), bias (V,)."""
    if bias is not None and (bias.dtype, bias.device) != (weight.dtype, weight.device):
        raise ValueError(f"bias is {bias.dtype} on {bias.device}, weight {weight.dtype} on {weight.device}")
    nothing = _Options(0.0, -100, need_hidden=False, need_weight=False, low_memory=False, dtype=None)
    # Over no row, for the operator's own checks of dtypes and devices.
    _linear_cross_entropy(hidden[:0], weight, hidden.new_empty(0, dtype=torch.int64), None, nothing, chosen())
    return torch.nn.functional.linear(hidden, weight, bias)


class _Options(NamedTuple):
    label_smoothing: float
    ignore_index: int
    need_hidden: bool
    need_weight: bool
    low_memory: bool
    dtype: torch.dtype | None
    """Of the products, under autocast."""


class _Call(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Whole
    weights: Tensor | None
    options: _Options
    route: str


class _Saved(NamedTuple):
    call: _Call
    d_hidden: Tensor
    d_weight: Tensor


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


LOSS_CHUNK = 1 << 22
"""Logits that exist at a time on a CPU: 8 MiB in half precision. Chosen, not measured."""


def _chunk(hidden: Tensor, columns: int, low_memory: bool) -> int:
    """Rows whose logits exist at a time."""
    rows = max(1, hidden.shape[0])
    if hidden.device.type == "cpu":
        return max(1, min(rows, LOSS_CHUNK // max(1, columns)))
    if not low_memory:
        return rows
    # As many rows as make the logits about as large as hidden, in whole tiles of the matrix products.
    return min(rows, -(-rows * hidden.shape[1] // max(1, columns) // 256) * 256)


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of both losses, and the gradients of hidden and weight, which are empty where they are not needed."""
    hidden, weight, target, weights, options, route = call
    dtype = options.dtype or hidden.dtype
    counted = None
    x, t = hidden, target
    known = hidden.device.type == "cpu" and not torch.compiler.is_compiling()  # else it would wait for the device
    if route == "torch" and known:
        counted = (target != options.ignore_index).nonzero()[:, 0]
        if counted.numel() < target.numel():
            x, t = hidden[counted], target[counted]
            weights = None if weights is None else weights[counted]
    loss, nll, d_x, d_weight = _chunks(x.to(dtype), weight.to(dtype), t, weights, options, route)
    if d_weight is None:
        d_weight = weight.new_zeros(weight.shape if options.need_weight else (0,))
    d_hidden = d_x.to(hidden.dtype)
    if options.need_hidden and x.shape[0] < hidden.shape[0]:
        d_hidden = torch.zeros_like(hidden)
        d_hidden[counted] = d_x.to(hidden.dtype)
    return loss, nll, d_hidden, d_weight.to(weight.dtype)


def _chunks(
    x: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None, options: _Options, route: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Both losses and both gradients of x (M, N), as many rows at a time as _chunk() says."""
    rows, columns = x.shape[0], weight.shape[0]
    precise = wide(x.dtype)
    losses = []
    d_x = x.new_empty(x.shape if options.need_hidden else (0,))
    d_weight: Tensor | None = None
    step = _chunk(x, columns, options.low_memory)
    # On a GPU rows begin at multiples of 16 elements, as tensor cores and wide loads want it, whatever the vocabulary.
    memory = x.new_empty(step, columns if x.device.type == "cpu" else -(-columns // 16) * 16)[:, :columns]
    overwrite = options.need_hidden or options.need_weight
    for r in range(0, rows, step):
        part = x[r : r + step]
        logits = torch.mm(part, weight.t(), out=memory[: part.shape[0]])
        of_rows = None if weights is None else weights[r : r + step]
        labels = (target[r : r + step], of_rows, options.label_smoothing, options.ignore_index, "sum")
        loss, nll, _ = losses_of(logits, *labels, overwrite=overwrite, route=route)
        losses.append((loss, nll))
        if options.need_hidden:
            torch.mm(logits, weight, out=d_x[r : r + step])
        if not options.need_weight:
            continue
        # Half precision within a chunk, float32 between chunks.
        if d_weight is None:
            d_weight = torch.mm(logits.t(), part).to(precise if rows > step else x.dtype)
        elif x.dtype == precise:
            d_weight.addmm_(logits.t(), part)
        else:
            d_weight += torch.mm(logits.t(), part)
    return *_added(losses, x), d_x, d_weight


def _added(losses: list[tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    if len(losses) == 1:
        return losses[0]
    zero = x.new_zeros((), dtype=wide(x.dtype))
    return sum((loss for loss, _ in losses), zero), sum((nll for _, nll in losses), zero.clone())


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, options = call.hidden, call.weight, call.options
    precise = wide(options.dtype or hidden.dtype)
    return (
        hidden.new_empty((), dtype=precise),
        hidden.new_empty((), dtype=precise),
        hidden.new_empty(hidden.shape if options.need_hidden else (0,)),
        weight.new_empty(weight.shape if options.need_weight else (0,)),
    )


def _differentiate(saved: _Saved, wanted: _Call, grad: Tensor, *_: None) -> Gradients:
    hidden, weight = _backward(grad, saved)
    return {"hidden": hidden if wanted.hidden else None, "weight": weight if wanted.weight else None}


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    first, second = torch._foreach_mul([call.saved.d_hidden, call.saved.d_weight], call.grad)  # one launch
    return first, second


def _by_reference(call: _Call) -> Tensor:
    """The loss in operations that PyTorch differentiates."""
    dtype, options = call.options.dtype or call.hidden.dtype, call.options
    logits = torch.nn.functional.linear(call.hidden.to(dtype), call.weight.to(dtype))
    return differentiable_loss(logits, call.target, call.weights, options.label_smoothing, options.ignore_index, "sum")


def _reference_backward(call: _Backward) -> list[Tensor]:
    both = pulled_back(_by_reference, call.saved.call, ("hidden", "weight"), call.grad)
    return [x if computed.numel() else computed for x, computed in zip(both, call.saved[1:])]


def _flops(call: _Call) -> int:
    """Operations of the products of both passes: the gradients are computed with the loss."""
    products = 1 + call.options.need_hidden + call.options.need_weight
    return products * 2 * call.hidden.numel() * call.weight.shape[0]


def _autocast(call: _Call, dtype: torch.dtype) -> _Call:
    if call.hidden.dtype == torch.float64:
        return call
    return call._replace(options=call.options._replace(dtype=dtype))


_backward = Operator(
    "linear_cross_entropy_backward",
    _Backward,
    "(Tensor, Tensor)",
    unplanned(_compute_backward),
    lambda call: (torch.empty_like(call.saved.d_hidden), torch.empty_like(call.saved.d_weight)),
    reference=_reference_backward,
).call
_linear_cross_entropy = Operator(
    "linear_cross_entropy",
    _Call,
    "(Tensor, Tensor, Tensor, Tensor)",
    unplanned(_compute, 2),
    _fake,
    decide=lambda call: kernel_route(call.route, call.hidden),
    save=lambda call, outputs: (call, *outputs[2:]),
    flops=_flops,
    saved=_Saved,
    backward=_differentiate,
    autocast=_autocast,
).call
