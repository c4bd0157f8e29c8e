"""The residual connection, its dropout and the norm that reads their sum, in one pass; and LayerNorm and RMSNorm alone.

They are one operator, as they are one kernel: RMSNorm leaves out the mean and the bias.
Source: Ba et al. 2016; Zhang and Sennrich 2019, section 4, as T5 and Llama normalise; placement of dropout, Vaswani et
al. 2017 section 5.4.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm import reference
from fasttfm.cpu import step_passes, training_passes
from fasttfm.cpu.linear import frozen
from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.derivative import pulled_back, refuse_parts
from fasttfm.functional.dropout import NO_DROPOUT, Dropout, dropout_for, fake_keep_mask, keep_mask, wide
from fasttfm.functional.operator import Gradients, Operator, casts, transformed
from fasttfm.functional.rows import add_kept, as_rows, branch_gradient, cast, shaped
from fasttfm.functional.signature import names_arguments
from fasttfm.functional.torch_norms import (
    Normalised,
    normalise,
    normalise_backward,
    normalise_rms,
    normalise_rms_backward,
)
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
    check(x, weight, bias)
    if weight is not None and bias is not None and _takes_torchs_own(x, weight, bias, chosen()):
        return torch.layer_norm(x, weight.shape, weight, bias, eps)
    return _residual_norm(x, None, None, weight, bias, eps, NO_DROPOUT, False, False, chosen())[0]


def _takes_torchs_own(x: Tensor, weight: Tensor, bias: Tensor, choice: str) -> bool:
    """Return whether a norm alone is torch's own, gradients too: it has the kernels of our route, and the same bits,
    without a Python function on the way. Who asks for a route by name has the operator, which is one on all devices."""
    return (
        x.is_cpu
        and x.dtype is weight.dtype is bias.dtype is torch.float32
        and weight.dim() == bias.dim() == 1
        and weight.is_cpu
        and bias.is_cpu
        and not torch.compiler.is_compiling()
        and choice == "auto"
        and not casts(x)
        and not (transformed() or forward_ad._current_level >= 0)
    )


@names_arguments
def branch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x), x): where a residual stream begins in a norm (pre-norm models).

    As layer_norm() in all else; gradients of both outputs flow back in one pass, where two uses of x would be added.
    """
    check(x, weight, bias)
    y, _, _, _, _, *again = _residual_norm(x, None, None, weight, bias, eps, NO_DROPOUT, True, False, chosen())
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
    check(x, weight, bias, x_bias, residual)
    dropout = dropout_for(x.device, dropout_p, seed, site)
    return add_and_normalise(x, residual, weight, bias, eps, x_bias, dropout, post_norm)


def add_and_normalise(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, x_bias: Tensor | None,
    dropout: Dropout, post_norm: bool, choice: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """residual_layer_norm() of shapes that are known to agree; dropout as dropout_for() makes it, choice: chosen()."""
    choice = choice or chosen()
    if (
        dropout.seed is None and weight is not None and bias is not None and residual.dtype is torch.float32
        and (post_norm or x.numel() < ADDED_NORM) and torch.is_grad_enabled()
        and residual.is_cpu and (x_bias is None or x_bias.is_cpu)
        and _takes_torchs_own(x, weight, bias, choice)
    ):  # fmt: skip
        s = residual + (x if x_bias is None else x + cast(x_bias, x.dtype))
        y = torch.layer_norm(s, weight.shape, weight, bias, eps)
        return y, y if post_norm else s
    call = x, x_bias, residual, weight, bias, eps, dropout, post_norm, False
    y, s, _, _, _, *again = _residual_norm(*call, choice)
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
    check(x, weight, None, name="rms_norm")
    return _residual_norm(x, None, None, weight, None, eps, NO_DROPOUT, False, True, chosen())[0]


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
    check(x, weight, None, None, residual, name="rms_norm")
    dropout = dropout_for(x.device, dropout_p, seed, site)
    y, s, *_ = _residual_norm(x, None, residual, weight, None, eps, dropout, False, True, chosen())
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


class _Call(NamedTuple):
    x: Tensor
    x_bias: Tensor | None
    residual: Tensor | None
    """None for a norm alone, without dropout."""
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dropout: Dropout
    twice: bool
    """Whether to return once more what the residual stream goes on with: y, or x without a residual."""
    rms: bool
    route: str


class _Saved(NamedTuple):
    norm: Normalised
    """Of the sum s, or of x without a residual; an RMSNorm's mean is not read."""
    x_bias: Tensor | None
    keep: Tensor
    dropout: Dropout
    dtype: torch.dtype
    """Of x."""
    eps: float
    joined: bool
    """Whether there was a residual."""
    rms: bool
    route: str

    @property
    def one_gradient(self) -> bool:
        """True if x and residual have the same gradient, which is then computed once."""
        return not self.joined or (self.dtype == self.norm.x.dtype and self.dropout.seed is None)


class _Backward(NamedTuple):
    dy: Tensor
    dy2: Tensor | None
    ds: Tensor | None
    saved: _Saved


def _decide(call: _Call) -> str:
    if call.route == "torch":
        return call.route
    return norm_route(call.route, call.x, call.x if call.residual is None else call.residual)


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, s (empty without a residual), mean and rstd (M,), and dropout's mask, empty but on PyTorch's route.

    RMSNorm gives rstd in the place of a mean.
    """
    x, x_bias, residual, weight, bias, eps, dropout, _, rms, route = call
    rows, stream = as_rows(x), None if residual is None else as_rows(residual)
    if route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        options = {"residual": stream, "x_bias": x_bias, "rms": rms, **dropout._asdict()}
        y, s, mean, rstd = kernel.forward(rows, weight, bias, eps, **options)
        keep = x.new_empty(0, dtype=torch.bool)
    else:
        if x_bias is not None:
            rows = rows + cast(x_bias, rows.dtype)
        if stream is not None and not rms and (outputs := _cpu_pass(rows, stream, call)) is not None:
            y, s, *saved = outputs
            return shaped(y, x), shaped(s, x), *saved  # type: ignore[return-value]
        # the mask costs more to draw than to keep on the CPU: a byte an element until the backward pass
        keep = keep_mask(rows, dropout)
        s = rows if stream is None else add_kept(rows, stream, keep, dropout.dropout_p)
        y, mean, rstd = normalise_rms(s, weight, eps) if rms else normalise(s, weight, bias, eps)
        y = cast(y, x.dtype)
    return shaped(y, x), x.new_empty(0) if stream is None else shaped(s, x), rstd if rms else mean, rstd, keep


def _cpu_pass(rows: Tensor, stream: Tensor, call: _Call) -> tuple[Tensor, ...] | None:
    """The outputs of a LayerNorm that a pass of fasttfm.cpu computes; None where PyTorch does."""
    weight, bias, eps, dropout = call.weight, call.bias, call.eps, call.dropout
    if dropout.seed is None and weight is not None and bias is not None and frozen(rows):
        alike = stream.dtype == weight.dtype == bias.dtype == rows.dtype
        if alike and step_passes.takes(rows):
            outputs = step_passes.add_layer_norm(rows, stream, weight, bias, eps)
            return *outputs, rows.new_empty(0), rows.new_empty(0), rows.new_empty(0, dtype=torch.bool)
    if training_passes.takes_norm(rows, stream, weight, bias):
        return training_passes.residual_layer_norm(rows, stream, weight, bias, eps, *dropout)  # type: ignore[arg-type]
    return None


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, residual = call.x, call.residual
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    rows, dtype = x.numel() // x.shape[-1], wide((x if residual is None else residual).dtype)
    mean, rstd = x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)
    return x.new_empty(x.shape), s, mean, rstd, fake_keep_mask(x, call.dropout, call.route)


def _save(call: _Call, outputs: tuple[Tensor, ...]) -> _Saved:
    _, s, mean, rstd, keep = outputs
    joined = call.residual is not None
    norm = Normalised(s if joined else call.x, mean, rstd, call.weight, call.bias)
    return _Saved(norm, call.x_bias, keep, call.dropout, call.x.dtype, call.eps, joined, call.rms, call.route)


def _differentiate(
    saved: _Saved, wanted: _Call, dy: Tensor | None, ds: Tensor | None, _mean: None, _rstd: None, _keep: None,
    dy2: Tensor | None = None,
) -> Gradients:  # fmt: skip
    if not saved.joined:
        ds, dy2 = dy2, None
    if dy is None:
        dy, dy2 = dy2, None
    if dy is None:  # y went unused
        dy = saved.norm.x.new_zeros(saved.norm.x.shape, dtype=saved.dtype)
    dx, dresidual, dweight, dbias, dx_bias = _residual_norm_backward(dy, dy2, ds, saved)
    return {
        "x": dresidual if saved.one_gradient else dx,
        "x_bias": None if saved.x_bias is None else dx_bias,
        "residual": dresidual if saved.joined else None,
        "weight": None if saved.norm.weight is None else dweight,
        "bias": None if saved.norm.bias is None else dbias,
    }


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (in its dtype), residual, weight, bias and x_bias; x's is empty where it equals residual's."""
    saved, s = call.saved, call.saved.norm.x
    dy, ds = as_rows(call.dy), None if call.ds is None else as_rows(call.ds)
    dy2 = None if call.dy2 is None else as_rows(call.dy2)
    absent = s.new_empty(0)
    if saved.route == "triton":
        from fasttfm.kernels import layer_norm as kernel

        _, mean, rstd, weight, bias = saved.norm
        dx, dresidual, dweight, dbias, dx_bias = kernel.backward(
            dy, dy2, ds, as_rows(s), None if saved.rms else mean, rstd, weight, bias, saved.x_bias,
            x_dtype=None if saved.one_gradient else saved.dtype, **saved.dropout._asdict(),
        )  # fmt: skip
        return absent if dx is None else shaped(dx, s), shaped(dresidual, s), dweight, dbias, dx_bias
    if dy2 is not None:
        dy = dy + dy2
    dx, dresidual, dweight, dbias = _rows_backward(dy, ds, saved)
    dx_bias = absent
    if saved.x_bias is not None:
        dx_bias = cast((dresidual if dx is None else dx).sum(0, dtype=wide(saved.dtype)), saved.x_bias.dtype)
    return absent if dx is None else shaped(dx, s), shaped(dresidual, s), dweight, dbias, dx_bias


def _rows_backward(dy: Tensor, ds: Tensor | None, saved: _Saved) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """On PyTorch's route the gradients of x, None where it is residual's, of residual, weight and bias; dy in x's
    dtype."""
    s, mean, rstd, weight, bias = saved.norm
    rows = as_rows(s)
    dx: Tensor | None
    alike = saved.joined and dy.dtype == saved.dtype and (ds is None or ds.dtype == rows.dtype)
    if not saved.rms and weight is not None and alike and training_passes.takes_norm(dy, rows, weight, bias):
        return training_passes.residual_layer_norm_gradient(
            dy, ds, rows, (mean, rstd), weight, saved.keep, saved.dropout.scale, saved.one_gradient
        )
    if saved.rms:
        dresidual, dweight, dbias = normalise_rms_backward(dy, ds, rows, rstd, weight)
    else:
        dresidual, dweight, dbias = normalise_backward(dy, saved.norm)
        if ds is not None:
            dresidual += ds
    dx = None if saved.one_gradient else branch_gradient(dresidual, saved.keep, saved.dropout, saved.dtype)
    return dx, dresidual, dweight, dbias


def _fake_backward(call: _Backward) -> tuple[Tensor, ...]:
    saved, s = call.saved, call.saved.norm.x
    dx = s.new_empty(0) if saved.one_gradient else s.new_empty(s.shape, dtype=saved.dtype)
    parameters = saved.norm.weight, saved.norm.bias, saved.x_bias
    return dx, s.new_empty(s.shape), *(s.new_empty(0) if p is None else torch.empty_like(p) for p in parameters)


def _reference_backward(call: _Backward) -> tuple[Tensor, ...]:
    dy, dy2, ds, saved = call
    s = saved.norm.x
    refuse_parts(saved.norm.weight, saved.norm.bias, saved.x_bias)

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
    return s.new_empty(0) if saved.one_gradient else branch, dresidual, dweight, dbias, dx_bias


_residual_norm_backward = Operator(
    "residual_norm_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor, Tensor)", _compute_backward, _fake_backward,
    reference=_reference_backward,
).call  # fmt: skip
_residual_norm = Operator(
    "residual_norm",
    _Call,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    decide=_decide,
    save=_save,
    backward=_differentiate,
    internal=3,
    rows=("x", "residual"),
    differentiable=2,
    again=lambda call, outputs: (call.x if call.residual is None else outputs[0]) if call.twice else None,
).call
