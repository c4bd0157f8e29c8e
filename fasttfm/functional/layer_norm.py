"""LayerNorm, alone and fused with the residual connection and its dropout.

Source: Ba et al. 2016; placement of dropout, Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import _dropped, _layers
from fasttfm.functional._backend import chosen
from fasttfm.functional._layers import cast, shaped
from fasttfm.functional._operators import Operator

_MAX_COLUMNS = 16384  # the widest row that the kernels hold in registers; torch's own kernel takes wider ones


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016).

    x (..., N) of any floating dtype and strides; weight and bias (N,) of any floating dtype, or None. Everything is
    computed in float32 for half precision. Returns (..., N) in x's dtype, under autocast too, so that the residual
    stream keeps its dtype. Raises ValueError for shapes that do not agree.
    """
    _check(x, weight, bias)
    return _layer_norm(x, weight, bias, eps, False, chosen())[0]


def branch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x), x): where a residual stream begins in a norm (pre-norm models).

    As layer_norm() in all else; gradients of both outputs flow back in one pass, where two uses of x would be added.
    """
    _check(x, weight, bias)
    y, _, _, *again = _layer_norm(x, weight, bias, eps, True, chosen())
    return y, again[0] if again else x


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
    post_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x + x_bias) and y = layer_norm(s) in one pass; returns (y, the next residual).

    x, residual (..., N), their dtypes may differ (a bfloat16 branch on a float32 residual stream); y comes in x's
    dtype, s in residual's. x_bias (N,): the bias of the product that made x, if that left it out; a kernel adds it, and
    sums its gradient, without reading anything more. The next residual is s for a pre-norm model, and y once more with
    post_norm (the paper's order); gradients of both outputs flow back in one pass. dropout_p in [0, 1], rounded to
    1/65536; seed (1,) int64 on x's device, drawn from torch's generator when None; stream tells the dropouts of one
    model apart. Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    _check(x, weight, bias, x_bias)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape")
    seed = _dropped.seed_for(x, dropout_p, seed)
    y, s, _, _, _, *again = _residual_layer_norm(
        x, x_bias, residual, weight, bias, eps, dropout_p, seed, stream, post_norm, chosen()
    )
    if post_norm:
        return y, again[0] if again else y
    return y, s


def norm_programs(rows: int, width: int, device: torch.device) -> int | None:
    """Into how many parts the kernels sum the gradients of a norm over (rows, width), which then takes parameters as
    read_parameters() repeats them; None where they come summed."""
    if width > _MAX_COLUMNS:
        return None
    from fasttfm.kernels import layer_norm as kernel

    return kernel.sum_programs(rows, width, device)


def adds_bias(x: Tensor) -> bool:
    """Whether residual_layer_norm() adds x_bias to x in passing, so that the product before it had better not."""
    return _by_kernel(chosen(), x)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, x_bias: Tensor | None = None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"layer_norm: x {tuple(x.shape)} must have a last dimension of at least 1 to normalise")
    for name, parameter in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if parameter is None or parameter.shape == x.shape[-1:]:
            continue
        repeated = parameter.dim() == 2 and (parameter.shape[0] == 1 or parameter.stride(0) == 0)  # read_parameters()
        if not repeated or parameter.shape[1:] != x.shape[-1:]:
            raise ValueError(
                f"layer_norm: {name} {tuple(parameter.shape)} must be ({x.shape[-1]},), "
                f"the last dimension of x {tuple(x.shape)}"
            )


# ------------------------------------------------------------------------------------------------------- layer_norm


def _by_kernel(backend: str, *tensors: Tensor) -> bool:
    return _layers.by_kernel(backend, *tensors) and tensors[0].shape[-1] <= _MAX_COLUMNS


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) -> y, mean (M,), rstd (M,), by torch's own kernel, in float32 at least."""
    dtype = _dropped.wide(x.dtype)
    if x.is_cpu and weight is None and x.dtype != dtype:
        weight = torch.ones(x.shape[-1], dtype=dtype)
    # Half-precision x with float32 parameters is a pair that torch takes on the CPU alone, statistics in float32.
    taken = x if x.is_cpu else cast(x, dtype)
    y, mean, rstd = torch.native_layer_norm(taken, [x.shape[-1]], _cast(weight, dtype), _cast(bias, dtype), eps)
    return cast(y, x.dtype), mean.view(-1), rstd.view(-1)


def _normalise_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; the latter two empty where there is no such parameter."""
    # All in float32: on half precision torch's CPU kernel is slower, and its dweight is off by a sixth at 4,096 rows
    # in bfloat16, because it sums in half precision.
    dtype = _dropped.wide(x.dtype)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        cast(dy, dtype),
        cast(x, dtype),
        [x.shape[-1]],
        mean.view(-1, 1),
        rstd.view(-1, 1),
        _cast(weight, dtype),
        _cast(bias, dtype),
        [True, weight is not None, bias is not None],
    )
    none = x.new_empty(0)
    return (
        cast(dx, x.dtype),
        none if weight is None else cast(dweight, weight.dtype),
        none if bias is None else cast(dbias, bias.dtype),
    )


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else cast(parameter, dtype)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, branch: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _layers.rows(x)
    if _by_kernel(backend, x):
        from fasttfm.kernels import layer_norm as kernel

        y, mean, rstd = kernel.layer_norm(rows, weight, bias, eps)
    else:
        y, mean, rstd = _normalise(rows, weight, bias, eps)
    return shaped(y, x), mean, rstd


def _forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, branch: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return (x.new_empty(x.shape), *_fake_statistics(x))


def _fake_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, dtype = x.numel() // x.shape[-1], _dropped.wide(x.dtype)
    return x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)


def _backward(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """ds: the gradient of x from elsewhere, to be added."""
    if _by_kernel(backend, x):
        from fasttfm.kernels import layer_norm as kernel

        dx, dweight, dbias = kernel.layer_norm_backward(
            _layers.rows(dy), None if ds is None else _layers.rows(ds), _layers.rows(x), mean, rstd, weight, bias
        )
    else:
        dx, dweight, dbias = _normalise_backward(_layers.rows(dy), _layers.rows(x), mean, rstd, weight, bias)
        if ds is not None:
            dx += _layers.rows(ds)
    return shaped(dx, x), dweight, dbias


def _backward_fake(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_fake_parameters(x, weight, bias)


def _fake_parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    none = x.new_empty(0)
    return none if weight is None else torch.empty_like(weight), none if bias is None else torch.empty_like(bias)


def _save(ctx: Any, args: tuple, outputs: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _, backend = args
    _, mean, rstd = outputs
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mean, rstd, weight, bias)
    ctx.backend = backend


def _autograd(
    ctx: Any, dy: Tensor | None, _mean: None, _rstd: None, ds: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return ds, None, None, None, None, None
    x, mean, rstd, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = _layer_norm_backward(dy, ds, x, mean, rstd, weight, bias, ctx.backend)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None, None, None


_layer_norm_backward = Operator(
    "layer_norm_backward(Tensor dy, Tensor? ds, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " str backend) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_layer_norm = Operator(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool branch, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    save=_save,
    backward=_autograd,
    again=lambda args, outputs: args[0] if args[4] else None,
)

# ---------------------------------------------------------------------------------------------- residual_layer_norm


def _one_gradient(dtype: torch.dtype, s: Tensor, seed: Tensor | None) -> bool:
    """Whether x and residual have the same gradient, which is then computed once."""
    return dtype == s.dtype and seed is None


def _residual_forward(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    stream: int,
    post_norm: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, residual_rows = _layers.rows(x), _layers.rows(residual)
    if _by_kernel(backend, x, residual):
        from fasttfm.kernels import layer_norm as kernel

        y, s, mean, rstd = kernel.residual_layer_norm(
            rows, x_bias, residual_rows, weight, bias, eps, dropout_p=dropout_p, seed=seed, stream=stream
        )
        keep = x.new_empty(0, dtype=torch.bool)
    else:
        if x_bias is not None:
            rows = rows + cast(x_bias, rows.dtype)
        # the mask costs more to draw than to keep on the CPU: a byte an element until the backward pass
        keep = _dropped.kept(rows, dropout_p, seed, stream)
        s = _layers.add_kept(rows, residual_rows, keep, dropout_p)
        y, mean, rstd = _normalise(s, weight, bias, eps)
        y = cast(y, x.dtype)
    return shaped(y, x), shaped(s, x), mean, rstd, keep


def _fake_keep(x: Tensor, residual: Tensor, seed: Tensor | None, backend: str) -> Tensor:
    backend = backend if x.shape[-1] <= _MAX_COLUMNS else "torch"
    return _layers.fake_keep(x, residual, seed, backend)


def _residual_forward_fake(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, seed, _, _, backend = options
    y, s = x.new_empty(x.shape), residual.new_empty(x.shape)
    return y, s, *_fake_statistics(residual), _fake_keep(x, residual, seed, backend)


def _residual_backward(
    dy: Tensor,
    dy2: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    keep: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    stream: int,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (in dtype), residual, weight, bias and x_bias; x's is empty where it equals residual's."""
    same = _one_gradient(dtype, s, seed)
    if not keep.numel() and _by_kernel(backend, s, dy):
        from fasttfm.kernels import layer_norm as kernel

        dx, dresidual, *others = kernel.residual_layer_norm_backward(
            _layers.rows(dy),
            None if dy2 is None else _layers.rows(dy2),
            None if ds is None else _layers.rows(ds),
            _layers.rows(s),
            mean,
            rstd,
            weight,
            bias,
            x_bias,
            dropout_p=dropout_p,
            seed=seed,
            stream=stream,
            x_dtype=None if same else dtype,
        )
        return s.new_empty(0) if dx is None else shaped(dx, s), shaped(dresidual, s), *others
    if dy2 is not None:
        dy = dy + dy2
    dresidual, dweight, dbias = _normalise_backward(_layers.rows(dy), _layers.rows(s), mean, rstd, weight, bias)
    if ds is not None:
        dresidual += _layers.rows(ds)
    dx = None if same else _layers.branch_gradient(dresidual, keep, dropout_p, seed, stream, dtype)
    dx_bias = s.new_empty(0)
    if x_bias is not None:
        dx_bias = cast((dresidual if dx is None else dx).sum(0, dtype=_dropped.wide(dtype)), x_bias.dtype)
    return s.new_empty(0) if dx is None else shaped(dx, s), shaped(dresidual, s), dweight, dbias, dx_bias


def _residual_backward_fake(
    dy: Tensor,
    dy2: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    _, _, seed, _, dtype, _ = options
    dx = s.new_empty(0) if _one_gradient(dtype, s, seed) else s.new_empty(s.shape, dtype=dtype)
    dx_bias = s.new_empty(0) if x_bias is None else torch.empty_like(x_bias)
    return dx, s.new_empty(s.shape), *_fake_parameters(s, weight, bias), dx_bias


def _residual_save(ctx: Any, args: tuple, outputs: tuple[Tensor, ...]) -> None:
    x, x_bias, _, weight, bias, _, dropout_p, seed, stream, _, backend = args
    _, s, mean, rstd, keep = outputs
    ctx.mark_non_differentiable(mean, rstd, keep)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(s, mean, rstd, weight, bias, x_bias, keep, seed)
    ctx.dropout = (dropout_p, stream, x.dtype, backend)


def _residual_autograd(
    ctx: Any,
    dy: Tensor | None,
    ds: Tensor | None,
    _mean: None,
    _rstd: None,
    _keep: None,
    dy2: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    s, mean, rstd, weight, bias, x_bias, keep, seed = ctx.saved_tensors
    dropout_p, stream, dtype, backend = ctx.dropout
    if dy is None:
        dy, dy2 = dy2, None
    if dy is None:  # y went unused
        dy = s.new_zeros(s.shape, dtype=dtype)
    dx, dresidual, dweight, dbias, dx_bias = _residual_layer_norm_backward(
        dy, dy2, ds, s, mean, rstd, weight, bias, x_bias, keep, dropout_p, seed, stream, dtype, backend
    )
    if _one_gradient(dtype, s, seed):
        dx = dresidual
    dweight, dbias = None if weight is None else dweight, None if bias is None else dbias
    dx_bias = None if x_bias is None else dx_bias
    return dx, dx_bias, dresidual, dweight, dbias, None, None, None, None, None, None


_residual_layer_norm_backward = Operator(
    "residual_layer_norm_backward(Tensor dy, Tensor? dy2, Tensor? ds, Tensor s, Tensor mean, Tensor rstd,"
    " Tensor? weight, Tensor? bias, Tensor? x_bias, Tensor keep, float dropout_p, Tensor? seed, int stream,"
    " ScalarType dtype, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _residual_backward,
    _residual_backward_fake,
)
_residual_layer_norm = Operator(
    "residual_layer_norm(Tensor x, Tensor? x_bias, Tensor residual, Tensor? weight, Tensor? bias, float eps,"
    " float dropout_p, Tensor? seed, int stream, bool post_norm, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _residual_forward,
    _residual_forward_fake,
    save=_residual_save,
    backward=_residual_autograd,
    again=lambda args, outputs: outputs[0] if args[9] else None,
)
