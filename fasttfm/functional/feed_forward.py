"""The position-wise feed-forward network (Vaswani et al. 2017, equation 2); bias, activation and dropout fused.

A ReLU's derivative is one bit, which its output tells, so its output is what is kept for the backward pass. GELU's is a
function of the activation's input, so that input is kept, M * F elements as well; the hidden activation, which the
gradient of weight2 needs, is computed from it again, in passing, where the derivative is. torch.nn keeps both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import training_passes
from fasttfm.functional.activations import FUSED
from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.derivative import pulled_back, refuse_parts
from fasttfm.functional.dropout import NO_DROPOUT, Dropout, as_factor, dropout_for, keep_mask
from fasttfm.functional.operator import Gradients, Operator, lowered, unplanned
from fasttfm.functional.rows import as_rows, shaped
from fasttfm.functional.signature import names_arguments
from fasttfm.kernels.scaled_product import scaled_linear, scaled_mm

Derivatives = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""dx, dweight1, dbias1, dweight2, dbias2; a bias gradient that is not wanted is empty."""


@names_arguments
def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    bias1_parts: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    activation: str = "relu",
) -> Tensor:
    """dropout(max(0, x W1^T + b1)) W2^T + b2 (equation 2; dropout on the hidden activation as in tensor2tensor).

    x (..., N); weight1 (F, N), bias1 (F,), weight2 (N', F), bias2 (N',), laid out as torch.nn.Linear's, all of one
    floating dtype (autocast casts them to its own); a bias may be None. bias1_parts (P, F) float32 takes the gradient
    of bias1 in its stead, as parts that read_parameters() adds up. dropout_p in [0, 1], rounded to 1/256; seed (1,)
    int64 on x's device, drawn from torch's generator when None; site, below 2^31, tells the dropouts of one model
    apart. activation: relu, gelu (x * Phi(x), BERT's) or gelu_tanh (its approximation by tanh, GPT-2's) in the place of
    max(0, .). Returns (..., N').

    Keeps x and, of the hidden layer, one thing for the backward pass: M * (N + F) elements. With ReLU that is the
    activation (plus M * F / 8 bytes of mask where a Triton kernel wrote it), against M * (N + 2 F) elements and M * F
    bytes of torch.nn. With GELU, whose derivative no bit tells, it is x W1^T + b1, from which the activation is
    computed again; torch.nn keeps M * F elements more, with dropout twice that and M * F bytes. Raises ValueError for
    shapes or dtypes that do not agree, a dropout_p outside [0, 1] or an unknown activation.
    """
    check(x, weight1, bias1, weight2, bias2)
    dropout = dropout_for(x.device, dropout_p, seed, site)
    if activation not in FUSED:
        raise ValueError(f"feed_forward: activation is {activation!r}: choose {', '.join(FUSED)}")
    return network(x, weight1, bias1, weight2, bias2, bias1_parts, activation, dropout)


def network(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None,
    bias1_parts: Tensor | None, activation: str, dropout: Dropout, choice: str | None = None,
) -> Tensor:  # fmt: skip
    """feed_forward() of shapes that are known to agree; dropout as dropout_for() makes it, choice as chosen()."""
    call = x, weight1, bias1, weight2, bias2, bias1_parts, activation, dropout
    return _feed_forward(*call, choice or chosen())[0]


def check(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> None:
    """Raises ValueError for shapes that feed_forward() does not take."""
    w1, w2, last = weight1.shape, weight2.shape, x.shape[-1:]
    if len(w1) != 2 or len(w2) != 2 or not last:
        raise ValueError(
            f"feed_forward takes x (..., N), weight1 (F, N) and weight2 (N', F): got {tuple(x.shape)}, "
            f"{tuple(w1)} and {tuple(w2)}"
        )
    for name, given, wanted in (
        ("x's last dimension", last, (w1[1],)),
        ("weight2's last dimension", (w2[1],), (w1[0],)),
        ("bias1", (w1[0],) if bias1 is None else bias1.shape, (w1[0],)),
        ("bias2", (w2[0],) if bias2 is None else bias2.shape, (w2[0],)),
    ):
        if given != wanted:
            raise ValueError(
                f"feed_forward: {name} is {tuple(given)} but must be {wanted} for weight1 {tuple(w1)} and weight2 "
                f"{tuple(w2)}"
            )


class _Call(NamedTuple):
    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    bias1_parts: Tensor | None
    activation: str
    dropout: Dropout
    route: str
    """As _decide() tells."""


class _Saved(NamedTuple):
    x: Tensor
    kept: Tensor
    """(M, F): of ReLU the hidden activation, zero where dropped but not yet scaled; what GELU is applied to."""
    mask: Tensor
    """Of ReLU (M, ceil(F / 32)) int32, the bits of what is open; empty where no kernel wrote them. Of GELU dropout's,
    (M, F) bool; empty without dropout, and where a kernel draws it again."""
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    has_bias2: bool
    in_parts: int
    """How many parts of bias1's gradient, (in_parts, F) float32, are wanted in the place of their sum; or 0."""
    activation: str
    scale: float
    """Of dropout."""
    dropout: Dropout
    route: str


class _Backward(NamedTuple):
    dout: Tensor
    saved: _Saved


def _decide(call: _Call) -> str:
    """torch; table: a kernel's choice between its ways; fused: its own products, where Triton was asked for by name."""
    if call.route in ("torch", "fused", "table"):
        return call.route
    if kernel_route(call.route, call.x) == "torch":
        return "torch"
    return "fused" if call.route == "triton" else "table"


def _kernel_choice(route: str) -> str | None:
    """The route that a launch function is told; None: what its table says."""
    return "fused" if route == "fused" else None


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """The output (..., N'), and what is kept of the hidden layer, a tensor (M, F) and a mask, as they are saved.

    The scale of dropout rides in the second product: exact, and no pass of its own.
    """
    x, weight1, bias1, weight2, bias2, dropout = *call[:5], call.dropout
    _check_dtype(x, weight1, bias1, weight2, bias2)
    rows = as_rows(x)
    if call.route != "torch":
        from fasttfm.kernels import feed_forward as kernel

        out, kept, mask = kernel.feed_forward(
            rows, weight1, bias1, weight2, bias2,
            activation=call.activation, route=_kernel_choice(call.route), **dropout._asdict(),
        )  # fmt: skip
        return shaped(out, x), kept, mask
    kept = torch.nn.functional.linear(rows, weight1, bias1)
    mask = keep_mask(kept, dropout)
    if call.activation == "relu":
        hidden = _dropped(kept.relu_(), mask)
        mask = x.new_empty(0, dtype=torch.int32)  # hidden > 0 says the same
    else:
        hidden = _gelu(kept, mask, call.activation)
    return shaped(scaled_linear(hidden, weight2, bias2, dropout.scale), x), kept, mask


def _check_dtype(x: Tensor, *others: Tensor | None) -> None:
    if {t.dtype for t in others if t is not None} - {x.dtype}:
        raise ValueError(
            "feed_forward takes tensors of one dtype: got x "
            + ", ".join([str(x.dtype), *(str(t.dtype) for t in others if t is not None)])
            + " (x, weights, biases); cast them, or run under torch.autocast"
        )


def _dropped(x: Tensor, keep: Tensor) -> Tensor:
    """x (M, F), zero where it is dropped, in its own memory."""
    return x.mul_(as_factor(keep, x.dtype)) if keep.numel() else x


def _gelu(before: Tensor, keep: Tensor, activation: str) -> Tensor:
    """gelu(before), zero where it is dropped, not scaled."""
    if activation == "gelu_tanh" and training_passes.takes(before):
        return training_passes.gelu_tanh(before, keep)
    return _dropped(torch.nn.functional.gelu(before, approximate=_approximate(activation)), keep)


def _gelu_gradient(dhidden: Tensor, before: Tensor, keep: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of what GELU is applied to, in the memory of that of its result, and its result; (M, F)."""
    if activation == "gelu_tanh" and training_passes.takes(before, dhidden) and dhidden.is_contiguous():
        return training_passes.gelu_tanh_gradient(dhidden, before, keep)
    dhidden = _dropped(dhidden, keep)
    dbefore = torch.ops.aten.gelu_backward(dhidden, before, approximate=_approximate(activation))
    return dbefore, _gelu(before, keep, activation)


def _approximate(activation: str) -> str:
    """The value of torch's `approximate` for a GELU."""
    return "tanh" if activation == "gelu_tanh" else "none"


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    x = call.x
    rows, hidden = x.numel() // x.shape[-1], call.weight1.shape[0]
    mask = x.new_empty(0, dtype=torch.int32)
    if call.activation == "relu":
        if _writes_bits(call):
            mask = mask.new_empty(rows, (hidden + 31) // 32)
    elif call.route == "torch":
        mask = x.new_empty((0,) if call.dropout.seed is None else (rows, hidden), dtype=torch.bool)
    return x.new_empty(*x.shape[:-1], call.weight2.shape[0]), x.new_empty(rows, hidden), mask


def _writes_bits(call: _Call) -> bool:
    if call.route != "table":
        return call.route == "fused"
    from fasttfm.kernels import feed_forward as kernel

    return kernel.forward_route(call.x, "relu", call.dropout.seed is not None) == "fused"


def _save(call: _Call, outputs: tuple[Tensor, ...]) -> _Saved:
    _, kept, mask = outputs
    in_parts = 0 if call.bias1_parts is None else call.bias1_parts.shape[0]
    return _Saved(
        call.x, kept, mask, call.weight1, call.bias1, call.weight2, call.bias2 is not None, in_parts, call.activation,
        call.dropout.scale, call.dropout, call.route,
    )  # fmt: skip


def _differentiate(saved: _Saved, wanted: _Call, dout: Tensor, *_: None) -> Gradients:
    dx, dweight1, dbias1, dweight2, dbias2 = _feed_forward_backward(dout, saved)
    return {
        "x": dx,
        "weight1": dweight1,
        "bias1": dbias1 if saved.bias1 is not None and not saved.in_parts else None,
        "bias1_parts": dbias1 if saved.in_parts else None,
        "weight2": dweight2,
        "bias2": dbias2 if saved.has_bias2 else None,
    }


def _compute_backward(call: _Backward) -> Derivatives:
    saved = call.saved
    kept, mask, weight1, weight2, activation = saved.kept, saved.mask, saved.weight1, saved.weight2, saved.activation
    dout, rows = as_rows(call.dout), as_rows(saved.x)
    if saved.route != "torch":
        from fasttfm.kernels import feed_forward as kernel

        dx, dweight1, dbias1, dweight2, dbias2 = kernel.feed_forward_backward(
            dout, rows, kept, mask, weight1, weight2, bias1=saved.bias1 is not None, bias2=saved.has_bias2,
            activation=activation, scale=saved.scale, route=_kernel_choice(saved.route), in_parts=saved.in_parts,
            **(NO_DROPOUT if activation == "relu" else saved.dropout)._asdict(),  # a ReLU's output tells of both
        )  # fmt: skip
        return shaped(dx, saved.x), dweight1, dbias1, dweight2, dbias2
    dhidden = scaled_mm(dout, weight2, saved.scale)
    if activation == "relu":  # kept > 0 exactly where the ReLU was open and dropout kept: one comparison undoes both
        dbefore, hidden = torch.ops.aten.threshold_backward(dhidden, kept, 0), kept
    else:
        dbefore, hidden = _gelu_gradient(dhidden, kept, mask, activation)
    return (
        shaped(torch.mm(dbefore, weight1), saved.x),
        torch.mm(dbefore.t(), rows),
        _bias1_gradient(saved, dbefore),
        scaled_mm(dout.t(), hidden, saved.scale),
        dout.sum(0) if saved.has_bias2 else rows.new_empty(0),
    )


def _bias1_gradient(saved: _Saved, dbefore: Tensor) -> Tensor:
    """The sum of dbefore (M, F) over rows, as it is wanted."""
    dbias1 = dbefore.new_empty(0) if saved.bias1 is None else dbefore.sum(0)
    if saved.in_parts:
        dbias1 = torch.nn.functional.pad(dbias1[None].float(), (0, 0, 0, saved.in_parts - 1))
    return dbias1


def _fake_backward(call: _Backward) -> Derivatives:
    saved = call.saved
    weight1, weight2 = saved.weight1, saved.weight2
    hidden, out = weight1.shape[0], weight2.shape[0]
    if saved.in_parts:
        dbias1 = weight1.new_empty(saved.in_parts, hidden, dtype=torch.float32)
    else:
        dbias1 = weight1.new_empty(0 if saved.bias1 is None else hidden)
    return (
        saved.x.new_empty(saved.x.shape),
        weight1.new_empty(weight1.shape),
        dbias1,
        weight2.new_empty(weight2.shape),
        weight2.new_empty(out if saved.has_bias2 else 0),
    )


def _reference_backward(call: _Backward) -> tuple[Tensor, ...]:
    saved = call.saved
    if saved.in_parts:
        refuse_parts(saved.weight1)

    def output(saved: _Saved) -> Tensor:
        options = {**saved.dropout.options(), "activation": saved.activation}
        return reference.feed_forward(saved.x, saved.weight1, saved.bias1, saved.weight2, None, **options)

    dbias2 = call.dout.flatten(0, -2).sum(0) if saved.has_bias2 else call.dout.new_empty(0)
    return *pulled_back(output, saved, ("x", "weight1", "bias1", "weight2"), call.dout), dbias2


def _flops(call: _Call | _Saved) -> int:
    return 2 * call.x.numel() * call.weight1.shape[0] + 2 * call.x.shape[:-1].numel() * call.weight2.numel()


_feed_forward_backward = Operator(
    "feed_forward_backward",
    _Backward,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    unplanned(_compute_backward),
    _fake_backward,
    reference=_reference_backward,
    flops=lambda call: 2 * _flops(call.saved),
).call
_feed_forward = Operator(
    "feed_forward",
    _Call,
    "(Tensor, Tensor, Tensor)",
    unplanned(_compute, 2),
    _fake,
    decide=_decide,
    save=_save,
    backward=_differentiate,
    flops=_flops,
    rows=("x",),
    autocast=lowered("x", "weight1", "bias1", "weight2", "bias2"),
).call
