"""Attention with windows, soft caps, ALiBi or sinks in plain PyTorch, which differentiates it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasttfm.functional.attention import torch_route
from fasttfm.functional.attention.arguments import Options
from fasttfm.functional.attention.layout import heads_last
from fasttfm.functional.dropout import wide


def attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """The output (B, H, L, Dv) of attention() with options that are not plain."""
    weights = dropped_weights(*torch_route.scores(query, key, options.scale), options)
    return heads_last(torch_route.product(weights, value))


def dropped_weights(scores: Tensor, scale: float, options: Options) -> Tensor:
    """The weights after dropout of products scores (B, H, L, S), which scale is still to multiply, in their dtype."""
    dtype = scores.dtype
    precise = wide(dtype)
    scores = scores.to(precise) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    bias = torch_route.bias(scores.shape[-2], scores.shape[-1], scores, options)
    if bias is not None:
        hidden = bias == -math.inf
        scores = (scores + bias).masked_fill(hidden, -math.inf)  # not inf - inf, which float16's products lead to
    if options.sinks is not None:
        sink = options.sinks.to(precise).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        empty = (scores == -math.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    weights = weights.to(dtype)
    kept = torch_route.drop(weights, options)
    return weights if kept is None else kept
