"""Attention by cuDNN, which PyTorch brings, for calls that LIBRARY in kernels/tiles/attention.py sends there.

It saves what our kernels for long rows save, the output and the log-sum-exp in base 2, so that these can compute the
gradients of its output: cuDNN sums gradients by atomics, and torch.use_deterministic_algorithms() keeps them with us.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention import kernel_plans
from fasttfm.functional.attention.call import Call, is_empty, is_plain
from fasttfm.functional.attention.layout import heads_last

Outputs = tuple[Tensor | None, ...]

LENGTHS = 128
"""Lengths that are no multiple stay with our kernels: cuDNN plans every shape anew, which takes about half a second a
pass, and batches of ever new lengths would wait for it in most of their steps."""

_LN2 = math.log(2.0)
_attend = torch.ops.aten._scaled_dot_product_cudnn_attention
_differentiate = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def takes(call: Call) -> bool:
    """Return whether cuDNN computes this call: the table says so, and this cuDNN agrees."""
    return fits(call) and _usable(*call[:3], causal=call.causal)  # type: ignore[arg-type]


def usable(call: Call) -> Callable[..., bool]:
    """A function of the tensors of such calls: whether cuDNN may compute them, which
    torch.backends.cuda.enable_cudnn_sdp() changes between calls."""
    causal = call.causal
    return lambda query, key, value: _usable(query, key, value, causal=causal)


def fits(call: Call) -> bool:
    """Return whether the table gives this call to cuDNN: whole rows or a triangle, heads beside one another in memory,
    no dropout. Lengths that a graph leaves open stay with our kernels."""
    query, key, value = call[:3]
    others = any(x is not None for x in call[3:11])
    if call.backend != "auto" or value is None or key is None or others or call.only_weights or is_empty(call):
        return False
    length = query.shape[2]
    return (
        type(length) is int
        and length % LENGTHS == 0
        and query.shape == key.shape == value.shape
        and is_plain(call)
        and call.scale > 0.0
        and not (call.causal and call.causal_offset)
        and all(x.stride(1) < x.stride(2) for x in (query, key, value))
        and _chosen(query, causal=call.causal)
    )


def _usable(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Return whether this cuDNN takes such tensors on this device, and may."""
    given = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, False)
    return torch.backends.cuda.can_use_cudnn_attention(given)


def _chosen(query: Tensor, *, causal: bool) -> bool:
    from fasttfm.kernels.attention.launch import key_class, width_class
    from fasttfm.kernels.launch import chip, product_kind
    from fasttfm.kernels.tiles.attention import LIBRARY

    device, (*_, length, width) = chip(query.device), query.shape
    size = product_kind(query.dtype, device), max(64, width_class(width)), "causal" if causal else "none"
    return LIBRARY(device, *size, key_class(length)) == "cudnn"


def forward(call: Call) -> Outputs:
    """The output, and saved, kept and lse as Saved has them."""
    query, key, value = call[:3]
    output, lse, *_ = _attend(query, key, value, None, True, 0.0, call.causal, False, scale=call.scale)
    return heads_last(output), lse.reshape(query.shape[:3]) / _LN2, None, None


def backward(*call: Any) -> Callable[[Any], Outputs]:
    """A function of the call of the backward operator, as kernel_plans.backward()."""
    ours = kernel_plans.backward(*call)

    def compute(backward: Any) -> Outputs:
        return ours(backward) if torch.are_deterministic_algorithms_enabled() else gradients(backward)

    return compute


def gradients(backward: Any) -> Outputs:
    """Gradients by cuDNN, as the operator of the backward pass returns them."""
    grad, *_, (call, output, lse, *_) = backward
    query, key, value = call[:3]
    nothing = torch.empty((), dtype=torch.int64, device=grad.device)  # seed and offset of dropout
    tensors = heads_last(grad), query, key, value, output, (lse * _LN2).unsqueeze(-1), nothing, nothing
    length = query.shape[2]
    found = _differentiate(*tensors, None, None, None, length, length, 0.0, call.causal, scale=call.scale)
    return *map(heads_last, found), None, None, None, None
