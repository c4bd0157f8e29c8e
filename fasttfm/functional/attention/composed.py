"""Attention with windows, soft caps, ALiBi or sinks in plain PyTorch, which differentiates it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fasttfm.functional.attention import routes, torch_route
from fasttfm.functional.attention.arguments import LARGEST, Options
from fasttfm.functional.attention.layout import heads_last
from fasttfm.functional.dropout import wide


def attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """The output (B, H, L, Dv) of attention() with options that are not plain.

    On a CPU a window's keys alone are multiplied, some queries at a time.
    """
    if not _is_banded(query, key, options):
        return _whole(query, key, value, options)
    outputs = []
    for (first, last), (start, end) in _bands(query.shape[2], key.shape[2], options):
        part = _part(options, (first, last), (start, end))
        outputs.append(_whole(query[:, :, first:last], key[:, :, start:end], value[:, :, start:end], part))
    return heads_last(torch.cat(outputs, dim=2))


def _whole(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    bounded = options.softcap != 0.0 or options.sinks is not None
    if not bounded and routes.takes_fused(query, key, value, options.mask, scale=options.scale, seed=options.seed):
        return torch_route.fused_forward(query, key, value, options)[0]  # torch differentiates its own kernel
    weights = dropped_weights(*torch_route.scores(query, key, options.scale), options)
    return heads_last(torch_route.product(weights, value))


def dropped_weights(scores: Tensor, scale: float, options: Options) -> Tensor:
    """The weights after dropout of products scores (B, H, L, S), which scale is still to multiply, in their dtype."""
    dtype = scores.dtype
    scores = masked_scores(scores, scale, options)
    keys = scores.shape[-1]
    if options.sinks is not None:
        scores = torch.cat([scores, _sink_scores(scores, options.sinks)], dim=-1)
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)[..., :keys]
    weights = weights.to(dtype)
    kept = torch_route.drop(weights, options)
    return weights if kept is None else kept


def _sink_scores(scores: Tensor, sinks: Tensor) -> Tensor:
    """Sinks (H,) as the column (B, H, L, 1) that scores (B, H, L, S) get; inf must not be subtracted from itself."""
    return sinks.to(scores.dtype).clamp(max=LARGEST).view(-1, 1, 1).expand(*scores.shape[:3], 1)


def masked_scores(scores: Tensor, scale: float, options: Options) -> Tensor:
    """Products scores (B, H, L, S) scaled, capped and with what is added to them, float32 at least; -inf where a query
    does not attend."""
    precise = wide(scores.dtype)
    scores = scores.to(precise) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    bias = torch_route.bias(scores.shape[-2], scores.shape[-1], scores, options)
    if bias is None:
        return scores
    return (scores + bias).masked_fill(bias == -math.inf, -math.inf)  # not inf - inf, which float16's products lead to


def log_sum_exp(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """The logarithm of the sum of the exponentiated scores: (B, H, L) float32, -inf where a query sees no key and there
    is no sink. Some queries at a time, whatever the options."""
    parts = []
    for first in range(0, query.shape[2], _MOST):
        last = min(first + _MOST, query.shape[2])
        part = _part(options, (first, last), (0, key.shape[2]))
        products, left = torch_route.scores(query[:, :, first:last], key, options.scale)
        lse = masked_scores(products, left, part).logsumexp(-1)
        if options.sinks is not None:
            lse = torch.logaddexp(lse, _sink_scores(lse[..., None], options.sinks)[..., 0])
        parts.append(lse.float())
    return torch.cat(parts, -1) if parts else query.new_empty(query.shape[:3], dtype=torch.float32)


# --------------------------------------------------------------------------------------------------- bands of a window

_LEAST, _MOST = 64, 512
"""Queries of a band."""


def _is_banded(query: Tensor, key: Tensor, options: Options) -> bool:
    """Return whether a window leaves out keys that are known without waiting for a device. Dropout draws for whole
    rows, and a graph of torch.compile must not depend on lengths."""
    return (
        options.window != -1
        and options.causal
        and options.seed is None
        and query.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and query.shape[0] * query.shape[2] > 0
        and options.window + _LEAST < key.shape[2]
    )


def _bands(queries: int, keys: int, options: Options) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of queries, and of the keys that any of them sees."""
    least = most = options.causal_offset
    if options.offsets is not None:
        least, most = least + int(options.offsets.min()), most + int(options.offsets.max())
    step = min(max(options.window + 1, _LEAST), _MOST)
    for first in range(0, queries, step):
        last = min(first + step, queries)
        start = min(max(first + least - options.window, 0), keys)
        yield (first, last), (start, max(min(last + most, keys), start))


def _part(options: Options, queries: tuple[int, int], keys: tuple[int, int]) -> Options:
    """The options of some queries on some keys."""
    (first, last), (start, end) = queries, keys
    mask, lengths = options.mask, options.key_lengths
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., first:last, :]
    if mask is not None and mask.dim() > 0 and mask.shape[-1] > 1:
        mask = mask[..., start:end]
    return options._replace(
        mask=mask,
        key_lengths=None if lengths is None else lengths - start,
        causal_offset=options.causal_offset + first - start,
    )
