"""Position-wise feed-forward network (Vaswani et al. 2017, equation 2), bias, activation and dropout fused.

ReLU saves its output, whose sign gives the derivative. GELU saves its input, M * F elements too, and recomputes the
activation, which the gradient of weight2 needs, along with the derivative. torch.nn saves both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import training_passes
from fasttfm.functional import backends
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.dropout import LEAST_P, as_factor, draw_seed, dropout_for, keep_mask, scale_of
from fasttfm.functional.operator import Operator, Whole, empties, lowered, without_views
from fasttfm.functional.rows import as_rows, dense, shaped
from fasttfm.functional.signature import names_arguments
from fasttfm.kernels.scaled_product import scaled_linear, scaled_mm


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), GPT-2's GELU approximation; any shape and dtype."""
    return torch.nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": torch.nn.functional.silu,
}
"""Activations that functional.feed_forward() fuses into its products. gelu is the exact x * Phi(x) (Hendrycks and
Gimpel 2016), as in BERT; silu is Marian's swish."""
Derivatives = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]
"""dx, dweight1, dbias1, dweight2, dbias2; None for an absent bias."""
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}
"""The gradient of an activation's input from those of its output and the input."""


@names_arguments
def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    activation: str = "relu",
) -> Tensor:
    """dropout(max(0, x W1^T + b1)) W2^T + b2 (equation 2; dropout on the hidden activation as in tensor2tensor).

    x (..., N); weight1 (F, N), bias1 (F,), weight2 (N', F), bias2 (N',), laid out as torch.nn.Linear's, all of one
    floating dtype (or cast by autocast); biases may be None. dropout_p in [0, 1], rounded to 1/256; seed (1,) int64 on
    x's device, drawn from torch's generator if None; site, below 2^31, tells the dropouts of one model apart.
    activation: relu, gelu (x * Phi(x), BERT's), gelu_tanh (its tanh approximation, GPT-2's) or silu (x / (1 + exp(-x)),
    Marian's). Returns (..., N').

    Saves M * (N + F) elements: x and one hidden tensor. With ReLU that is the activation (plus M * F / 8 bytes of mask
    from a Triton kernel); torch.nn saves M * (N + 2 F) elements and M * F bytes. With others it is x W1^T + b1, from
    which the activation is recomputed; torch.nn saves M * F elements more, with dropout twice that and M * F bytes.
    Raises ValueError for shapes or dtypes that do not agree, a dropout_p outside [0, 1] or an unknown activation.
    """
    seed = None if dropout_p <= LEAST_P else draw_seed(x.device) if seed is None else seed
    return _feed_forward(x, weight1, bias1, weight2, bias2, dropout_p, seed, site, activation, backends.current)[0]


class _Call(NamedTuple):
    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    dropout_p: float
    seed: Whole | None
    """None: nothing is dropped."""
    site: int
    activation: str
    route: str
    """See _decide()."""


class _Saved(NamedTuple):
    x: Tensor
    kept: Tensor
    """(M, F): ReLU: the hidden activation, zero if dropped, not scaled; GELU: its input."""
    mask: Tensor | None
    """ReLU: (M, ceil(F / 32)) int32, bits of the active elements; None unless a kernel wrote them. GELU: the keep mask,
    (M, F) bool; None without dropout, and if a kernel redraws it."""
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    dropout_p: float
    seed: Whole | None
    site: int
    activation: str
    route: str
    has_bias2: bool


class _Backward(NamedTuple):
    dout: Tensor
    saved: _Saved


def _checks(call: _Call) -> None:
    x, weight1, bias1, weight2, bias2, *_ = call
    w1, w2, last = weight1.shape, weight2.shape, x.shape[-1:]
    if len(w1) != 2 or len(w2) != 2 or not last:
        raise ValueError(
            f"feed_forward takes x (..., N), weight1 (F, N) and weight2 (N', F): got {tuple(x.shape)}, "
            f"{tuple(w1)} and {tuple(w2)}"
        )
    for name, shape, expected in (
        ("x's last dimension", last, (w1[1],)),
        ("weight2's last dimension", (w2[1],), (w1[0],)),
        ("bias1", (w1[0],) if bias1 is None else bias1.shape, (w1[0],)),
        ("bias2", (w2[0],) if bias2 is None else bias2.shape, (w2[0],)),
    ):
        if shape != expected:
            raise ValueError(
                f"feed_forward: {name} is {tuple(shape)} but must be {expected} for weight1 {tuple(w1)} and weight2 "
                f"{tuple(w2)}"
            )
    dropout_for(x.device, call.dropout_p, call.seed, call.site)
    if call.activation not in ACTIVATIONS:
        raise ValueError(f"feed_forward: activation is {call.activation!r}: choose {', '.join(ACTIVATIONS)}")


def _decide(call: _Call) -> str:
    """torch; table: the kernel's table decides; fused: the kernel's own products, if backend triton is requested."""
    if call.route in ("torch", "fused", "table"):
        return call.route
    if kernel_route(call.route, call.x) == "torch":
        return "torch"
    return "fused" if call.route == "triton" else "table"


def _plan(call: _Call) -> Callable[[_Call], tuple[Tensor, Tensor, Tensor | None]]:
    """Compute the output (..., N'), and kept (M, F) and mask as in _Saved.

    The scale of dropout is folded into the second product: exact, and without a pass of its own.
    """
    dtypes = [t.dtype for t in call[:5] if t is not None]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"feed_forward takes tensors of one dtype: got x {', '.join(map(str, dtypes))} (x, weights, biases); cast "
            "them, or run under torch.autocast"
        )
    if call.route == "torch":
        return without_views(_compute_by_torch, internal=2)
    from fasttfm.kernels.feed_forward import Forward

    rate = 0.0 if call.seed is None else call.dropout_p
    forward: Any = Forward(*call[:2], call.weight2, activation=call.activation, dropout_p=rate, route=call.route)
    return dense(lambda call: forward(*call[:5], call.seed, call.site), call, 1)


def _compute_by_torch(call: _Call) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight1, bias1, weight2, bias2, *_, activation, _ = call
    kept = torch.nn.functional.linear(as_rows(x), weight1, bias1)
    keep, mask = keep_mask(kept, call), None  # for ReLU the sign of kept holds the mask
    if activation == "relu":
        hidden = _dropped(kept.relu_(), keep)
    else:
        hidden, mask = _activated(kept, keep, activation), None if call.seed is None else keep
    return shaped(scaled_linear(hidden, weight2, bias2, scale_of(call)), x), kept, mask


def _dropped(x: Tensor, keep: Tensor) -> Tensor:
    """x (M, F) times keep, in place."""
    return x.mul_(as_factor(keep, x.dtype)) if keep.numel() else x


def _activated(before: Tensor, keep: Tensor, activation: str) -> Tensor:
    """The activation of before, not ReLU, times keep, not scaled."""
    if activation == "gelu_tanh" and training_passes.takes(before):
        return training_passes.gelu_tanh(before, keep)
    return _dropped(ACTIVATIONS[activation](before), keep)


def _gradient(dhidden: Tensor, before: Tensor, keep: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of the activation's input (may reuse dhidden's memory), and its output again; both (M, F)."""
    if activation == "gelu_tanh" and training_passes.takes(before, dhidden) and dhidden.is_contiguous():
        return training_passes.gelu_tanh_gradient(dhidden, before, keep)
    dbefore = _GRADIENTS[activation](_dropped(dhidden, keep), before)
    return dbefore, _activated(before, keep, activation)


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor | None]:
    x, activation, dropped, mask = call.x, call.activation, call.seed is not None, None
    rows, hidden = x.numel() // x.shape[-1], call.weight1.shape[0]
    if call.route == "torch":
        if activation != "relu" and dropped:
            mask = x.new_empty((rows, hidden), dtype=torch.bool)
    elif activation == "relu":
        from fasttfm.kernels.feed_forward import forward_route

        if forward_route(x, activation, dropped, call.route) == "fused":
            mask = x.new_empty((rows, (hidden + 31) // 32), dtype=torch.int32)
    return x.new_empty(*x.shape[:-1], call.weight2.shape[0]), x.new_empty(rows, hidden), mask


def _save(call: _Call, outputs: tuple[Tensor | None, ...]) -> tuple:
    x, weight1, bias1, weight2, bias2, *others = call
    _, kept, mask = outputs
    return x, kept, mask, weight1, bias1, weight2, *others, bias2 is not None


def _plan_backward(call: _Backward) -> Callable[[_Backward], Derivatives]:
    """Compute the gradients of x, weight1, bias1, weight2 and bias2; None for an absent bias."""
    x, kept, mask, _, bias1, weight2, dropout_p, seed, _, activation, route, has_bias2 = call.saved
    if route == "torch":
        return without_views(_compute_backward_by_torch)
    from fasttfm.kernels.feed_forward import Backward

    bits = mask if mask is not None and mask.numel() else None
    backward = Backward(
        x, kept, bits, weight2, bias1=bias1 is not None, bias2=has_bias2, activation=activation,
        dropout_p=0.0 if seed is None else dropout_p, route=route,
    )  # fmt: skip
    copied, has_bits = not (x.is_contiguous() and call.dout.is_contiguous()), bits is not None

    def compute(call: _Backward) -> Derivatives:
        dout, (x, kept, mask, weight1, _, weight2, _, seed, site, *_) = call
        if copied:
            dout, x = dout.contiguous(), x.contiguous()
        return backward(dout, x, kept, mask if has_bits else None, weight1, weight2, seed, site)

    return compute


def _compute_backward_by_torch(call: _Backward) -> Derivatives:
    x, kept, mask, weight1, bias1, weight2, _, seed, _, activation, _, has_bias2 = call.saved
    dout, rows, scale = as_rows(call.dout), as_rows(x), scale_of(call.saved)
    dhidden = scaled_mm(dout, weight2, scale)
    if activation == "relu":  # kept > 0 exactly where ReLU and dropout passed: one comparison undoes both
        dbefore, hidden = torch.ops.aten.threshold_backward(dhidden, kept, 0), kept
    else:
        keep = kept.new_empty(0, dtype=torch.bool) if mask is None or seed is None else mask
        dbefore, hidden = _gradient(dhidden, kept, keep, activation)
    return (
        shaped(torch.mm(dbefore, weight1), x),
        torch.mm(dbefore.t(), rows),
        None if bias1 is None else dbefore.sum(0),
        scaled_mm(dout.t(), hidden, scale),
        dout.sum(0) if has_bias2 else None,
    )


def _fake_backward(call: _Backward) -> tuple[Tensor | None, ...]:
    x, _, _, weight1, bias1, weight2, *_, has_bias2 = call.saved
    dx, dweight1, dbias1, dweight2 = empties(x, weight1, bias1, weight2)
    return dx, dweight1, dbias1, dweight2, x.new_empty(weight2.shape[0]) if has_bias2 else None


def _reference_backward(call: _Backward) -> tuple[Tensor, ...]:
    saved = call.saved

    def output(saved: _Saved) -> Tensor:
        x, _, _, weight1, bias1, weight2 = saved[:6]
        options = {name: getattr(saved, name) for name in ("dropout_p", "seed", "site", "activation")}
        return reference.feed_forward(x, weight1, bias1, weight2, None, **options)

    dbias2 = call.dout.flatten(0, -2).sum(0) if saved.has_bias2 else call.dout.new_empty(0)
    return *pulled_back(output, saved, ("x", "weight1", "bias1", "weight2"), call.dout), dbias2


def _flops(call: _Call | _Saved) -> int:
    return 2 * call.x.numel() * call.weight1.shape[0] + 2 * call.x.shape[:-1].numel() * call.weight2.numel()


_feed_forward_backward = Operator(
    "feed_forward_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor, Tensor)", _plan_backward, _fake_backward,
    reference=_reference_backward, flops=lambda call: 2 * _flops(call.saved), autocast=lambda call, dtype: call,
)  # fmt: skip
OPERATOR = Operator(
    "feed_forward", _Call, "(Tensor, Tensor, Tensor)", _plan, _fake, checks=_checks, decide=_decide, save=_save,
    saved=_Saved, derivative=_feed_forward_backward, visible=1, flops=_flops, rows=("x",),
    autocast=lowered("x", "weight1", "bias1", "weight2", "bias2"), free=("site",),
)  # fmt: skip
_feed_forward = OPERATOR.call
