"""The residual connection, its dropout and the norm that reads their sum, in one pass; and LayerNorm and RMSNorm alone.

They are one operator, as they are one kernel: RMSNorm leaves out the mean and the bias.
Source: Ba et al. 2016; Zhang and Sennrich 2019, section 4, as T5 and Llama normalise; placement of dropout, Vaswani et
al. 2017 section 5.4.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional import backends, torch_norms
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.derivative import pulled_back, refuse_parts
from fasttfm.functional.dropout import (
    LEAST_P,
    draw_seed,
    dropout_for,
    wide,
)
from fasttfm.functional.norm_call import Backward, Call, Normalised, Saved
from fasttfm.functional.operator import Operator, without_views
from fasttfm.functional.rows import cast
from fasttfm.functional.signature import names_arguments
from fasttfm.kernels.tiles.rows import MAX_COLUMNS

ADDED_NORM = 1 << 20
"""Numbers from which on a pre-norm residual without dropout and its LayerNorm are one operator in float32 on a CPU
while gradients are kept: below, and for post-norm, torch's own two take less. On two cores of an AMD EPYC with AVX2
alone forward and backward 2.1 against 2.6 ms with (1024, 512), 18.9 against 16.6 with (8192, 512)."""


@names_arguments
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016).

    x (..., N) of any floating dtype and strides; weight and bias (N,) of any floating dtype, or None. Everything is
    computed in float32 for half precision. Returns (..., N) in x's dtype, under autocast too, so that the residual
    stream keeps its dtype. Raises ValueError for shapes that do not agree.
    """
    return _residual_norm(x, None, None, weight, bias, None, eps, 0.0, 0, False, False, backends.current)[0]


@names_arguments
def branch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x), x): where a residual stream begins in a norm (pre-norm models).

    As layer_norm() in all else; gradients of both outputs flow back in one pass, where two uses of x would be added.
    """
    y, _, *again = _residual_norm(x, None, None, weight, bias, None, eps, 0.0, 0, True, False, backends.current)
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
    if residual is None:
        raise TypeError("residual is None: a tensor is needed")
    if dropout_p <= LEAST_P:
        seed = None
    elif seed is None:
        seed = draw_seed(x.device)
    y, s, *again = _residual_norm(
        x, x_bias, residual, weight, bias, seed, eps, dropout_p, site, post_norm, False, backends.current
    )
    if post_norm:
        return y, again[0] if again else y
    return y, s


@names_arguments
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, equation 4).

    x (..., N) of any floating dtype and strides; weight (N,) of any floating dtype, or None. Everything is computed in
    float32 for half precision and rounded once. Returns (..., N) in x's dtype, under autocast too. Raises ValueError
    for shapes that do not agree.
    """
    return _residual_norm(x, None, None, weight, None, None, eps, 0.0, 0, False, True, backends.current)[0]


@names_arguments
def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x) and y = rms_norm(s) in one pass; returns (y, s).

    x, residual (..., N), their dtypes may differ; y comes in x's dtype, s in residual's. dropout_p in [0, 1], rounded
    to 1/256; seed (1,) int64 on x's device, drawn from torch's generator when None; site, below 2^31, tells the
    dropouts of one model apart. Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    if residual is None:
        raise TypeError("residual is None: a tensor is needed")
    if dropout_p <= LEAST_P:
        seed = None
    elif seed is None:
        seed = draw_seed(x.device)
    y, s = _residual_norm(x, None, residual, weight, None, seed, eps, dropout_p, site, False, True, backends.current)
    return y, s


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


def _checks(call: Call) -> None:
    joined = [] if call.residual is None else [call.residual]
    check(call.x, call.weight, call.bias, call.x_bias, *joined, name="rms_norm" if call.rms else "layer_norm")
    dropout_for(call.x.device, call.dropout_p, call.seed, call.site)


def _decide(call: Call) -> str:
    if call.route == "torch":
        return call.route
    return norm_route(call.route, call.x, call.x if call.residual is None else call.residual)


def _native(call: Call, direct: bool) -> Callable[[Call], tuple[Tensor, ...]] | None:
    """PyTorch's own norm, gradients too, in float32 on a CPU: it has the kernels of our route, and the same bits."""
    x, x_bias, residual, weight, bias = call[:5]
    if not direct or weight is None or bias is None or call.rms or backends.current != "auto" or not x.is_cpu:
        return None
    if not (x.dtype is weight.dtype is bias.dtype is torch.float32 and weight.dim() == bias.dim() == 1):
        return None
    if residual is None:
        return None if call.twice else _layer_norm_alone
    added = call.twice or x.numel() < ADDED_NORM
    alike = residual.dtype is torch.float32 and (x_bias is None or x_bias.dim() == 1)
    return _added_layer_norm if alike and added and call.seed is None and torch.is_grad_enabled() else None


def _layer_norm_alone(call: Call) -> tuple[Tensor]:
    x, _, _, weight, bias, _, eps, *_ = call
    return (torch.layer_norm(x, x.shape[-1:], weight, bias, eps),)


def _added_layer_norm(call: Call) -> tuple[Tensor, Tensor]:
    x, x_bias, residual, weight, bias = call[:5]
    s = residual + (x if x_bias is None else x + cast(x_bias, x.dtype))  # type: ignore[operator]
    return torch.layer_norm(s, s.shape[-1:], weight, bias, call.eps), s


def _plan(call: Call) -> Callable[[Call], tuple[Tensor | None, ...]]:
    """y, s (None without a residual), mean and rstd (M,), and dropout's mask, None but on PyTorch's route.

    RMSNorm gives rstd in the place of a mean.
    """
    if call.route == "torch":
        return without_views(torch_norms.plan(call), internal=3)
    from fasttfm.kernels import layer_norm as kernel

    x, x_bias, residual, weight, bias, seed, _, dropout_p, *_ = call
    rate = 0.0 if seed is None else dropout_p
    forward = kernel.Forward(x, residual, x_bias, weight, bias, rms=call.rms, dropout_p=rate)
    joined = residual is not None
    copied = not (x.is_contiguous() and (residual is None or residual.is_contiguous()))

    def compute(call: Call) -> tuple[Tensor | None, ...]:
        x, x_bias, residual, weight, bias, seed, eps, _, site, _, rms, _ = call
        if copied:
            x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        y, s, mean, rstd = forward(x, residual, x_bias, weight, bias, eps, seed, site)
        return y, s if joined else None, rstd if rms else mean, rstd, None

    return compute


def _fake(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, residual = call.x, call.residual
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    rows, dtype = x.numel() // x.shape[-1], wide((x if residual is None else residual).dtype)
    mean, rstd = x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)
    kept = call.seed is not None and call.route == "torch"
    return (
        x.new_empty(x.shape),
        s,
        mean,
        rstd,
        x.new_empty((rows, x.shape[-1]), dtype=torch.bool) if kept else x.new_empty(0),
    )


def _save(call: Call, outputs: tuple[Tensor | None, ...]) -> tuple:
    x, x_bias, residual, weight, bias, seed, eps, dropout_p, site, _, rms, route = call
    _, s, mean, rstd, keep = outputs
    joined = residual is not None
    return (
        s if joined else x, mean, rstd, x_bias, weight, bias, keep, seed, dropout_p, site, x.dtype, eps, joined, rms,
        route,
    )  # fmt: skip


def _differentiate(
    backward: Callable[..., tuple], saved: Saved, wanted: Call, dy: Tensor | None, ds: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    dy2 = others[-1] if others else None  # of what is returned once more, or of the number of rows' deviations
    joined = saved.joined
    if not joined:
        ds, dy2 = dy2, None
    if dy is None:
        dy, dy2 = dy2, None
    if dy is None:  # y went unused
        dy = saved.s.new_zeros(saved.s.shape, dtype=saved.dtype)
    dx, dresidual, dx_bias, dweight, dbias = backward(dy, dy2, ds, saved)
    return (
        dx if not saved.one_gradient else dresidual,
        dx_bias if saved.x_bias is not None else None,
        dresidual if joined else None,
        dweight if saved.weight is not None else None,
        dbias if saved.bias is not None else None,
        None,
    )


def _plan_backward(call: Backward) -> Callable[[Backward], tuple[Tensor | None, ...]]:
    """Gradients of x (in its dtype), residual, x_bias, weight and bias; x's is None where it equals residual's, and so
    is that of what is not there."""
    saved = call.saved
    if saved.route == "torch":
        return without_views(torch_norms.plan_backward(call))
    from fasttfm.kernels import layer_norm as kernel

    backward = kernel.Backward(
        saved.s, saved.x_bias, saved.weight, saved.bias, x_dtype=None if saved.one_gradient else saved.dtype,
        rms=saved.rms, dropout_p=saved.dropout.dropout_p,
    )  # fmt: skip
    copied = not all(x is None or x.is_contiguous() for x in (*call[:3], saved.s))

    def compute(call: Backward) -> tuple[Tensor | None, ...]:
        dy, dy2, ds, saved = call
        s, mean, rstd, x_bias, weight, bias, _, seed, _, site, *_ = saved
        if copied:
            dy, s = dy.contiguous(), s.contiguous()
            dy2, ds = (None if x is None else x.contiguous() for x in (dy2, ds))
        return backward(dy, dy2, ds, s, mean, rstd, x_bias, weight, bias, seed, site)

    return compute


def _fake_backward(call: Backward) -> tuple[Tensor, ...]:
    dy, saved, s = call.dy, call.saved, call.saved.s
    dx = dy.new_empty(0) if saved.one_gradient else s.new_empty(s.shape, dtype=saved.dtype)
    parameters = saved.x_bias, saved.weight, saved.bias
    return dx, s.new_empty(s.shape), *(dy.new_empty(0) if p is None else torch.empty_like(p) for p in parameters)


def _reference_backward(call: Backward) -> tuple[Tensor, ...]:
    dy, dy2, ds, saved = call
    s = saved.s
    refuse_parts(saved.weight, saved.bias, saved.x_bias)

    def normalised(norm: Normalised) -> Tensor:
        x, _, _, weight, bias = norm
        y = reference.rms_norm(x, weight, saved.eps) if saved.rms else reference.layer_norm(x, weight, bias, saved.eps)
        return y.to(saved.dtype)

    dy = dy if dy2 is None else dy + dy2
    dresidual, dweight, dbias = pulled_back(normalised, saved.norm, ("x", "weight", "bias"), dy)
    dresidual = dresidual if ds is None else dresidual + ds
    branch = reference.dropout(dresidual.to(wide(s.dtype)), *saved.dropout).to(saved.dtype)
    dx_bias = s.new_empty(0)
    if saved.x_bias is not None:
        dx_bias = branch.flatten(0, -2).sum(0, dtype=wide(saved.dtype)).to(saved.x_bias.dtype)
    return s.new_empty(0) if saved.one_gradient else branch, dresidual, dx_bias, dweight, dbias


_residual_norm_backward = Operator(
    "residual_norm_backward", Backward, "(Tensor, Tensor, Tensor, Tensor, Tensor)", _plan_backward, _fake_backward,
    reference=_reference_backward, leading=3,
)  # fmt: skip
OPERATOR = Operator(
    "residual_norm",
    Call,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _plan,
    _fake,
    checks=_checks,
    native=_native,
    decide=_decide,
    save=_save,
    saved=Saved,
    backward=_differentiate,
    derivative=_residual_norm_backward,
    visible=2,
    rows=("x", "residual"),
    differentiable=2,
    free=("site",),
    again=lambda call, outputs: (call.x if call.residual is None else outputs[0]) if call.twice else None,
)
_residual_norm = OPERATOR.call
