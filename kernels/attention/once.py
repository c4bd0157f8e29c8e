"""Attention with a given kernel, planned and launched in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.attention import backward as long_backward
from fasttfm.kernels.attention import forward as long_forward
from fasttfm.kernels.attention import short
from fasttfm.kernels.attention.launch import Call, Problems, like_heads, prepare, unit


def forward(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, *, out: tuple[Tensor, Tensor] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention and its log-sum-exp with the short or flash kernel.

    query (B, H, L, D), key (B, Hk, S, D), value (B, Hk, S, DV), H a multiple of Hk; options as for launch.prepare().
    Returns the output (B, H, L, DV) and the log-sum-exp (B, H, L) float32 in base 2; out: buffers for both.
    """
    if options.get("scale", 1.0) < 0.0:
        query = -query
    call, problem = prepared(query, key, value, options, positive=True)
    output, lse = out or (like_heads(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32))
    if call.planes and call.queries:
        plan: Any = short.Forward if kernel == "short" else long_forward.plan
        plan(call, output, lse)(*call.inputs, output, lse, problem)
    return output, lse


def backward(
    kernel: str, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *,
    out: Sequence[Tensor] | None = None, **options: Any,
) -> Sequence[Tensor]:  # fmt: skip
    """Compute the gradients of query, key and value.

    grad and output (B, H, L, DV), lse (B, H, L) contiguous, from forward(); other arguments as there. out: buffers for
    the gradients.
    """
    call, problem = prepared(query, key, value, options)
    gradients = out or tuple(map(like_heads, call.inputs))
    grad, output = unit(grad), unit(output)
    if call.planes:
        if kernel == "short":
            plan: Any = short.backward(call, grad, output, lse, gradients, None, packed="packed" in options)
        else:
            plan = long_backward.Backward(call, grad, output, lse, gradients)
        plan(grad, *call.inputs, output, lse, gradients, problem)
    return gradients


def prepared(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], *, positive: bool = False
) -> tuple[Call, tuple]:
    """Return the Call and the Problem of one call; options as for launch.prepare(), positive as for Problems."""
    call = prepare(query, key, value, **options)
    tensors = {name: options.get(name) for name in ("mask", "slopes", "sinks")}
    problems = Problems(call, call.problem.spans, **tensors, positive=positive)
    places = tensors["mask"], options.get("offsets"), tensors["slopes"], tensors["sinks"], options.get("seed")
    return call, problems(call.problem.spans, places, options.get("site", 0))
