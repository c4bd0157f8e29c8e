"""Attention by torch's own fused CPU kernel, which keeps a log-sum-exp of each row, and its gradients.

A sink, which that kernel does not know, of score z beside keys of log-sum-exp e takes the share 1 - sigmoid(e - z) of
a row's weight, and has no value: the output is the kernel's times sigmoid(e - z). With log(exp(e) + exp(z)) in place of
e, and that output, the kernel's backward pass gives the gradients of query, key and value.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.attention import torch_route
from fasttfm.functional.attention.arguments import LARGEST, Options
from fasttfm.functional.attention.layout import empty_heads_last, heads_last
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.operator import Gradients, Operator


def attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """The output (B, H, L, D) of float32 where routes.takes_fused() says so."""
    return _attention(query, key, value, options)[0]


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    options: Options


class _Saved(NamedTuple):
    call: _Call
    output: Tensor
    lse: Tensor
    """(B, H, L), of sinks too."""


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


def _arguments(query: Tensor, key: Tensor, options: Options) -> dict[str, Any]:
    """The mask as the kernel takes it, which gives zeros to a query that sees no key, as it must."""
    bare = options.mask is options.key_lengths is None and options._replace(sinks=None).plain
    if bare and options.causal and options.causal_offset == 0:
        return {"is_causal": True, "attn_mask": None, "scale": options.scale}
    addend = torch_route.bias(query.shape[2], key.shape[2], query, options)
    if addend is not None:
        addend = addend[(None,) * (4 - addend.dim())].expand(-1, -1, query.shape[2], key.shape[2])
    return {"is_causal": False, "attn_mask": addend, "scale": options.scale}


def _unit_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose last dimension is one after the other in memory, as the kernel takes them."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _bounded(sinks: Tensor) -> Tensor:
    """Sinks (H, 1) float32; inf must not be subtracted from itself."""
    return sinks.float().clamp(max=LARGEST)[:, None]


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp (B, H, L) of the scores, sinks among them."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = attend(*_unit_strides(query, key, value), 0.0, **_arguments(query, key, options))
    if options.sinks is not None:
        sunk = _bounded(options.sinks)
        output = output * torch.sigmoid(lse.clamp(min=-LARGEST) - sunk)[..., None]
        lse = torch.logaddexp(lse, sunk)
    return heads_last(output), lse


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, ((query, key, value, options), output, lse) = call
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = (*_unit_strides(grad, query, key, value), output, lse)
    arguments = _arguments(query, key, options)
    gradients = map(heads_last, differentiate(*tensors, 0.0, **arguments))
    if options.sinks is None:
        return *gradients, grad.new_empty(0)
    weight = (_bounded(options.sinks) - lse.clamp(min=-LARGEST)).exp()
    return *gradients, -(weight * (grad * output).sum(-1)).sum((0, 2)).to(options.sinks.dtype)


def _reference_backward(call: _Backward) -> list[Tensor]:
    query, key, value, options = call.saved.call

    def output(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return reference.attention(query, key, value, **options._replace(sinks=sinks).of_reference())[0]

    return pulled_back(output, (query, key, value, options.sinks), call.grad)


def _differentiate(saved: _Saved, wanted: Options, grad: Tensor, _: None) -> Gradients:
    gradients = dict(zip(("query", "key", "value", "sinks"), _attention_backward(grad, saved)))
    return gradients if wanted.sinks else gradients | {"sinks": None}


def _pairs(call: _Call) -> int:
    return call.query.shape[:3].numel() * call.key.shape[2]


_attention_backward = Operator(
    "attention_fused_backward",
    _Backward,
    "(Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    lambda call: (
        *(empty_heads_last(x, x.shape[3]) for x in call.saved.call[:3]),
        call.grad.new_empty(0)
        if call.saved.call.options.sinks is None
        else torch.empty_like(call.saved.call.options.sinks),
    ),
    reference=_reference_backward,
    flops=lambda call: 10 * _pairs(call.saved.call) * call.grad.shape[3],
).call
_attention = Operator(
    "attention_fused",
    _Call,
    "(Tensor, Tensor)",
    lambda call: forward(*call),
    lambda call: (empty_heads_last(call.query, call.value.shape[3]), empty_heads_last(call.query, 1)[..., 0]),
    save=lambda call, outputs: (call, *outputs),
    saved=_Saved,
    backward=_differentiate,
    flops=lambda call: 4 * _pairs(call) * call.query.shape[3],
    internal=1,
).call
