"""The norm operator's records, and LayerNorm and RMSNorm by PyTorch or the compiled CPU loops."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.cpu import training_passes
from fasttfm.functional.dropout import keep_mask, scale_of, wide
from fasttfm.functional.record import Whole
from fasttfm.functional.rows import add_kept, as_rows, branch_gradient, cast, shaped

Outputs = tuple[Any, ...]


class Call(NamedTuple):
    x: Tensor
    x_bias: Tensor | None
    residual: Tensor | None
    """None: a norm alone, without dropout."""
    weight: Tensor | None
    bias: Tensor | None
    seed: Whole | None
    """None: nothing is dropped."""
    eps: float
    dropout_p: float
    site: int
    rms: bool
    route: str


class Saved(NamedTuple):
    s: Tensor
    """The sum, or x without a residual."""
    mean: Tensor
    """Not read by RMSNorm."""
    rstd: Tensor
    x_bias: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    keep: Tensor | None
    seed: Whole | None
    dropout_p: float
    site: int
    dtype: torch.dtype
    """x's."""
    eps: float
    joined: bool
    """Whether there was a residual."""
    one_gradient: bool
    """Whether x and residual have the same gradient, which is then computed once."""
    rms: bool
    route: str


class Backward(NamedTuple):
    dy: Tensor
    dy2: Tensor | None
    """Gradient of a second use of y, added to dy."""
    ds: Tensor | None
    saved: Saved


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) -> y in x's dtype or wider, mean (M,), rstd (M,), by torch's own kernel, at least in float32."""
    dtype = wide(x.dtype)
    if x.is_cpu and weight is None and x.dtype != dtype:
        weight = x.new_ones(x.shape[-1], dtype=dtype)
    # Half-precision x with float32 parameters: torch supports the pair on the CPU only, with float32 statistics.
    rows = x if x.is_cpu else cast(x, dtype)
    y, mean, rstd = torch.native_layer_norm(rows, [x.shape[-1]], cast(weight, dtype), cast(bias, dtype), eps)
    return y, mean.view(-1), rstd.view(-1)


def normalise_backward(dy: Tensor, saved: Saved) -> list[Any]:
    """ds, dweight, dbias of rows (M, N); None for an absent parameter."""
    # All in float32: in half precision torch's CPU kernel is slower, and its dweight, summed in half precision, is off
    # by a sixth at 4,096 rows in bfloat16.
    x, mean, rstd, _, weight, bias, *_ = saved
    dtype = wide(x.dtype)
    x, mean = as_rows(x), mean.view(-1, 1)
    if x.dtype is not dtype:  # torch computes x * rstd - mean * rstd, which cancels completely at a mean of 1e4
        x = x.to(dtype).sub_(mean)
        mean = torch.zeros_like(mean)
    gradients = torch.ops.aten.native_layer_norm_backward(
        cast(dy, dtype), x, [x.shape[-1]], mean, rstd.view(-1, 1), cast(weight, dtype), cast(bias, dtype),
        [True, weight is not None, bias is not None],
    )  # fmt: skip
    return [like if like is None else cast(d, like.dtype) for d, like in zip(gradients, (saved.s, weight, bias))]


def normalise_rms(s: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """s (M, N) -> y, at least float32, rstd (M,) in place of a mean, and rstd."""
    precise = cast(s, wide(s.dtype))
    rstd = torch.rsqrt(precise.square().mean(-1) + eps)
    y = precise * rstd[:, None]
    return y if weight is None else y.mul_(weight), rstd, rstd


def normalise_rms_backward(
    dy: Tensor, ds: Tensor | None, rows: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor | None, None]:
    """The gradients of rows (M, N), ds added, and of weight, if any; None for the bias."""
    dtype, rstd = wide(rows.dtype), rstd[:, None]
    gradient, normal = cast(dy, dtype), cast(rows, dtype) * rstd
    dweight = None if weight is None else cast((gradient * normal).sum(0), weight.dtype)
    if weight is not None:
        gradient = gradient * weight
    total = (gradient - normal * (gradient * normal).mean(-1, keepdim=True)).mul_(rstd)
    if ds is not None:
        total += ds
    return cast(total, rows.dtype), dweight, None


def plan(call: Call) -> Callable[[Call], Outputs]:
    """Plan a norm by PyTorch, or by a loop of fasttfm.cpu if that is faster; outputs as in residual_norm."""
    weight, bias = call.weight, call.bias
    if call.residual is None or call.rms:
        return _compute
    rows, stream = as_rows(call.x), as_rows(call.residual)
    return _compute_in_training if training_passes.takes_norm(rows, stream, weight, bias) else _compute


def _rows(call: Call) -> tuple[Tensor, Any]:
    """x with its bias, and the residual stream, as rows (M, N)."""
    rows, bias, residual = as_rows(call.x), call.x_bias, call.residual
    rows = rows if bias is None else rows + cast(bias, rows.dtype)
    return rows, None if residual is None else as_rows(residual)


def _compute(call: Call) -> Outputs:
    x, weight = call.x, call.weight
    rows, stream = _rows(call)
    # On the CPU the mask costs more to draw than to save: a byte per element until the backward pass.
    keep = keep_mask(rows, call)
    s = rows if stream is None else add_kept(rows, stream, keep, call.dropout_p)
    y, mean, rstd = normalise_rms(s, weight, call.eps) if call.rms else normalise(s, weight, call.bias, call.eps)
    kept = None if call.seed is None else keep
    return shaped(cast(y, x.dtype), x), None if stream is None else shaped(s, x), rstd if call.rms else mean, rstd, kept


def _compute_in_training(call: Call) -> Outputs:
    args: Any = *_rows(call), call.weight, call.bias, call.eps, call.dropout_p, call.seed, call.site
    y, s, mean, rstd, keep = training_passes.residual_layer_norm(*args)
    return shaped(y, call.x), shaped(s, call.x), mean, rstd, None if call.seed is None else keep


def plan_backward(call: Backward) -> Callable[[Backward], Outputs]:
    """Plan the backward pass, as plan() the forward pass."""
    dy, _, ds, saved = call
    alike = saved.joined and dy.dtype == saved.dtype and (ds is None or ds.dtype == saved.s.dtype)
    by_loop = not saved.rms and saved.weight is not None and alike
    by_loop = by_loop and training_passes.takes_norm(as_rows(dy), as_rows(saved.s), saved.weight, saved.bias)
    gradients = _gradients_by_loop if by_loop else _gradients

    def compute(call: Backward) -> Outputs:
        dy, dy2, ds, saved = call
        rows = as_rows(dy if dy2 is None else dy + dy2), None if ds is None else as_rows(ds), as_rows(saved.s)
        dx, dresidual, dweight, dbias = gradients(*rows, saved)
        dx_bias = None
        if saved.x_bias is not None:
            dx_bias = cast((dresidual if dx is None else dx).sum(0, dtype=wide(saved.dtype)), saved.x_bias.dtype)
        return None if dx is None else shaped(dx, saved.s), shaped(dresidual, saved.s), dx_bias, dweight, dbias

    return compute


def _keep(saved: Saved) -> Tensor:
    """The keep mask; empty without dropout."""
    return saved.s.new_empty(0, dtype=torch.bool) if saved.seed is None else saved.keep  # type: ignore[return-value]


def _gradients(dy: Tensor, ds: Tensor | None, rows: Tensor, saved: Saved) -> Outputs:
    """The gradients of x (None if it equals residual's), residual, weight and bias."""
    if saved.rms:
        dresidual, dweight, dbias = normalise_rms_backward(dy, ds, rows, saved.rstd, saved.weight)
    else:
        dresidual, dweight, dbias = normalise_backward(dy, saved)
        if ds is not None:
            dresidual += ds
    dx = None if saved.one_gradient else branch_gradient(dresidual, _keep(saved), saved, saved.dtype)
    return dx, dresidual, dweight, dbias


def _gradients_by_loop(dy: Tensor, ds: Tensor | None, rows: Tensor, saved: Saved) -> Outputs:
    args: Any = dy, ds, rows, (saved.mean, saved.rstd), saved.weight, _keep(saved), scale_of(saved), saved.one_gradient
    return training_passes.residual_layer_norm_gradient(*args)
