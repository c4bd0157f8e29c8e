"""Label-smoothed cross entropy, alone and together with the product that makes its logits.

    loss = sum over counted rows of  lse - (1 - a) x[target] - a / V * sum over v of x[v]        lse = log sum exp x
    d loss / d x[v] = softmax(x)[v] - a / V - (1 - a) [v == target]

(Szegedy et al. 2016; Vaswani et al. 2017, section 5.4; torch.nn.functional.cross_entropy's definition.) The gradient
needs nothing that the loss did not just read, so it is computed in the same pass, and scaled when backward comes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional._backend import use_triton
from fasttfm.functional._dropped import wide
from fasttfm.functional._operators import Operator

_BLOCK = (
    1 << 19
)  # logits that are worked on in float32 at a time on the CPU: 2 MiB, the second-level caches of two cores
_CHUNK = 1 << 22  # logits that exist at a time in linear_cross_entropy on the CPU: 8 MiB in half precision


def _by_kernel(logits: Tensor, dtype: torch.dtype) -> bool:
    return dtype != torch.float64 and use_triton(logits)


# ------------------------------------------------------------------------------------------------ plain PyTorch route


def _rows(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float,
    *,
    counted: Tensor | None = None,
    gradient: Tensor | None = None,
    scale: Tensor | None = None,
    lses: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of the loss and of the loss without smoothing over logits (R, V).

    counted (R,) bool: rows that count, all when None. gradient (R, V), which may be logits itself, receives scale * d
    loss / d logits; lses (R,) log sum exp. On the CPU a block of rows goes through every step while it lies in the
    cache.
    """
    rows, columns = logits.shape
    dtype, device = wide(logits.dtype), logits.device
    loss, nll = torch.zeros((), dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device)
    step = max(1, min(rows, _BLOCK // max(1, columns))) if device.type == "cpu" else max(1, rows)
    block = torch.empty(step, columns, dtype=dtype, device=device) if logits.dtype != dtype else None
    weights = torch.empty(step, columns, dtype=dtype, device=device)
    for r in range(0, rows, step):
        x, t = logits[r : r + step], target[r : r + step, None]
        c = None if counted is None else counted[r : r + step]
        t = t if c is None else t.masked_fill(~c[:, None], 0)
        if block is not None:
            x = block[: x.shape[0]].copy_(x)
        p = torch.softmax(x, dim=1, out=weights[: x.shape[0]])
        lse = x.amax(dim=1) - p.amax(dim=1).log()  # the largest weight is at least 1 / V: its logarithm is exact
        row_nll = lse - x.gather(1, t)[:, 0]
        row_loss = row_nll
        if label_smoothing:
            row_loss = torch.lerp(row_nll, lse - x.mean(dim=1), label_smoothing)
        nll += (row_nll if c is None else row_nll.masked_fill(~c, 0.0)).sum()
        loss += (row_loss if c is None else row_loss.masked_fill(~c, 0.0)).sum()
        if lses is not None:
            lses[r : r + step] = lse
        if gradient is not None:
            if label_smoothing:
                p -= label_smoothing / columns
            p.scatter_add_(1, t, torch.full_like(t, label_smoothing - 1.0, dtype=dtype))
            if scale is not None:
                p *= scale
            gradient[r : r + step] = p if c is None else p.masked_fill_(~c[:, None], 0.0)
    return loss, nll


# ----------------------------------------------------------------------------------------------------- cross_entropy


def _mean_factor(logits: Tensor, target: Tensor, ignore_index: int, mean: bool) -> Tensor | None:
    """One over the number of counted rows, 0-d, for a mean; as in torch, the mean of nothing is not a number."""
    if not mean:
        return None
    rows = (target != ignore_index).sum(dtype=wide(logits.dtype))
    return torch.where(rows > 0, rows.reciprocal(), float("nan"))


def _sums(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, mean: bool, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and loss without smoothing, 0-d, and lse (M,), which is empty with overwrite."""
    factor = _mean_factor(logits, target, ignore_index, mean)
    lses = logits.new_empty(0 if overwrite else logits.shape[0], dtype=wide(logits.dtype))
    if _by_kernel(logits, logits.dtype):
        from fasttfm.kernels import cross_entropy as kernel

        losses, kept = kernel.forward(
            logits,
            target.contiguous(),
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            overwrite=overwrite,
            factor=factor,
            keep_lse=not overwrite,
        )
        lses = lses if kept is None else kept
        loss, nll = losses[0].sum(), losses[1].sum()
    else:
        loss, nll = _rows(
            logits,
            target,
            label_smoothing,
            counted=target != ignore_index,
            gradient=logits if overwrite else None,
            scale=factor,
            lses=None if overwrite else lses,
        )
    return (loss, nll, lses) if factor is None else (loss * factor, nll * factor, lses)


def _unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def _forward_compute(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _sums(_unit_stride(logits), target, label_smoothing, ignore_index, mean, False)


def _backward_compute(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lses: Tensor,
    label_smoothing: float,
    ignore_index: int,
    mean: bool,
) -> Tensor:
    logits = _unit_stride(logits)
    factor = _mean_factor(logits, target, ignore_index, mean)
    factor = grad if factor is None else grad * factor
    if _by_kernel(logits, logits.dtype):
        from fasttfm.kernels import cross_entropy as kernel

        return kernel.backward(
            factor, logits, target.contiguous(), lses, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _rows(logits, target, label_smoothing, counted=target != ignore_index, gradient=gradient, scale=factor)
    return gradient


def _consume_compute(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, mean: bool
) -> tuple[Tensor, Tensor]:
    loss, nll, _ = _sums(logits, target, label_smoothing, ignore_index, mean, True)
    return loss, nll


def _scale_compute(gradient: Tensor, factor: Tensor) -> None:
    if _by_kernel(gradient, gradient.dtype):
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
        return None, None, None, None, None
    return _cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _consume_save(ctx: Any, args: tuple, outputs: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(outputs[1])
    ctx.set_materialize_grads(False)
    torch.autograd.graph.increment_version(args[0])  # whoever else saved the logits must hear that they are gone
    ctx.save_for_backward(args[0])
    ctx.consumed = False


def _consume_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return None, None, None, None, None
    if ctx.consumed:
        raise RuntimeError(
            "cross_entropy(inplace=True) was differentiated twice: its gradient, in the logits' memory, went out the "
            "first time; call it with inplace=False"
        )
    ctx.consumed = True
    gradient = ctx.saved_tensors[0].detach()
    _scale_gradient_(gradient, grad)
    return gradient, None, None, None, None


_cross_entropy_backward = Operator(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lses, float label_smoothing, "
    "int ignore_index, bool mean) -> Tensor",
    _backward_compute,
    lambda grad, logits, *_: logits.new_empty(logits.shape),
)

_scale_gradient_ = Operator(
    "scale_gradient_(Tensor(a!) gradient, Tensor factor) -> ()", _scale_compute, lambda gradient, factor: None
)

_cross_entropy = Operator(
    "cross_entropy(Tensor logits, Tensor target, float label_smoothing, int ignore_index, bool mean) "
    "-> (Tensor, Tensor, Tensor)",
    _forward_compute,
    _forward_fake,
    save=_save,
    backward=_backward,
)

_cross_entropy_consume = Operator(
    "cross_entropy_consume(Tensor(a!) logits, Tensor target, float label_smoothing, int ignore_index, bool mean) "
    "-> (Tensor, Tensor)",
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
    _check(target, label_smoothing)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must be (M, V) and (M,)")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}: choose mean or sum")
    options = (float(label_smoothing), ignore_index, reduction == "mean")
    if inplace and torch.is_grad_enabled() and logits.requires_grad:
        if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:
            raise ValueError(
                f"logits have strides {logits.stride()}: inplace=True needs rows of their own with stride 1; "
                "call .contiguous() before or leave inplace out"
            )
        return _cross_entropy_consume(logits, target, *options)
    loss, nll, _ = _cross_entropy(logits, target, *options)
    return loss, nll


# ---------------------------------------------------------------------------------------------- linear_cross_entropy


def _chunk(hidden: Tensor, columns: int, low_memory: bool) -> int:
    """Rows whose logits exist at a time."""
    rows = max(1, hidden.shape[0])
    if hidden.device.type == "cpu":
        return max(1, min(rows, _CHUNK // max(1, columns)))
    if not low_memory:
        return rows
    # As many rows as make the logits about as large as hidden, in whole tiles of the matrix products.
    return min(rows, -(-rows * hidden.shape[1] // max(1, columns) // 256) * 256)


def _linear_compute(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    need_hidden: bool,
    need_weight: bool,
    low_memory: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = dtype or hidden.dtype
    x, w, t = hidden, weight.to(dtype), target
    counted = None
    if hidden.device.type == "cpu":  # elsewhere it would wait for the device
        counted = (target != ignore_index).nonzero()[:, 0]
        if counted.numel() < target.numel():
            x, t = hidden[counted], target[counted]
    x = x.to(dtype)
    rows, columns = x.shape[0], w.shape[0]
    sums, overwrite = wide(dtype), need_hidden or need_weight
    losses = []
    grad_x = x.new_empty(x.shape if need_hidden else (0,))
    grad_weight = None
    step = _chunk(x, columns, low_memory)
    # Rows begin 16 elements apart, as tensor cores and wide loads want it, whatever the vocabulary.
    memory = x.new_empty(step, -(-columns // 16) * 16)[:, :columns]
    for r in range(0, rows, step):
        part = x[r : r + step]
        logits = torch.mm(part, w.t(), out=memory[: part.shape[0]])
        losses.append(_sums(logits, t[r : r + step], label_smoothing, ignore_index, False, overwrite)[:2])
        if need_hidden:
            torch.mm(logits, w, out=grad_x[r : r + step])
        if not need_weight:
            continue
        # Half precision within a chunk, float32 between chunks.
        if grad_weight is None:
            grad_weight = (logits.t() @ part).to(sums if rows > step else dtype)
        elif dtype == sums:
            grad_weight.addmm_(logits.t(), part)
        else:
            grad_weight += logits.t() @ part
    if grad_weight is None:
        grad_weight = weight.new_zeros(weight.shape if need_weight else (0,))
    if need_hidden and rows < hidden.shape[0]:
        grad_hidden = torch.zeros_like(hidden)
        grad_hidden[counted] = grad_x.to(hidden.dtype)
    else:
        grad_hidden = grad_x.to(hidden.dtype)
    return *_added(losses, x), grad_hidden, grad_weight.to(weight.dtype)


def _added(losses: list[tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    if len(losses) == 1:
        return losses[0]
    zero = x.new_zeros((), dtype=wide(x.dtype))
    return sum((loss for loss, _ in losses), zero), sum((nll for _, nll in losses), zero.clone())


def _linear_fake(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, need_hidden, need_weight, _, dtype = rest
    sums = wide(dtype or hidden.dtype)
    return (
        hidden.new_empty((), dtype=sums),
        hidden.new_empty((), dtype=sums),
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
    )


def _linear_save(ctx: Any, args: tuple, outputs: tuple) -> None:
    _, nll, grad_hidden, grad_weight = outputs
    ctx.mark_non_differentiable(nll, grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.count = len(args)


def _linear_backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple:
    nothing = (None,) * (ctx.count - 2)
    if grad_loss is None:
        return None, None, *nothing
    grad_hidden, grad_weight = ctx.saved_tensors
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    return (
        _scaled(grad_hidden, grad_loss) if need_hidden else None,
        _scaled(grad_weight, grad_loss) if need_weight else None,
        *nothing,
    )


_scaled = Operator(
    "scale_gradient(Tensor gradient, Tensor factor) -> Tensor",
    lambda gradient, factor: (gradient * factor).to(gradient.dtype),
    lambda gradient, factor: torch.empty_like(gradient),
)

_linear_cross_entropy = Operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, float label_smoothing, int ignore_index, "
    "bool need_hidden, bool need_weight, bool low_memory, ScalarType? dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _linear_compute,
    _linear_fake,
    save=_linear_save,
    backward=_linear_backward,
    autocast=lambda args, dtype: (*args[:-1], dtype if args[0].dtype != torch.float64 else None),
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    low_memory: bool = False,
) -> tuple[Tensor, Tensor]:
    """cross_entropy(hidden weight^T, target), summed, without keeping the logits.

    hidden (..., N), weight (V, N), target (...) int64; float32, float16, bfloat16 or float64. Under autocast the
    products are computed in its precision from weights and hidden states as they are, and gradients come in their
    dtype.
    Rows whose target is ignore_index count nothing. The gradients are computed here, in the forward pass, when hidden
    or weight asks for one; backward only scales them.
    low_memory: the logits exist for some rows at a time, about as many as fill the memory of hidden, which costs more
    and smaller matrix products; on the CPU it is always so, because there it is the faster way.
    Returns (loss, the loss without smoothing), 0-d float32 (float64 for float64) sums; the second has no gradient.
    Raises ValueError for shapes that do not agree.
    """
    _check(target, label_smoothing)
    if hidden.shape[:-1] != target.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} must be "
            "(..., N), (V, N) and (...)"
        )
    gradients = torch.is_grad_enabled()
    loss, nll, _, _ = _linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        target.reshape(-1),
        float(label_smoothing),
        ignore_index,
        gradients and hidden.requires_grad,
        gradients and weight.requires_grad,
        low_memory,
        None,
    )
    return loss, nll


def _check(target: Tensor, label_smoothing: float) -> None:
    if target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype}: it must hold int64 class numbers")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} must lie in [0, 1]")
