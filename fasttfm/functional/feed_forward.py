"""The position-wise feed-forward network (Vaswani et al. 2017, equation 2); bias, ReLU and dropout fused."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.activations import FUSED
from fasttfm.functional.backends import chosen
from fasttfm.functional.dropout import Dropout, as_factor, dropout_for, keep_mask
from fasttfm.functional.gelu_feed_forward import gelu_feed_forward
from fasttfm.functional.network import (
    Derivatives,
    autocast,
    bias1_gradient,
    by_name,
    decide,
    fake_derivatives,
    in_parts,
    kernel_choice,
    one_dtype,
)
from fasttfm.functional.operator import Gradients, Operator
from fasttfm.functional.rows import as_rows, shaped
from fasttfm.kernels.scaled_product import scaled_linear, scaled_mm


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
    of bias1 in its stead, as parts that read_parameters() adds up. dropout_p in [0, 1], rounded to 1/65536; seed (1,)
    int64 on x's device, drawn from torch's generator when None; site, below 2^31, tells the dropouts of one model
    apart. activation: relu, gelu (x * Phi(x), BERT's) or gelu_tanh (its approximation by tanh, GPT-2's) in the place of
    max(0, .). Returns (..., N').

    Keeps x and, of the hidden layer, one thing for the backward pass: M * (N + F) elements. With ReLU that is the
    activation (plus M * F / 8 bytes of mask where a Triton kernel wrote it), against M * (N + 2 F) elements and M * F
    bytes of torch.nn. With GELU, whose derivative no bit tells, it is x W1^T + b1, from which the activation is
    computed again; torch.nn keeps M * F elements more, with dropout twice that and M * F bytes. Raises ValueError for
    shapes or dtypes that do not agree, a dropout_p outside [0, 1] or an unknown activation.
    """
    _check(x, weight1, bias1, weight2, bias2)
    dropout = dropout_for(x.device, dropout_p, seed, site)
    if activation != "relu":
        if activation not in FUSED:
            raise ValueError(f"feed_forward: activation is {activation!r}: choose {', '.join(FUSED)}")
        tanh = activation == "gelu_tanh"
        return gelu_feed_forward(x, weight1, bias1, weight2, bias2, bias1_parts, tanh, dropout, chosen())[0]
    return _feed_forward(x, weight1, bias1, weight2, bias2, bias1_parts, dropout, chosen())[0]


def _check(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> None:
    if weight1.dim() != 2 or weight2.dim() != 2 or x.dim() == 0:
        raise ValueError(
            f"feed_forward takes x (..., N), weight1 (F, N) and weight2 (N', F): got {tuple(x.shape)}, "
            f"{tuple(weight1.shape)} and {tuple(weight2.shape)}"
        )
    for name, given, wanted in (
        ("x's last dimension", x.shape[-1:], weight1.shape[1:]),
        ("weight2's last dimension", weight2.shape[1:], weight1.shape[:1]),
        ("bias1", weight1.shape[:1] if bias1 is None else bias1.shape, weight1.shape[:1]),
        ("bias2", weight2.shape[:1] if bias2 is None else bias2.shape, weight2.shape[:1]),
    ):
        if given != wanted:
            raise ValueError(
                f"feed_forward: {name} is {tuple(given)} but must be {tuple(wanted)} for weight1 "
                f"{tuple(weight1.shape)} and weight2 {tuple(weight2.shape)}"
            )


class _Call(NamedTuple):
    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    bias1_parts: Tensor | None
    dropout: Dropout
    route: str
    """As network.decide() tells."""


class _Saved(NamedTuple):
    x: Tensor
    hidden: Tensor
    bits: Tensor
    weight1: Tensor
    weight2: Tensor
    has_bias1: bool
    has_bias2: bool
    in_parts: int
    scale: float
    route: str


class _Backward(NamedTuple):
    dout: Tensor
    saved: _Saved


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """The output (..., N'), the hidden activation (M, F), zero where dropped but not yet scaled, and the mask's bits.

    The scale of dropout rides in the product: exact, and no pass of its own. The bits (M, ceil(F / 32)) int32 are empty
    where no kernel wrote them: hidden > 0 says the same.
    """
    x, weight1, bias1, weight2, bias2, _, dropout, route = call
    one_dtype(x, weight1, bias1, weight2, bias2)
    rows = as_rows(x)
    if route != "torch":
        from fasttfm.kernels import feed_forward as kernel

        out, hidden, bits = kernel.feed_forward(
            rows, weight1, bias1, weight2, bias2, route=kernel_choice(route), **dropout._asdict()
        )
        return shaped(out, x), hidden, bits
    hidden = torch.nn.functional.linear(rows, weight1, bias1).relu_()
    keep = keep_mask(hidden, dropout)
    if keep.numel():
        hidden *= as_factor(keep, hidden.dtype)
    out = scaled_linear(hidden, weight2, bias2, dropout.scale)
    return shaped(out, x), hidden, x.new_empty(0, dtype=torch.int32)


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    x = call.x
    rows, hidden = x.numel() // x.shape[-1], call.weight1.shape[0]
    bits = x.new_empty((rows, (hidden + 31) // 32) if _writes_bits(call) else (0,), dtype=torch.int32)
    return x.new_empty(*x.shape[:-1], call.weight2.shape[0]), x.new_empty(rows, hidden), bits


def _writes_bits(call: _Call) -> bool:
    if call.route != "table":
        return call.route == "fused"
    from fasttfm.kernels import feed_forward as kernel

    return kernel.forward_route(call.x, call.dropout.seed is not None) == "fused"


def _save(call: _Call, outputs: tuple[Tensor, ...]) -> _Saved:
    _, hidden, bits = outputs
    return _Saved(
        x=call.x,
        hidden=hidden,
        bits=bits,
        weight1=call.weight1,
        weight2=call.weight2,
        has_bias1=call.bias1 is not None,
        has_bias2=call.bias2 is not None,
        in_parts=in_parts(call.bias1_parts),
        scale=call.dropout.scale,
        route=call.route,
    )


def _differentiate(saved: _Saved, wanted: _Call, dout: Tensor, *_: None) -> Gradients:
    return by_name(saved, _feed_forward_backward(dout, saved))


def _compute_backward(call: _Backward) -> Derivatives:
    x, hidden, bits, weight1, weight2, has_bias1, has_bias2, parts, scale, route = call.saved
    dout, rows = as_rows(call.dout), as_rows(x)
    if route != "torch":
        from fasttfm.kernels import feed_forward as kernel

        dx, dweight1, dbias1, dweight2, dbias2 = kernel.feed_forward_backward(
            dout, rows, hidden, bits, weight1, weight2,
            bias1=has_bias1, bias2=has_bias2, scale=scale, route=kernel_choice(route), in_parts=parts > 0,
        )  # fmt: skip
        return shaped(dx, x), dweight1, dbias1, dweight2, dbias2
    # hidden > 0 exactly where the ReLU was open and dropout kept: one comparison undoes both
    dhidden = scaled_mm(dout, weight2, scale)
    dhidden = torch.ops.aten.threshold_backward(dhidden, hidden, 0)
    return (
        shaped(torch.mm(dhidden, weight1), x),
        torch.mm(dhidden.t(), rows),
        bias1_gradient(call.saved, dhidden),
        scaled_mm(dout.t(), hidden, scale),
        dout.sum(0) if has_bias2 else x.new_empty(0),
    )


_feed_forward_backward = Operator(
    "feed_forward_backward",
    _Backward,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    fake_derivatives,
)
_feed_forward = Operator(
    "feed_forward",
    _Call,
    "(Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    decide=decide,
    save=_save,
    backward=_differentiate,
    autocast=autocast,
)
