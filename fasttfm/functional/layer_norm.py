"""LayerNorm (Ba et al. 2016), alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.dropout import wide
from fasttfm.functional.operator import Gradients, Operator
from fasttfm.functional.rows import as_rows, shaped
from fasttfm.functional.signature import names_arguments
from fasttfm.kernels.tiles.rows import MAX_COLUMNS


@names_arguments
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016).

    x (..., N) of any floating dtype and strides; weight and bias (N,) of any floating dtype, or None. Everything is
    computed in float32 for half precision. Returns (..., N) in x's dtype, under autocast too, so that the residual
    stream keeps its dtype. Raises ValueError for shapes that do not agree.
    """
    check(x, weight, bias)
    return _layer_norm(x, weight, bias, eps, False, chosen())[0]


@names_arguments
def branch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x), x): where a residual stream begins in a norm (pre-norm models).

    As layer_norm() in all else; gradients of both outputs flow back in one pass, where two uses of x would be added.
    """
    check(x, weight, bias)
    y, _, _, *again = _layer_norm(x, weight, bias, eps, True, chosen())
    return y, again[0] if again else x


def norm_route(choice: str, *tensors: Tensor) -> str:
    """The route of a norm of these tensors (..., N); choice as kernel_route() takes it."""
    route = kernel_route(choice, *tensors)
    return route if route == "torch" or tensors[0].shape[-1] <= MAX_COLUMNS else "torch"


def check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, x_bias: Tensor | None = None, *residual: Tensor,
    name: str = "layer_norm",
) -> None:  # fmt: skip
    """Raises ValueError for shapes that do not agree; residual: one, or none; name: of the norm, for the message."""
    columns = x.shape[-1:]
    if not columns or columns[0] == 0:
        raise ValueError(f"{name}: x {tuple(x.shape)} must have a last dimension of at least 1 to normalise")
    for parameter in (weight, bias, x_bias):
        if parameter is None or parameter.shape == columns:
            continue
        parts = parameter.dim() == 2 and (parameter.shape[0] == 1 or parameter.stride(0) == 0)  # read_parameters()
        if not parts or name == "rms_norm" or parameter.shape[1:] != columns:
            wrong = "weight" if parameter is weight else "bias" if parameter is bias else "x_bias"
            raise ValueError(
                f"{name}: {wrong} {tuple(parameter.shape)} must be ({columns[0]},), "
                f"the last dimension of x {tuple(x.shape)}"
            )
    for other in residual:
        if x.shape != other.shape:
            raise ValueError(f"x {tuple(x.shape)} and residual {tuple(other.shape)} must have one shape")


class _Norm(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    branch: bool
    route: str


class Normalised(NamedTuple):
    """Tensors that a norm leaves for its backward pass."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None


class _NormSaved(NamedTuple):
    norm: Normalised
    route: str


class _NormBackward(NamedTuple):
    dy: Tensor
    ds: Tensor | None
    """The gradient of x from its other use, to be added."""
    saved: _NormSaved


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) -> y, mean (M,), rstd (M,), by torch's own kernel, in float32 at least."""
    dtype = wide(x.dtype)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dim() != 1:
            raise ValueError(f"layer_norm: {name} {tuple(parameter.shape)} is in parts, which only kernels add up")
    if x.is_cpu and weight is None and x.dtype != dtype:
        weight = torch.ones(x.shape[-1], dtype=dtype)
    # Half-precision x with float32 parameters is a pair that torch takes on the CPU alone, statistics in float32.
    taken = x if x.is_cpu or x.dtype is dtype else x.to(dtype)
    y, mean, rstd = torch.native_layer_norm(taken, [x.shape[-1]], *_cast(weight, bias, dtype), eps)
    return y if y.dtype is x.dtype else y.to(x.dtype), mean.view(-1), rstd.view(-1)


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
        dy if dy.dtype is dtype else dy.to(dtype),
        x,
        [x.shape[-1]],
        mean,
        rstd.view(-1, 1),
        *_cast(weight, bias, dtype),
        [True, weight is not None, bias is not None],
    )
    gradients = [dx, dweight, dbias]
    for place, like in enumerate((saved.x, weight, bias)):
        if like is None:
            gradients[place] = x.new_empty(0)
        elif gradients[place].dtype is not like.dtype:
            gradients[place] = gradients[place].to(like.dtype)
    return gradients[0], gradients[1], gradients[2]


def _cast(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Both in dtype."""
    weight = weight if weight is None or weight.dtype is dtype else weight.to(dtype)
    return weight, bias if bias is None or bias.dtype is dtype else bias.to(dtype)


def _compute(call: _Norm) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(call.x)
    if call.route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        y, _, mean, rstd = kernel.forward(rows, call.weight, call.bias, call.eps)
    else:
        y, mean, rstd = normalise(rows, call.weight, call.bias, call.eps)
    return shaped(y, call.x), mean, rstd


def _fake(call: _Norm) -> tuple[Tensor, Tensor, Tensor]:
    return (call.x.new_empty(call.x.shape), *fake_statistics(call.x))


def fake_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, dtype = x.numel() // x.shape[-1], wide(x.dtype)
    return x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)


def _save(call: _Norm, outputs: tuple[Tensor, ...]) -> _NormSaved:
    _, mean, rstd = outputs
    return _NormSaved(Normalised(call.x, mean, rstd, call.weight, call.bias), call.route)


def _differentiate(
    saved: _NormSaved, wanted: _Norm, dy: Tensor | None, _mean: None, _rstd: None, ds: Tensor | None = None
) -> Gradients:
    if dy is None:
        return {"x": ds}
    dx, dweight, dbias = _layer_norm_backward(dy, ds, saved)
    norm = saved.norm
    return {"x": dx, "weight": None if norm.weight is None else dweight, "bias": None if norm.bias is None else dbias}


def _compute_backward(call: _NormBackward) -> tuple[Tensor, Tensor, Tensor]:
    saved = call.saved.norm
    dy, ds = as_rows(call.dy), None if call.ds is None else as_rows(call.ds)
    if call.saved.route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        x, mean, rstd, weight, bias = saved
        _, dx, dweight, dbias, _ = kernel.backward(dy, None, ds, as_rows(x), mean, rstd, weight, bias, None)
    else:
        dx, dweight, dbias = normalise_backward(dy, saved)
        if ds is not None:
            dx += ds
    return shaped(dx, saved.x), dweight, dbias


def _fake_backward(call: _NormBackward) -> tuple[Tensor, Tensor, Tensor]:
    saved = call.saved.norm
    return saved.x.new_empty(saved.x.shape), *fake_parameters(saved)


def fake_parameters(saved: Normalised) -> tuple[Tensor, Tensor]:
    return tuple(saved.x.new_empty(0) if p is None else torch.empty_like(p) for p in saved[3:])  # type: ignore[return-value]


_layer_norm_backward = Operator(
    "layer_norm_backward", _NormBackward, "(Tensor, Tensor, Tensor)", _compute_backward, _fake_backward
).call
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
).call
