"""Attention in explicit PyTorch: what runs where no Triton kernel does, and fast on the CPU.

Matrix products stay in the input's precision, the softmax is float32. The forward pass hands the weights to the
backward pass: at sentence lengths they are small, and writing them costs less than a second Q K^T and softmax. On a CPU
this is several times faster in bfloat16 than torch's fused kernel, whose softmax and backward pass are slow there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasttfm import reference


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bias(
    scores: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scaled scores, as small as broadcasting to (B, H, L, S) allows, and which rows see no key.

    Both are None where there is nothing to add, or no row can be empty.
    """
    queries, keys = scores.shape[-2:]
    device = scores.device
    allowed: Tensor | None = None
    empty: Tensor | None = None
    if causal and causal_offset < keys - 1:
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(causal_offset)
        if causal_offset < 0:
            empty = (torch.arange(queries, device=device) < -causal_offset)[:, None]
    if key_lengths is not None:
        lengths = key_lengths.view(-1, 1, 1, 1)
        within = torch.arange(keys, device=device) < lengths
        allowed = within if allowed is None else within & allowed
        without = lengths <= 0
        empty = without if empty is None else empty | without
    if mask is not None and mask.dtype == torch.bool:
        allowed = mask if allowed is None else allowed & mask
    wide = _wide(scores.dtype)
    bias: Tensor | None = None
    if allowed is not None:
        bias = torch.zeros(allowed.shape, dtype=wide, device=device).masked_fill_(~allowed, -math.inf)
    if mask is not None:
        if mask.dtype != torch.bool:
            bias = mask.to(wide) if bias is None else bias + mask
        assert bias is not None
        empty = bias.amax(dim=-1, keepdim=True) == -math.inf
    if empty is not None and empty.device.type == "cpu" and not empty.any():
        empty = None
    return bias, empty


_VECTOR = 16  # floats in the widest CPU register


def _softmax(scores: Tensor) -> Tensor:
    """torch.softmax over the last dimension; may return a view of something wider.

    Rows shorter than a register fall to a loop in PyTorch that is ten times slower than a padded row.
    """
    keys = scores.shape[-1]
    if keys < _VECTOR and scores.device.type == "cpu" and scores.numel() > 4096:
        scores = torch.nn.functional.pad(scores, (0, _VECTOR - keys), value=-math.inf)
    return torch.softmax(scores, dim=-1)[..., :keys]


def weights(
    scores: Tensor,
    scale: float,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
) -> Tensor:
    """softmax(scores * scale + mask) over the last dimension of scores (B, H, L, S), in scores' dtype."""
    if not scores.numel():
        return torch.empty_like(scores)
    if mask is not None and mask.dim() == 0:
        mask = mask.view(1)  # a 0-d tensor would not take part in type promotion
    bias, empty = _bias(scores, key_lengths, mask, causal, causal_offset)
    wide = _wide(scores.dtype)
    if bias is None:
        scaled = scores * scale if scores.dtype == wide else scores.to(wide).mul_(scale)
    else:
        scaled = torch.add(bias, scores, alpha=scale)
        if scores.dtype == torch.float16:
            scaled.masked_fill_(bias == -math.inf, -math.inf)  # a hidden score beyond 65,504 is inf, and inf - inf nan
    p = _softmax(scaled)
    if empty is not None:
        p.masked_fill_(empty, 0.0)
    return p.to(scores.dtype).contiguous()


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """What queries of this dtype are multiplied by before the product with the keys, and what scores are after it.

    Scaling down before it keeps float16's products in range, as the kernels' float32 sums are; a power of two rounds
    nothing.
    """
    if dtype != torch.float16 or not 0.0 < abs(scale) < 1.0:
        return 1.0, scale
    power = 2.0 ** math.floor(math.log2(abs(scale)))
    return power, scale / power


def drop(p: Tensor, dropout_p: float, seed: Tensor, stream: int) -> Tensor:
    """Dropout on weights (B, H, L, S), by the convention of kernels/philox.py."""
    batch, heads, queries, keys = p.shape
    keep = reference.keep_mask((batch * heads, queries, keys), dropout_p, seed, stream).view(p.shape)
    return (p * reference.dropout_scale(dropout_p)).mul_(keep)


def _flat(x: Tensor) -> Tensor:
    """(B, H, L, D) to (B * H, L, D); a copy only where strides leave no other way."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2], x.shape[3])


def _heads_last(x: Tensor, batch: int, heads: int) -> Tensor:
    """(B * H, L, D) to (B, H, L, D) whose memory is (B, L, H, D), so that joining the heads copies nothing."""
    x = x.view(batch, heads, x.shape[1], x.shape[2])
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the weights before dropout (B, H, L, S), and after it (None without dropout)."""
    batch, heads, queries, _ = query.shape
    power, left = split_scale(scale, query.dtype)
    q = _flat(query) if power == 1.0 else _flat(query) * power
    scores = torch.bmm(q, _flat(key).transpose(1, 2)).view(batch, heads, queries, key.shape[2])
    p = weights(scores, left, key_lengths, mask, causal, causal_offset)
    kept = drop(p, dropout_p, seed, stream) if seed is not None and dropout_p > 0.0 else None
    output = torch.bmm(_flat(p if kept is None else kept), _flat(value))
    return _heads_last(output, batch, heads), p, kept


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
    scale: float | None,
) -> Tensor:
    """All in torch's fused kernel, gradients too; on a CPU it gives zeros to a query that sees no key, as it must."""
    queries, keys = query.shape[2], key.shape[2]
    causal = causal and causal_offset < keys - 1
    triangle = causal and causal_offset == 0 and key_lengths is None and mask is None
    allowed: Tensor | None = None
    if causal and not triangle:
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(causal_offset)
    if key_lengths is not None:
        within = torch.arange(keys, device=query.device) < key_lengths.view(-1, 1, 1, 1)
        allowed = within if allowed is None else within & allowed
    if mask is not None and mask.dtype == torch.bool:
        allowed = mask if allowed is None else mask & allowed
    elif mask is not None:
        mask = mask.to(query.dtype)
        allowed = mask if allowed is None else torch.where(allowed, mask, -math.inf)
    if allowed is not None:
        allowed = allowed[(None,) * (4 - allowed.dim())]  # torch's kernel takes (L, S) and (B, H, L, S)
    attend = torch.nn.functional.scaled_dot_product_attention
    output = attend(query, key, value, allowed, is_causal=triangle, scale=scale)
    return output.transpose(1, 2).contiguous().transpose(1, 2)  # a copy only where the query's heads came first


def softmax_gradient(grad: Tensor, p: Tensor, kept: Tensor | None) -> Tensor:
    """The gradient of the scaled and masked scores from that of the weights, float32.

    grad (B, H, L, S) is the gradient after dropout, p the weights before it, kept after it (None without dropout).
    With P the weights and W = dropout(P): P * (dropout'(G) - rowsum(W * G)) = W * G - P * rowsum(W * G).
    """
    wide = _wide(p.dtype)
    p, grad = p.to(wide), grad.to(wide)
    if kept is None and p.shape[-1] >= _VECTOR:
        return torch.ops.aten._softmax_backward_data(grad, p, -1, wide)
    product = grad * (p if kept is None else kept)
    return product.addcmul_(p, product.sum(dim=-1, keepdim=True), value=-1.0)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: Tensor,
    kept: Tensor | None,
    mask: Tensor | None,
    scale: float,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value, and of the additive mask where one is given. out: memory for the first three."""
    batch, heads = query.shape[:2]
    grad, q, k, v = _flat(grad), _flat(query), _flat(key), _flat(value)
    d_value = torch.bmm(_flat(p if kept is None else kept).transpose(1, 2), grad)
    d_weights = torch.bmm(grad, v.transpose(1, 2)).view(p.shape)
    d_scores = softmax_gradient(d_weights, p, kept)
    d_mask = d_scores.sum_to_size(mask.shape).to(mask.dtype) if mask is not None else None
    d_scores = _flat((d_scores * scale).to(query.dtype))
    d_query = torch.bmm(d_scores, k)
    d_key = torch.bmm(d_scores.transpose(1, 2), q)
    gradients = (d_query, d_key, d_value)
    if out is None:
        d_query, d_key, d_value = (_heads_last(d, batch, heads) for d in gradients)
        return d_query, d_key, d_value, d_mask
    for memory, d in zip(out, gradients):
        memory.copy_(d.view(memory.shape))
    return out[0], out[1], out[2], d_mask
