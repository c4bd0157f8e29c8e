"""LayerNorm and RMSNorm, alone or fused with the residual connection and its dropout.

All are one operator and one kernel: RMSNorm leaves out the mean and the bias.
Source: Ba et al. 2016; Zhang and Sennrich 2019, section 4, as in T5 and Llama; placement of dropout, Vaswani et al.
2017 section 5.4.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional import backends, torch_norms
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.dropout import LEAST_P, draw_seed, dropout_for, empty_mask, wide
from fasttfm.functional.operator import Operator, empties, without_views
from fasttfm.functional.rows import cast, dense
from fasttfm.functional.signature import names_arguments
from fasttfm.functional.torch_norms import Backward, Call, Saved
from fasttfm.kernels.tiles.rows import MAX_COLUMNS

ADDED_NORM = 1 << 20
"""Elements from which residual and LayerNorm are fused in float32 on a CPU, without dropout and with gradients; below,
torch's own two operators are faster. On two cores of an AMD EPYC with AVX2, forward and backward: torch 2.1 and fused
2.6 ms at (1024, 512), 18.9 and 16.6 at (8192, 512)."""


@names_arguments
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016).

    x (..., N) of any floating dtype and strides; weight and bias (N,) of any floating dtype, or None. Half precision is
    computed in float32. Returns (..., N) in x's dtype, also under autocast, so that the residual stream keeps its
    dtype. Raises ValueError for shapes that do not agree.
    """
    return _residual_norm(x, None, None, weight, bias, None, eps, 0.0, 0, False, backends.current)[0]


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
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x + x_bias) and y = layer_norm(s) in one pass; returns (y, s).

    x, residual (..., N), whose dtypes may differ (a bfloat16 branch on a float32 residual stream); y has x's dtype, s
    residual's. x_bias (N,): bias of the product that computed x, fused here at no extra memory traffic, gradient
    included. A pre-norm model carries s on, a post-norm one (the paper's) y. dropout_p in [0, 1], rounded to 1/256;
    seed (1,) int64 on x's device, drawn from torch's generator if None; site, below 2^31, tells the dropouts of one
    model apart. Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    if residual is None:
        raise TypeError("residual is None: a tensor is needed")
    seed = None if dropout_p <= LEAST_P else draw_seed(x.device) if seed is None else seed
    return _residual_norm(x, x_bias, residual, weight, bias, seed, eps, dropout_p, site, False, backends.current)


@names_arguments
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, equation 4).

    x (..., N) of any floating dtype and strides; weight (N,) of any floating dtype, or None. Half precision is computed
    in float32 and rounded once. Returns (..., N) in x's dtype, also under autocast. Raises ValueError for shapes that
    do not agree.
    """
    return _residual_norm(x, None, None, weight, None, None, eps, 0.0, 0, True, backends.current)[0]


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

    x, residual (..., N), whose dtypes may differ; y has x's dtype, s residual's. dropout_p in [0, 1], rounded to 1/256;
    seed (1,) int64 on x's device, drawn from torch's generator if None; site, below 2^31, tells the dropouts of one
    model apart. Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    if residual is None:
        raise TypeError("residual is None: a tensor is needed")
    seed = None if dropout_p <= LEAST_P else draw_seed(x.device) if seed is None else seed
    return _residual_norm(x, None, residual, weight, None, seed, eps, dropout_p, site, True, backends.current)


def _checks(call: Call) -> None:
    x, columns, name = call.x, call.x.shape[-1:], "rms_norm" if call.rms else "layer_norm"
    if not columns or columns[0] == 0:
        raise ValueError(f"{name}: x {tuple(x.shape)} must have a last dimension of at least 1 to normalise")
    for wrong in ("weight", "bias", "x_bias"):
        if (parameter := getattr(call, wrong)) is not None and parameter.shape != columns:
            raise ValueError(
                f"{name}: {wrong} {tuple(parameter.shape)} must be ({columns[0]},), "
                f"the last dimension of x {tuple(x.shape)}"
            )
    if call.residual is not None and x.shape != call.residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(call.residual.shape)} must have one shape")
    dropout_for(x.device, call.dropout_p, call.seed, call.site)


def _decide(call: Call) -> str:
    route = kernel_route(call.route, call.x, call.x if call.residual is None else call.residual)
    return route if call.x.shape[-1] <= MAX_COLUMNS else "torch"


def _native(call: Call, direct: bool) -> Callable[[Call], tuple[Tensor, ...]] | None:
    """PyTorch's own norm with its gradients, in float32 on a CPU: the kernels of our torch route, and the same bits."""
    x, _, residual, weight, bias = call[:5]
    if not direct or weight is None or bias is None or call.rms or backends.current != "auto" or not x.is_cpu:
        return None
    if not x.dtype is weight.dtype is bias.dtype is torch.float32:
        return None
    if residual is None:
        return _layer_norm_alone
    added = residual.dtype is torch.float32 and x.numel() < ADDED_NORM and call.seed is None
    return _added_layer_norm if added and torch.is_grad_enabled() else None


def _layer_norm_alone(call: Call) -> tuple[Tensor]:
    x, _, _, weight, bias, _, eps, *_ = call
    return (torch.layer_norm(x, x.shape[-1:], weight, bias, eps),)


def _added_layer_norm(call: Call) -> tuple[Tensor, Tensor]:
    x, x_bias, residual, weight, bias = call[:5]
    s = residual + (x if x_bias is None else x + cast(x_bias, x.dtype))  # type: ignore[operator]
    return torch.layer_norm(s, s.shape[-1:], weight, bias, call.eps), s


def _plan(call: Call) -> Callable[[Call], tuple[Tensor | None, ...]]:
    """Compute y, s (None without a residual), mean (RMSNorm: rstd), rstd (M,), and the keep mask (torch route only)."""
    if call.route == "torch":
        return without_views(torch_norms.plan(call), internal=3)
    from fasttfm.kernels import layer_norm as kernel

    x, residual, rate = call.x, call.residual, 0.0 if call.seed is None else call.dropout_p
    forward = kernel.Forward(x, residual, rms=call.rms, dropout_p=rate)
    joined = residual is not None

    def compute(call: Call) -> tuple[Tensor | None, ...]:
        x, x_bias, residual, weight, bias, seed, eps, _, site, rms, _ = call
        y, s, mean, rstd = forward(x, residual, x_bias, weight, bias, eps, seed, site)
        return y, s if joined else None, rstd if rms else mean, rstd, None

    return dense(compute, call, 5)


def _fake(call: Call) -> tuple[Tensor | None, ...]:
    x, residual = call.x, call.residual
    rows, dtype = x.numel() // x.shape[-1], wide((x if residual is None else residual).dtype)
    return *empties(x, residual), x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype), empty_mask(call)


def _save(call: Call, outputs: tuple[Tensor | None, ...]) -> tuple:
    x, x_bias, residual, weight, bias, seed, eps, dropout_p, site, rms, route = call
    _, s, mean, rstd, keep = outputs
    joined = residual is not None
    return (
        s if joined else x, mean, rstd, x_bias, weight, bias, keep, seed, dropout_p, site, x.dtype, eps, joined,
        residual is None or (x.dtype == residual.dtype and seed is None), rms, route,
    )  # fmt: skip


def _differentiate(
    backward: Callable[..., tuple], saved: Saved, needs_grad: Call, dy: Tensor | None, ds: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if dy is None:  # y was not used
        dy = saved.s.new_zeros(saved.s.shape, dtype=saved.dtype)
    call = _residual_norm_backward.record((dy, None, ds if saved.joined else None, saved))
    dx, dresidual, dx_bias, dweight, dbias = backward(call)
    return dresidual if saved.one_gradient else dx, dx_bias, dresidual if saved.joined else None, dweight, dbias, None


def _plan_backward(call: Backward) -> Callable[[Backward], tuple[Tensor | None, ...]]:
    """Compute the gradients of x, residual, x_bias, weight and bias; None for an absent input.

    The gradient of x has x's dtype; it is None if it equals residual's.
    """
    saved = call.saved
    if saved.route == "torch":
        return without_views(torch_norms.plan_backward(call))
    from fasttfm.kernels import layer_norm as kernel

    backward = kernel.Backward(
        saved.s, saved.x_bias, saved.weight, saved.bias, x_dtype=None if saved.one_gradient else saved.dtype,
        rms=saved.rms, dropout_p=0.0 if saved.seed is None else saved.dropout_p,
    )  # fmt: skip
    copied = not saved.s.is_contiguous()

    def compute(call: Backward) -> tuple[Tensor | None, ...]:
        dy, dy2, ds, (s, mean, rstd, x_bias, weight, bias, _, seed, _, site, *_) = call
        s = s.contiguous() if copied else s
        return backward(dy, dy2, ds, s, mean, rstd, x_bias, weight, bias, seed, site)

    return dense(compute, call, 3)


def _fake_backward(call: Backward) -> tuple[Tensor | None, ...]:
    saved, s = call.saved, call.saved.s
    dx = None if saved.one_gradient else s.new_empty(s.shape, dtype=saved.dtype)
    return dx, *empties(s, saved.x_bias, saved.weight, saved.bias)


def _reference_backward(call: Backward) -> tuple[Tensor, ...]:
    dy, dy2, ds, saved = call
    s = saved.s

    def normalised(saved: Saved) -> Tensor:
        s, weight, bias, eps = saved.s, saved.weight, saved.bias, saved.eps
        y = reference.rms_norm(s, weight, eps) if saved.rms else reference.layer_norm(s, weight, bias, eps)
        return y.to(saved.dtype)

    dy = dy if dy2 is None else dy + dy2
    dresidual, dweight, dbias = pulled_back(normalised, saved, ("s", "weight", "bias"), dy)
    dresidual = dresidual if ds is None else dresidual + ds
    branch = reference.dropout(dresidual.to(wide(s.dtype)), saved.dropout_p, saved.seed, saved.site).to(saved.dtype)
    dx_bias = s.new_empty(0)
    if saved.x_bias is not None:
        dx_bias = branch.flatten(0, -2).sum(0, dtype=wide(saved.dtype)).to(saved.x_bias.dtype)
    return s.new_empty(0) if saved.one_gradient else branch, dresidual, dx_bias, dweight, dbias


_residual_norm_backward = Operator(
    "residual_norm_backward", Backward, "(Tensor, Tensor, Tensor, Tensor, Tensor)", _plan_backward, _fake_backward,
    reference=_reference_backward,
)  # fmt: skip
OPERATOR = Operator(
    "residual_norm", Call, "(Tensor, Tensor, Tensor, Tensor, Tensor)", _plan, _fake, checks=_checks, native=_native,
    decide=_decide, save=_save, saved=Saved, backward=_differentiate, derivative=_residual_norm_backward, visible=2,
    rows=("x", "residual"), differentiable=2, free=("site",),
)  # fmt: skip
_residual_norm = OPERATOR.call
