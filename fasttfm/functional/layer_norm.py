"""LayerNorm, alone and fused with the residual connection and its dropout.

Source: Ba et al. 2016; placement of dropout, Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.cpu import step_passes, training_passes
from fasttfm.cpu.linear import frozen
from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.dropout import Dropout, dropout_for, fake_keep_mask, keep_mask, wide
from fasttfm.functional.operator import Gradients, Operator
from fasttfm.functional.rows import add_kept, as_rows, branch_gradient, cast, shaped
from fasttfm.functional.signature import names_arguments
from fasttfm.kernels.tiles.rows import MAX_COLUMNS


@names_arguments
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016).

    x (..., N) of any floating dtype and strides; weight and bias (N,) of any floating dtype, or None. Everything is
    computed in float32 for half precision. Returns (..., N) in x's dtype, under autocast too, so that the residual
    stream keeps its dtype. Raises ValueError for shapes that do not agree.
    """
    _check(x, weight, bias)
    return _layer_norm(x, weight, bias, eps, False, chosen())[0]


@names_arguments
def branch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x), x): where a residual stream begins in a norm (pre-norm models).

    As layer_norm() in all else; gradients of both outputs flow back in one pass, where two uses of x would be added.
    """
    _check(x, weight, bias)
    y, _, _, *again = _layer_norm(x, weight, bias, eps, True, chosen())
    return y, again[0] if again else x


@names_arguments
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
    site: int = 0,
    post_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x + x_bias) and y = layer_norm(s) in one pass; returns (y, the next residual).

    x, residual (..., N), their dtypes may differ (a bfloat16 branch on a float32 residual stream); y comes in x's
    dtype, s in residual's. x_bias (N,): the bias of the product that made x, if that left it out; a kernel adds it, and
    sums its gradient, without reading anything more. The next residual is s for a pre-norm model, and y once more with
    post_norm (the paper's order); gradients of both outputs flow back in one pass. dropout_p in [0, 1], rounded to
    1/256; seed (1,) int64 on x's device, drawn from torch's generator when None; site, below 2^31, tells the dropouts
    of one model apart. Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    _check(x, weight, bias, x_bias)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape")
    dropout = dropout_for(x.device, dropout_p, seed, site)
    y, s, _, _, _, *again = _residual_layer_norm(x, x_bias, residual, weight, bias, eps, dropout, post_norm, chosen())
    if post_norm:
        return y, again[0] if again else y
    return y, s


def norm_route(choice: str, *tensors: Tensor) -> str:
    """The route of a norm of these tensors (..., N); choice as kernel_route() takes it."""
    route = kernel_route(choice, *tensors)
    return route if route == "torch" or tensors[0].shape[-1] <= MAX_COLUMNS else "torch"


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, x_bias: Tensor | None = None) -> None:
    columns = x.shape[-1:]
    if not columns or columns[0] == 0:
        raise ValueError(f"layer_norm: x {tuple(x.shape)} must have a last dimension of at least 1 to normalise")
    for parameter in (weight, bias, x_bias):
        if parameter is None or parameter.shape == columns:
            continue
        repeated = parameter.dim() == 2 and (parameter.shape[0] == 1 or parameter.stride(0) == 0)  # read_parameters()
        if not repeated or parameter.shape[1:] != columns:
            name = "weight" if parameter is weight else "bias" if parameter is bias else "x_bias"
            raise ValueError(
                f"layer_norm: {name} {tuple(parameter.shape)} must be ({columns[0]},), "
                f"the last dimension of x {tuple(x.shape)}"
            )


# ------------------------------------------------------------------------------------------------------- layer_norm


class _Norm(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    branch: bool
    route: str


class _Saved(NamedTuple):
    """Tensors that a norm leaves for its backward pass."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None


class _NormSaved(NamedTuple):
    norm: _Saved
    route: str


class _NormBackward(NamedTuple):
    dy: Tensor
    ds: Tensor | None
    """The gradient of x from its other use, to be added."""
    saved: _NormSaved


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) -> y, mean (M,), rstd (M,), by torch's own kernel, in float32 at least."""
    dtype = wide(x.dtype)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dim() != 1:
            raise ValueError(f"layer_norm: {name} {tuple(parameter.shape)} is in parts, which only kernels add up")
    if x.is_cpu and weight is None and x.dtype != dtype:
        weight = torch.ones(x.shape[-1], dtype=dtype)
    # Half-precision x with float32 parameters is a pair that torch takes on the CPU alone, statistics in float32.
    taken = x if x.is_cpu else cast(x, dtype)
    y, mean, rstd = torch.native_layer_norm(taken, [x.shape[-1]], _cast(weight, dtype), _cast(bias, dtype), eps)
    return cast(y, x.dtype), mean.view(-1), rstd.view(-1)


def _normalise_backward(dy: Tensor, saved: _Saved) -> tuple[Tensor, Tensor, Tensor]:
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
        _cast(weight, dtype),
        _cast(bias, dtype),
        [True, weight is not None, bias is not None],
    )
    absent = x.new_empty(0)
    return (
        cast(dx, saved.x.dtype),
        absent if weight is None else cast(dweight, weight.dtype),
        absent if bias is None else cast(dbias, bias.dtype),
    )


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else cast(parameter, dtype)


def _optional_rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_rows(x)


def _compute(call: _Norm) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(call.x)
    if call.route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        y, _, mean, rstd = kernel.forward(rows, call.weight, call.bias, call.eps)
    else:
        y, mean, rstd = _normalise(rows, call.weight, call.bias, call.eps)
    return shaped(y, call.x), mean, rstd


def _fake(call: _Norm) -> tuple[Tensor, Tensor, Tensor]:
    return (call.x.new_empty(call.x.shape), *_fake_statistics(call.x))


def _fake_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, dtype = x.numel() // x.shape[-1], wide(x.dtype)
    return x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)


def _save(call: _Norm, outputs: tuple[Tensor, ...]) -> _NormSaved:
    _, mean, rstd = outputs
    return _NormSaved(_Saved(call.x, mean, rstd, call.weight, call.bias), call.route)


def _differentiate(
    saved: _NormSaved, wanted: _Norm, dy: Tensor | None, _mean: None, _rstd: None, ds: Tensor | None = None
) -> Gradients:
    if dy is None:
        return {"x": ds}
    dx, dweight, dbias = _layer_norm_backward(dy, ds, saved)
    return {"x": dx, **_parameter_gradients(saved.norm, dweight, dbias)}


def _parameter_gradients(saved: _Saved, dweight: Tensor, dbias: Tensor) -> dict[str, Tensor | None]:
    return {"weight": None if saved.weight is None else dweight, "bias": None if saved.bias is None else dbias}


def _compute_backward(call: _NormBackward) -> tuple[Tensor, Tensor, Tensor]:
    saved = call.saved.norm
    dy, ds = as_rows(call.dy), _optional_rows(call.ds)
    if call.saved.route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        x, mean, rstd, weight, bias = saved
        _, dx, dweight, dbias, _ = kernel.backward(dy, None, ds, as_rows(x), mean, rstd, weight, bias, None)
    else:
        dx, dweight, dbias = _normalise_backward(dy, saved)
        if ds is not None:
            dx += ds
    return shaped(dx, saved.x), dweight, dbias


def _fake_backward(call: _NormBackward) -> tuple[Tensor, Tensor, Tensor]:
    saved = call.saved.norm
    return saved.x.new_empty(saved.x.shape), *_fake_parameters(saved)


def _fake_parameters(saved: _Saved) -> tuple[Tensor, Tensor]:
    absent = saved.x.new_empty(0)
    return (
        absent if saved.weight is None else torch.empty_like(saved.weight),
        absent if saved.bias is None else torch.empty_like(saved.bias),
    )


_layer_norm_backward = Operator(
    "layer_norm_backward", _NormBackward, "(Tensor, Tensor, Tensor)", _compute_backward, _fake_backward
)
_layer_norm = Operator(
    "layer_norm",
    _Norm,
    "(Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    decide=lambda call: norm_route(call.route, call.x),
    save=_save,
    backward=_differentiate,
    again=lambda call, outputs: call.x if call.branch else None,
    internal=2,
    rows=("x",),
)

# ---------------------------------------------------------------------------------------------- residual_layer_norm


class _ResidualNorm(NamedTuple):
    x: Tensor
    x_bias: Tensor | None
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dropout: Dropout
    post_norm: bool
    route: str


class _ResidualSaved(NamedTuple):
    norm: _Saved
    """Of the sum s."""
    x_bias: Tensor | None
    keep: Tensor
    dropout: Dropout
    dtype: torch.dtype
    """Of x."""
    route: str

    @property
    def one_gradient(self) -> bool:
        """True if x and residual have the same gradient, which is then computed once."""
        return self.dtype == self.norm.x.dtype and self.dropout.seed is None


class _ResidualBackward(NamedTuple):
    dy: Tensor
    dy2: Tensor | None
    ds: Tensor | None
    saved: _ResidualSaved


def _residual_compute(call: _ResidualNorm) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, x_bias, residual, weight, bias, eps, dropout, _, route = call
    rows, residual = as_rows(x), as_rows(residual)
    if route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        y, s, mean, rstd = kernel.forward(
            rows, weight, bias, eps, residual=residual, x_bias=x_bias, **dropout._asdict()
        )
        keep = x.new_empty(0, dtype=torch.bool)
    else:
        if x_bias is not None:
            rows = rows + cast(x_bias, rows.dtype)
        if dropout.seed is None and weight is not None and bias is not None and frozen(rows):
            alike = residual.dtype == weight.dtype == bias.dtype == rows.dtype
            if alike and step_passes.takes(rows):
                y, s = step_passes.add_layer_norm(rows, residual, weight, bias, eps)
                absent = x.new_empty(0)
                return shaped(y, x), shaped(s, x), absent, absent, x.new_empty(0, dtype=torch.bool)
        name = "residual_layer_norm" if dropout.active else "residual_layer_norm_without_dropout"
        if training_passes.takes_norm(name, rows, residual, weight, bias):
            y, s, *saved = training_passes.residual_layer_norm(rows, residual, weight, bias, eps, *dropout)  # type: ignore[arg-type]
            return shaped(y, x), shaped(s, x), *saved  # type: ignore[return-value]
        # the mask costs more to draw than to keep on the CPU: a byte an element until the backward pass
        keep = keep_mask(rows, dropout)
        s = add_kept(rows, residual, keep, dropout.dropout_p)
        y, mean, rstd = _normalise(s, weight, bias, eps)
        y = cast(y, x.dtype)
    return shaped(y, x), shaped(s, x), mean, rstd, keep


def _residual_fake(call: _ResidualNorm) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, residual = call.x, call.residual
    y, s = x.new_empty(x.shape), residual.new_empty(x.shape)
    return y, s, *_fake_statistics(residual), fake_keep_mask(x, call.dropout, call.route)


def _residual_save(call: _ResidualNorm, outputs: tuple[Tensor, ...]) -> _ResidualSaved:
    _, s, mean, rstd, keep = outputs
    norm = _Saved(s, mean, rstd, call.weight, call.bias)
    return _ResidualSaved(norm, call.x_bias, keep, call.dropout, call.x.dtype, call.route)


def _residual_differentiate(
    saved: _ResidualSaved,
    wanted: _ResidualNorm,
    dy: Tensor | None,
    ds: Tensor | None,
    _mean: None,
    _rstd: None,
    _keep: None,
    dy2: Tensor | None = None,
) -> Gradients:
    if dy is None:
        dy, dy2 = dy2, None
    if dy is None:  # y went unused
        dy = saved.norm.x.new_zeros(saved.norm.x.shape, dtype=saved.dtype)
    dx, dresidual, dweight, dbias, dx_bias = _residual_layer_norm_backward(dy, dy2, ds, saved)
    return {
        "x": dresidual if saved.one_gradient else dx,
        "x_bias": None if saved.x_bias is None else dx_bias,
        "residual": dresidual,
        **_parameter_gradients(saved.norm, dweight, dbias),
    }


def _residual_compute_backward(call: _ResidualBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (in its dtype), residual, weight, bias and x_bias; x's is empty where it equals residual's."""
    saved, s = call.saved, call.saved.norm.x
    dy, dy2, ds = as_rows(call.dy), _optional_rows(call.dy2), _optional_rows(call.ds)
    absent = s.new_empty(0)
    if saved.route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        _, mean, rstd, weight, bias = saved.norm
        dx, dresidual, dweight, dbias, dx_bias = kernel.backward(
            dy, dy2, ds, as_rows(s), mean, rstd, weight, bias, saved.x_bias,
            x_dtype=None if saved.one_gradient else saved.dtype, **saved.dropout._asdict(),
        )  # fmt: skip
        return absent if dx is None else shaped(dx, s), shaped(dresidual, s), dweight, dbias, dx_bias
    if dy2 is not None:
        dy = dy + dy2
    dx, dresidual, dweight, dbias = _residual_rows_backward(dy, ds, saved)
    dx_bias = absent
    if saved.x_bias is not None:
        dx_bias = cast((dresidual if dx is None else dx).sum(0, dtype=wide(saved.dtype)), saved.x_bias.dtype)
    return absent if dx is None else shaped(dx, s), shaped(dresidual, s), dweight, dbias, dx_bias


def _residual_rows_backward(
    dy: Tensor, ds: Tensor | None, saved: _ResidualSaved
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """On PyTorch's route the gradients of x, None where it is residual's, of residual, weight and bias; dy in x's
    dtype."""
    s, mean, rstd, weight, bias = saved.norm
    rows = as_rows(s)
    dx: Tensor | None
    alike = dy.dtype == saved.dtype and (ds is None or ds.dtype == rows.dtype)
    name = "residual_layer_norm_gradient"
    if weight is not None and alike and training_passes.takes_norm(name, dy, rows, weight, bias):
        dx, dresidual, dweight, dbias = training_passes.residual_layer_norm_gradient(
            dy, ds, rows, (mean, rstd), weight, saved.keep, saved.dropout.scale
        )
        return None if saved.one_gradient else dx, dresidual, dweight, dbias
    dresidual, dweight, dbias = _normalise_backward(dy, saved.norm)
    if ds is not None:
        dresidual += ds
    dx = None if saved.one_gradient else branch_gradient(dresidual, saved.keep, saved.dropout, saved.dtype)
    return dx, dresidual, dweight, dbias


def _residual_fake_backward(call: _ResidualBackward) -> tuple[Tensor, ...]:
    saved, s = call.saved, call.saved.norm.x
    dx = s.new_empty(0) if saved.one_gradient else s.new_empty(s.shape, dtype=saved.dtype)
    dx_bias = s.new_empty(0) if saved.x_bias is None else torch.empty_like(saved.x_bias)
    return dx, s.new_empty(s.shape), *_fake_parameters(saved.norm), dx_bias


_residual_layer_norm_backward = Operator(
    "residual_layer_norm_backward",
    _ResidualBackward,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _residual_compute_backward,
    _residual_fake_backward,
)
_residual_layer_norm = Operator(
    "residual_layer_norm",
    _ResidualNorm,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _residual_compute,
    _residual_fake,
    decide=lambda call: norm_route(call.route, call.x, call.residual),
    save=_residual_save,
    backward=_residual_differentiate,
    internal=3,
    rows=("x", "residual"),
    differentiable=2,
    again=lambda call, outputs: outputs[0] if call.post_norm else None,
)
