"""Cross entropy of hidden states together with the product that makes their logits.

The gradient with respect to the logits needs nothing that the loss did not just read. So the forward pass computes it
in the logits' memory, multiplies it out to the gradients of hidden and weight while it is there, and lets the logits
go: what waits for backward is (M, N) and (V, N), and backward is a scaling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import wide
from fasttfm.functional._layers import by_kernel
from fasttfm.functional._loss_rows import check, refuse_second_derivative, sums
from fasttfm.functional._operators import Operator

_CHUNK = 1 << 22
"""Logits that exist at a time on the CPU: 8 MiB in half precision."""


def _chunk(hidden: Tensor, columns: int, low_memory: bool) -> int:
    """Rows whose logits exist at a time."""
    rows = max(1, hidden.shape[0])
    if hidden.device.type == "cpu":
        return max(1, min(rows, _CHUNK // max(1, columns)))
    if not low_memory:
        return rows
    # As many rows as make the logits about as large as hidden, in whole tiles of the matrix products.
    return min(rows, -(-rows * hidden.shape[1] // max(1, columns) // 256) * 256)


def _forward_compute(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    need_hidden: bool,
    need_weight: bool,
    low_memory: bool,
    backend: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = dtype or hidden.dtype
    x, w, t = hidden, weight.to(dtype), target
    counted = None
    if hidden.device.type == "cpu" and not by_kernel(backend, hidden):  # elsewhere it would wait for the device
        counted = (target != ignore_index).nonzero()[:, 0]
        if counted.numel() < target.numel():
            x, t = hidden[counted], target[counted]
    x = x.to(dtype)
    rows, columns = x.shape[0], w.shape[0]
    precise = wide(dtype)
    losses = []
    grad_x = x.new_empty(x.shape if need_hidden else (0,))
    grad_weight = None
    step = _chunk(x, columns, low_memory)
    # On a GPU rows begin at multiples of 16 elements, as tensor cores and wide loads want it, whatever the vocabulary.
    memory = x.new_empty(step, columns if x.device.type == "cpu" else -(-columns // 16) * 16)[:, :columns]
    for r in range(0, rows, step):
        part = x[r : r + step]
        logits = torch.mm(part, w.t(), out=memory[: part.shape[0]])
        loss, nll, _ = sums(
            logits,
            t[r : r + step],
            label_smoothing,
            ignore_index,
            mean=False,
            overwrite=need_hidden or need_weight,
            backend=backend,
        )
        losses.append((loss, nll))
        if need_hidden:
            torch.mm(logits, w, out=grad_x[r : r + step])
        if not need_weight:
            continue
        # Half precision within a chunk, float32 between chunks.
        if grad_weight is None:
            grad_weight = torch.mm(logits.t(), part).to(precise if rows > step else dtype)
        elif dtype == precise:
            grad_weight.addmm_(logits.t(), part)
        else:
            grad_weight += torch.mm(logits.t(), part)
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


def _forward_fake(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, need_hidden, need_weight, _, _, dtype = rest
    precise = wide(dtype or hidden.dtype)
    return (
        hidden.new_empty((), dtype=precise),
        hidden.new_empty((), dtype=precise),
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
    )


def _save(ctx: Any, args: tuple, outputs: tuple) -> None:
    _, nll, grad_hidden, grad_weight = outputs
    ctx.mark_non_differentiable(nll, grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.count = len(args)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple:
    nothing = (None,) * (ctx.count - 2)
    if grad_loss is None:
        return None, None, *nothing
    refuse_second_derivative("linear_cross_entropy")
    grad_hidden, grad_weight = ctx.saved_tensors
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    hidden, weight = _scaled(grad_hidden, grad_weight, grad_loss)
    return hidden if need_hidden else None, weight if need_weight else None, *nothing


def _scale_both(first: Tensor, second: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    first, second = torch._foreach_mul([first, second], factor)  # one launch
    return first, second


_scaled = Operator(
    "scale_gradients(Tensor first, Tensor second, Tensor factor) -> (Tensor, Tensor)",
    _scale_both,
    lambda first, second, factor: (torch.empty_like(first), torch.empty_like(second)),
)

_linear_cross_entropy = Operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, float label_smoothing, int ignore_index, "
    "bool need_hidden, bool need_weight, bool low_memory, str backend, ScalarType? dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward_compute,
    _forward_fake,
    save=_save,
    backward=_backward,
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
    check(target, label_smoothing)
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
        chosen(),
        None,
    )
    return loss, nll
