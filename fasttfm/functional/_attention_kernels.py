"""Attention through Triton: which route a call takes, and what the backward pass needs of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional._attention_torch import split_scale
from fasttfm.functional._backend import use_triton


def uses_triton(x: Tensor, backend: str) -> bool:
    """Whether any kernel here takes x."""
    if x.dtype == torch.float64 or x.is_meta or not use_triton(x, backend):
        return False
    return not x.is_cuda or torch.cuda.is_available()  # a fake tensor may name a device that is not there


def route(query: Tensor, value: Tensor, keys: int, backend: str) -> str:
    """torch, or as kernels.attention_launch.route() says: short, flash or softmax.

    query (..., D), value (..., Dv), keys of the longest row; backend as _backend.chosen() gives it.
    """
    if not uses_triton(query, backend):
        return "torch"
    from fasttfm.kernels import attention_launch
    from fasttfm.kernels.launch import chip, product_kind

    here = chip(query.device)
    width = attention_launch.width_class(max(query.shape[-1], value.shape[-1]))
    return attention_launch.route(here, product_kind(query.dtype, here), width, attention_launch.key_class(keys))


def saves_weights(route: str) -> bool:
    """Whether the forward pass keeps the weights (B, H, L, S) rather than their log-sum-exp (B, H, L)."""
    return route in ("torch", "softmax")


def forward(
    route: str, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The output (B, H, L, Dv), heads last in memory, and the weights or the log-sum-exp."""
    if route == "short":
        from fasttfm.kernels import attention_short

        return attention_short.forward(query, key, value, scale=scale, **options)
    if route == "flash":
        from fasttfm.kernels import attention as attention_long

        return attention_long.forward(query, key, value, scale=scale, **options)
    from fasttfm.kernels import masked_softmax

    power, left = split_scale(scale, query.dtype)
    scores = torch.matmul(query if power == 1.0 else query * power, key.transpose(-2, -1)).contiguous()
    p, kept = masked_softmax.forward(scores, left, **options, in_place=True)
    output = torch.matmul(p if kept is None else kept, value)
    return output.transpose(1, 2).contiguous().transpose(1, 2), p


def backward(
    route: str,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    saved: Tensor,
    scale: float,
    options: dict[str, Any],
    mask_gradient: bool,
    out: tuple[Tensor, ...] | None = None,
    sums: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if asked for, of the additive mask. out: memory for the first three.

    sums: memory for these summed over queries or keys, three (B, H, D); on the short route alone.
    """
    if route == "softmax":
        return _softmax_backward(grad, query, key, value, saved, scale, options, mask_gradient, out)
    if route == "short":
        from fasttfm.kernels import attention_short

        gradients = attention_short.backward(grad, query, key, value, saved, out=out, sums=sums, scale=scale, **options)
    else:
        from fasttfm.kernels import attention_backward

        gradients = attention_backward.backward(grad, query, key, value, output, saved, out=out, scale=scale, **options)
    d_mask = None
    if mask_gradient:
        from fasttfm.kernels import attention_mask_gradient

        d_mask = attention_mask_gradient.gradient(grad, query, key, value, output, saved, scale=scale, **options)
    return *gradients, d_mask


def _softmax_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: Tensor,
    scale: float,
    options: dict[str, Any],
    mask_gradient: bool,
    out: tuple[Tensor, ...] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    from fasttfm.kernels import masked_softmax

    d_kept = torch.matmul(grad, value.transpose(-2, -1)).contiguous()
    dropout = {name: options[name] for name in ("dropout_p", "seed", "stream")}
    factor = 1.0 if mask_gradient else scale
    d_scores, kept = masked_softmax.backward(d_kept, p, factor, **dropout, in_place=True, with_kept=True)
    d_mask = None
    if mask_gradient:
        mask = options["mask"]
        d_mask = d_scores.float().sum_to_size(mask.shape).to(mask.dtype)
        d_scores = d_scores * scale  # not in place: a mask of the scores' own shape shares their memory
    gradients = (
        torch.matmul(d_scores, key),
        torch.matmul(d_scores.transpose(-2, -1), query),
        torch.matmul(kept.transpose(-2, -1), grad),
    )
    if out is None:
        d_query, d_key, d_value = (d.transpose(1, 2).contiguous().transpose(1, 2) for d in gradients)
        return d_query, d_key, d_value, d_mask
    for memory, d in zip(out, gradients):
        memory.copy_(d)
    return out[0], out[1], out[2], d_mask


def softmax(scores: Tensor, scale: float, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The weights before dropout, and after it (None without dropout), of scores (B, H, L, S)."""
    from fasttfm.kernels import masked_softmax

    return masked_softmax.forward(scores.contiguous(), scale, **options)


def softmax_gradient(
    grad: Tensor, p: Tensor, scale: float, mask: Tensor | None, dropout_p: float, seed: Tensor | None, stream: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of softmax()'s scores and, where it is given, of the additive mask.

    grad is that of the weights after dropout, p the weights before it.
    """
    from fasttfm.kernels import masked_softmax

    factor = scale if mask is None else 1.0
    d_scores, _ = masked_softmax.backward(grad.contiguous(), p, factor, dropout_p, seed, stream)
    if mask is None:
        return d_scores, None
    return d_scores * scale, d_scores.float().sum_to_size(mask.shape).to(mask.dtype)


def packed_forward(
    route: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    packed: tuple,
    options: dict[str, Any],
    covered: bool = False,
) -> tuple[Tensor, Tensor]:
    """The output (Tq, H, Dv) and the log-sum-exp (H, Tq). packed: query_starts, key_starts, max_query, max_key.

    covered: the sequences reach to the last row, so that none needs to be zero before.
    """
    from fasttfm.kernels import attention as attention_long
    from fasttfm.kernels import attention_launch, attention_short

    tokens, heads, _ = query.shape
    room = query.new_empty if covered and key.numel() else query.new_zeros
    output = room(tokens, heads, value.shape[-1])
    lse = room(heads, tokens, dtype=torch.float32)
    if output.numel():
        sequences = attention_launch.Packed(*packed)
        q, k, v, o = (attention_launch.by_head(x, sequences.batch) for x in (query, key, value, output))
        out = (o, lse.expand(sequences.batch, -1, -1))
        kernel = attention_short.forward if route == "short" else attention_long.forward
        kernel(q, k, v, out=out, packed=sequences, scale=scale, **options)
    return output, lse


def packed_backward(
    route: str,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    packed: tuple,
    options: dict[str, Any],
    out: tuple[Tensor, ...] | None = None,
    sums: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of packed query, key and value. out, sums as backward() takes them; out is zero."""
    from fasttfm.kernels import attention_backward, attention_launch, attention_short

    gradients = out or tuple(x.new_zeros(x.shape) for x in (query, key, value))
    if query.numel() and key.numel():
        sequences = attention_launch.Packed(*packed)
        g, q, k, v, o = (attention_launch.by_head(x, sequences.batch) for x in (grad, query, key, value, output))
        out = tuple(attention_launch.by_head(d, sequences.batch) for d in gradients)
        lse = lse.expand(sequences.batch, -1, -1)
        if route == "short":
            attention_short.backward(g, q, k, v, lse, out=out, sums=sums, packed=sequences, scale=scale, **options)
        else:
            attention_backward.backward(g, q, k, v, o, lse, out=out, packed=sequences, scale=scale, **options)
    return gradients
