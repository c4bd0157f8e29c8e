"""The feed-forward network with GELU between its products: BERT's with the error function, GPT-2's with tanh.

A ReLU's derivative is one bit, which its output tells. GELU's is a function of the activation's input, so that input is
what is kept for the backward pass, M * F elements; the hidden activation, which the gradient of weight2 needs, is
computed from it again, in passing, where the derivative is. torch.nn keeps both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional import training_passes
from fasttfm.functional.dropout import Dropout, as_factor, keep_mask
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


class _Call(NamedTuple):
    """What feed_forward() is asked for."""

    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    bias1_parts: Tensor | None
    tanh: bool
    dropout: Dropout
    route: str
    """As network.decide() tells."""


class _Saved(NamedTuple):
    x: Tensor
    before: Tensor
    """(M, F), what GELU is applied to."""
    keep: Tensor
    """(M, F) bool; empty without dropout, and where a kernel draws it again."""
    weight1: Tensor
    weight2: Tensor
    has_bias1: bool
    has_bias2: bool
    in_parts: int
    tanh: bool
    dropout: Dropout
    route: str


class _Backward(NamedTuple):
    dout: Tensor
    saved: _Saved


def _activated(before: Tensor, keep: Tensor, tanh: bool) -> Tensor:
    """gelu(before), zero where it is dropped, not scaled."""
    if tanh and training_passes.takes(before):
        return training_passes.gelu_tanh(before, keep)
    hidden = torch.nn.functional.gelu(before, approximate="tanh" if tanh else "none")
    return hidden.mul_(as_factor(keep, hidden.dtype)) if keep.numel() else hidden


def _gradient(dhidden: Tensor, saved: _Saved) -> tuple[Tensor, Tensor]:
    """The gradient of what GELU is applied to, in the memory of that of its result, and its result; (M, F)."""
    if saved.tanh and training_passes.takes(saved.before, dhidden) and dhidden.is_contiguous():
        return training_passes.gelu_tanh_gradient(dhidden, saved.before, saved.keep)
    if saved.keep.numel():
        dhidden *= as_factor(saved.keep, dhidden.dtype)
    approximate = "tanh" if saved.tanh else "none"
    dbefore = torch.ops.aten.gelu_backward(dhidden, saved.before, approximate=approximate)
    return dbefore, _activated(saved.before, saved.keep, saved.tanh)


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """The output (..., N'), what GELU is applied to (M, F), and dropout's mask, empty but on PyTorch's route."""
    x, weight1, bias1, weight2, bias2, _, tanh, dropout, route = call
    one_dtype(x, weight1, bias1, weight2, bias2)
    rows = as_rows(x)
    if route != "torch":
        from fasttfm.kernels import gelu_feed_forward as kernel

        out, before = kernel.feed_forward(
            rows, weight1, bias1, weight2, bias2, tanh=tanh, route=kernel_choice(route), **dropout._asdict()
        )
        return shaped(out, x), before, x.new_empty(0, dtype=torch.bool)
    before = torch.nn.functional.linear(rows, weight1, bias1)
    keep = keep_mask(before, dropout)
    out = scaled_linear(_activated(before, keep, tanh), weight2, bias2, dropout.scale)
    return shaped(out, x), before, keep


def _fake(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    x = call.x
    rows, hidden = x.numel() // x.shape[-1], call.weight1.shape[0]
    kept = call.dropout.seed is not None and call.route == "torch"
    keep = x.new_empty((rows, hidden) if kept else (0,), dtype=torch.bool)
    return x.new_empty(*x.shape[:-1], call.weight2.shape[0]), x.new_empty(rows, hidden), keep


def _save(call: _Call, outputs: tuple[Tensor, ...]) -> _Saved:
    _, before, keep = outputs
    return _Saved(
        x=call.x,
        before=before,
        keep=keep,
        weight1=call.weight1,
        weight2=call.weight2,
        has_bias1=call.bias1 is not None,
        has_bias2=call.bias2 is not None,
        in_parts=in_parts(call.bias1_parts),
        tanh=call.tanh,
        dropout=call.dropout,
        route=call.route,
    )


def _differentiate(saved: _Saved, wanted: _Call, dout: Tensor, *_: None) -> Gradients:
    return by_name(saved, _backward(dout, saved))


def _compute_backward(call: _Backward) -> Derivatives:
    saved = call.saved
    dout, rows, weight1, weight2 = as_rows(call.dout), as_rows(saved.x), saved.weight1, saved.weight2
    if saved.route != "torch":
        from fasttfm.kernels import gelu_feed_forward as kernel

        dx, *gradients = kernel.feed_forward_backward(
            dout, rows, saved.before, weight1, weight2, bias1=saved.has_bias1, bias2=saved.has_bias2, tanh=saved.tanh,
            route=kernel_choice(saved.route), in_parts=saved.in_parts > 0, **saved.dropout._asdict(),
        )  # fmt: skip
        dweight1, dbias1, dweight2, dbias2 = gradients
        return shaped(dx, saved.x), dweight1, dbias1, dweight2, dbias2
    dhidden = scaled_mm(dout, weight2, saved.dropout.scale)
    dbefore, hidden = _gradient(dhidden, saved)
    return (
        shaped(torch.mm(dbefore, weight1), saved.x),
        torch.mm(dbefore.t(), rows),
        bias1_gradient(saved, dbefore),
        scaled_mm(dout.t(), hidden, saved.dropout.scale),
        dout.sum(0) if saved.has_bias2 else rows.new_empty(0),
    )


_backward = Operator(
    "gelu_feed_forward_backward",
    _Backward,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    fake_derivatives,
)
gelu_feed_forward = Operator(
    "gelu_feed_forward",
    _Call,
    "(Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    decide=decide,
    save=_save,
    backward=_differentiate,
    autocast=autocast,
)
