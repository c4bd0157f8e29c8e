"""Attention by PyTorch's cuDNN, for the calls that LIBRARY in kernels/tiles/attention.py lists.

It saves the output and the log-sum-exp in base 2, like the flash kernel, so that the flash kernel can compute its
gradients: cuDNN sums them by atomics, so torch.use_deterministic_algorithms() leaves them to ours.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention import kernel_plans
from fasttfm.functional.attention.call import Call, heads_last, is_empty, is_plain

Outputs = tuple[Tensor | None, ...]

LENGTHS = 128
"""Lengths that are no multiple of it stay with our kernels: cuDNN builds a plan per shape, about half a second a pass,
and batches of ever new lengths would wait for it in most steps."""

_LN2 = math.log(2.0)
_attend = torch.ops.aten._scaled_dot_product_cudnn_attention
_differentiate = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def fits(call: Call) -> bool:
    """Return whether the table lists this call for cuDNN: unmasked or causal, heads adjacent in memory, no dropout.

    Dynamic lengths stay with our kernels.
    """
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
        and _listed(query, causal=call.causal)
    )


def usable(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Return whether cuDNN supports such tensors on this device, and is enabled now: see enable_cudnn_sdp()."""
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, False)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _listed(query: Tensor, *, causal: bool) -> bool:
    from fasttfm.kernels.attention.launch import key_class, width_class
    from fasttfm.kernels.launch import chip, product_kind
    from fasttfm.kernels.tiles.attention import LIBRARY

    device, (*_, length, width) = chip(query.device), query.shape
    size = product_kind(query.dtype, device), max(64, width_class(width)), "causal" if causal else "none"
    return LIBRARY(device, *size, key_class(length)) == "cudnn"


def forward(call: Call) -> Outputs:
    """The output, and saved, kept and lse as in Saved."""
    query, key, value = call[:3]
    output, lse, *_ = _attend(query, key, value, None, True, 0.0, call.causal, False, scale=call.scale)
    return heads_last(output), lse.reshape(query.shape[:3]) / _LN2, None, None


def backward(*call: Any) -> Callable[[Any], Outputs]:
    """Plan a backward pass, as kernel_plans.backward()."""
    ours = kernel_plans.backward(*call)

    def compute(backward: Any) -> Outputs:
        return ours(backward) if torch.are_deterministic_algorithms_enabled() else gradients(backward)

    return compute


def gradients(backward: Any) -> Outputs:
    """Gradients by cuDNN, in the order of the backward operator's outputs."""
    grad, *_, (call, output, lse, *_) = backward
    query, key, value = call[:3]
    unused = torch.empty((), dtype=torch.int64, device=grad.device)  # seed and offset of dropout
    tensors = heads_last(grad), query, key, value, output, (lse * _LN2).unsqueeze(-1), unused, unused
    length = query.shape[2]
    results = _differentiate(*tensors, None, None, None, length, length, 0.0, call.causal, scale=call.scale)
    return *map(heads_last, results), None, None, None, None
