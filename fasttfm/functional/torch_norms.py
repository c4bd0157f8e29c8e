"""LayerNorm and RMSNorm of rows by PyTorch, forward and backward."""

import torch
from torch import Tensor

from fasttfm.cpu import step_passes, training_passes
from fasttfm.cpu.linear import frozen
from fasttfm.functional.dropout import keep_mask, wide
from fasttfm.functional.norm_call import Backward, Call, Normalised, Saved
from fasttfm.functional.rows import add_kept, as_rows, branch_gradient, cast, shaped


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) -> y in x's dtype or wider, mean (M,), rstd (M,), by torch's own kernel, in float32 at least."""
    dtype = wide(x.dtype)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dim() != 1:
            raise ValueError(f"layer_norm: {name} {tuple(parameter.shape)} is in parts, which only kernels add up")
    if x.is_cpu and weight is None and x.dtype != dtype:
        weight = torch.ones(x.shape[-1], dtype=dtype)
    # Half-precision x with float32 parameters is a pair that torch takes on the CPU alone, statistics in float32.
    taken = x if x.is_cpu else cast(x, dtype)
    y, mean, rstd = torch.native_layer_norm(taken, [x.shape[-1]], *_cast(weight, bias, dtype), eps)
    return y, mean.view(-1), rstd.view(-1)


def normalise_backward(dy: Tensor, saved: Normalised) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias of rows (M, N); the latter two empty where there is no such parameter."""
    # All in float32: on half precision torch's CPU kernel is slower, and its dweight is off by a sixth at 4,096 rows
    # in bfloat16, because it sums in half precision.
    x, mean, rstd, weight, bias = saved
    dtype = wide(x.dtype)
    x, mean = as_rows(x), mean.view(-1, 1)
    if x.dtype is not dtype:  # torch forms x * rstd - mean * rstd, whose difference a mean of 1e4 leaves no digit of
        x = x.to(dtype).sub_(mean)
        mean = torch.zeros_like(mean)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        cast(dy, dtype),
        x,
        [x.shape[-1]],
        mean,
        rstd.view(-1, 1),
        *_cast(weight, bias, dtype),
        [True, weight is not None, bias is not None],
    )
    gradients = [dx, dweight, dbias]
    for place, like in enumerate((saved.x, weight, bias)):
        gradients[place] = x.new_empty(0) if like is None else cast(gradients[place], like.dtype)
    return gradients[0], gradients[1], gradients[2]


def _cast(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Both in dtype."""
    return None if weight is None else cast(weight, dtype), None if bias is None else cast(bias, dtype)


def normalise_rms(s: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """s (M, N) -> y in float32 at least, rstd (M,) in the place of a mean, and rstd."""
    precise = cast(s, wide(s.dtype))
    rstd = torch.rsqrt(precise.square().mean(-1) + eps)
    y = precise * rstd[:, None]
    return y if weight is None else y.mul_(weight), rstd, rstd


def normalise_rms_backward(
    dy: Tensor, ds: Tensor | None, rows: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows (M, N), ds added, and of weight, empty where there is none; no bias has one."""
    dtype, rstd = wide(rows.dtype), rstd[:, None]
    gradient, normal = cast(dy, dtype), cast(rows, dtype) * rstd
    dweight = rows.new_empty(0) if weight is None else cast((gradient * normal).sum(0), weight.dtype)
    if weight is not None:
        gradient = gradient * weight
    total = (gradient - normal * (gradient * normal).mean(-1, keepdim=True)).mul_(rstd)
    if ds is not None:
        total += ds
    return cast(total, rows.dtype), dweight, rows.new_empty(0)


def compute(call: Call) -> tuple[Tensor | None, ...]:
    x, x_bias, residual, weight, bias = call[:5]
    rows, stream, dropout = as_rows(x), None if residual is None else as_rows(residual), call.dropout
    if x_bias is not None:
        rows = rows + cast(x_bias, rows.dtype)
    if stream is not None and not call.rms and (outputs := _cpu_pass(rows, stream, call)) is not None:
        y, s, *saved = outputs
        return shaped(y, x), shaped(s, x), *saved  # type: ignore[arg-type]
    # the mask costs more to draw than to keep on the CPU: a byte an element until the backward pass
    keep = keep_mask(rows, dropout)
    s = rows if stream is None else add_kept(rows, stream, keep, dropout.dropout_p)
    y, mean, rstd = normalise_rms(s, weight, call.eps) if call.rms else normalise(s, weight, bias, call.eps)
    y = cast(y, x.dtype)
    kept = None if dropout.seed is None else keep
    return shaped(y, x), None if stream is None else shaped(s, x), rstd if call.rms else mean, rstd, kept


def _cpu_pass(rows: Tensor, stream: Tensor, call: Call) -> tuple[Tensor | None, ...] | None:
    """The outputs of a LayerNorm that a pass of fasttfm.cpu computes; None where PyTorch does."""
    weight, bias, eps, dropout = call.weight, call.bias, call.eps, call.dropout
    if dropout.seed is None and weight is not None and bias is not None and frozen(rows):
        alike = stream.dtype == weight.dtype == bias.dtype == rows.dtype
        if alike and step_passes.takes(rows):
            return *step_passes.add_layer_norm(rows, stream, weight, bias, eps), None, None, None
    if training_passes.takes_norm(rows, stream, weight, bias):
        outputs = training_passes.residual_layer_norm(rows, stream, weight, bias, eps, *dropout)  # type: ignore[arg-type]
        return outputs if dropout.seed is not None else (*outputs[:4], None)
    return None


def compute_backward(call: Backward) -> tuple[Tensor | None, ...]:
    dy, dy2, ds, saved = call
    if dy2 is not None:
        dy = dy + dy2
    dx, dresidual, dweight, dbias = _rows_backward(as_rows(dy), None if ds is None else as_rows(ds), saved)
    dx_bias = None
    if saved.x_bias is not None:
        dx_bias = cast((dresidual if dx is None else dx).sum(0, dtype=wide(saved.dtype)), saved.x_bias.dtype)
    s = saved.s
    return None if dx is None else shaped(dx, s), shaped(dresidual, s), dx_bias, dweight, dbias


def _rows_backward(dy: Tensor, ds: Tensor | None, saved: Saved) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """On PyTorch's route the gradients of x, None where it is residual's, of residual, weight and bias; dy in x's
    dtype."""
    s, mean, rstd, weight, bias = saved.norm
    rows = as_rows(s)
    dx: Tensor | None
    keep = rows.new_empty(0, dtype=torch.bool) if saved.seed is None or saved.keep is None else saved.keep
    alike = saved.joined and dy.dtype == saved.dtype and (ds is None or ds.dtype == rows.dtype)
    if not saved.rms and weight is not None and alike and training_passes.takes_norm(dy, rows, weight, bias):
        return training_passes.residual_layer_norm_gradient(
            dy, ds, rows, (mean, rstd), weight, keep, saved.dropout.scale, saved.one_gradient
        )
    if saved.rms:
        dresidual, dweight, dbias = normalise_rms_backward(dy, ds, rows, rstd, weight)
    else:
        dresidual, dweight, dbias = normalise_backward(dy, saved.norm)
        if ds is not None:
            dresidual += ds
    dx = None if saved.one_gradient else branch_gradient(dresidual, keep, saved.dropout, saved.dtype)
    return dx, dresidual, dweight, dbias
