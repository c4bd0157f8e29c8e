"""Decoder layers for one new position per row: calls prepared once, on fixed buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as nnF

from fasttfm.models.plain import norms_behind

Call = Callable[[], object]


class Norm(NamedTuple):
    """LayerNorm's parameters, (d,)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Past(Protocol):
    """Index tables of the keys that R rows attend to, int64; slots are groups of consecutive rows."""

    ancestors: Tensor
    """(R, T): cache index, row * T + position, of each earlier position of a row."""
    position: Tensor
    """(slots,): position of the new tokens."""
    sentence: Tensor
    """(slots,): cache index of the memory."""
    source_lengths: Tensor
    """(slots,): length of the memory."""


class Operations:
    """Operators of StepLayers besides matrix products, in plain PyTorch on any device: reference of the kernels.

    Each method returns a call that reads and writes buffers, and whose control flow does not depend on their values.
    """

    def __init__(self, past: Past) -> None:
        self.past = past

    def norm(self, x: Tensor, residual: Tensor | None, norm: Norm, y: Tensor, s: Tensor | None) -> Call:
        """y = LayerNorm(s), s = residual + x, all (R, d); s may alias residual. Without residual, y = LayerNorm(x)."""

        def call() -> None:
            total = x if residual is None else torch.add(residual, x, out=s)
            y.copy_(nnF.layer_norm(total, y.shape[1:], *norm))

        return call

    def attend_to_ancestors(self, joint: Tensor, cache: Tensor, heads: int, out: Tensor) -> Call:
        """Self-attention (R, d) of new tokens with packed QKV joint (R, 3 d), over the past of their rows.

        Stores their keys and values in cache (R * T, 2 d).
        """
        past, (rows, width) = self.past, out.shape
        steps = past.ancestors.shape[1]

        def call() -> None:
            cache.index_copy_(0, remember_places(past), joint[:, width:])
            seen = cache.index_select(0, past.ancestors.view(-1)).view(rows, steps, 2, heads, -1)
            keys, values = seen.permute(2, 0, 3, 1, 4)
            is_past = torch.arange(steps, device=out.device) <= past.position[:, None, None]
            mask = is_past[:, None].expand(-1, rows // len(is_past), 1, steps).reshape(rows, 1, 1, steps)
            query = joint[:, :width].view(rows, heads, 1, -1)
            out.copy_(nnF.scaled_dot_product_attention(query, keys, values, mask).view(out.shape))

        return call

    def attend_to_memory(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Call:
        """Cross-attention (R, d) of query (R, d) over each slot's sentence in keys and values (Q, H, S, D)."""
        past, (_, heads, sources, size) = self.past, keys.shape

        def call() -> None:
            queries = query.view(len(past.sentence), -1, heads, size).transpose(1, 2)
            own_keys, own_values = (each.index_select(0, past.sentence) for each in (keys, values))
            mask = torch.arange(sources, device=out.device) < past.source_lengths[:, None, None, None]
            heads_joined = nnF.scaled_dot_product_attention(queries, own_keys, own_values, mask)
            out.copy_(heads_joined.transpose(1, 2).reshape(out.shape))

        return call


class StepLayers:
    """Calls of one step through plain layers and the norm behind them; weights are read in place."""

    def __init__(
        self, layers: Sequence[Any], norm: Any, heads: int, own: Tensor, memory: Any, operations: Operations
    ) -> None:
        """own (layers, R * T, 2 d): key and value of each token, by Past.ancestors; memory: keys and values (Q, H, S,
        D) per layer, unused without cross-attention. All of one dtype."""
        attention = layers[0].self_attn
        width = attention.out_proj.weight.shape[0]
        rows = own.shape[1] // operations.past.ancestors.shape[1]
        make = partial(torch.zeros, dtype=own.dtype, device=own.device)
        self._width, self._heads, self._own, self._memory, self._operations = width, heads, own, memory, operations
        self._joint, self._out = make(rows, 3 * width), make(rows, width)
        self._query, self._heads_joined = make(rows, width), make(rows, width)
        self._hidden = make(rows * max(each.linear1.weight.shape[0] for each in layers))
        self._sums, x, y = make(3, rows, width)
        pre_norm = layers[0].norm_first
        stream = self._sums if pre_norm else x
        self.input = stream
        """(R, d): buffer of the input."""
        self.calls: list[Call] = []
        if pre_norm:
            self.calls.append(operations.norm(stream, None, _norm(layers[0].norm1), x, None))
        after = [*(each.norm1 for each in layers[1:]), norm if pre_norm else None]
        for number, (layer, behind) in enumerate(zip(layers, after)):
            crosses = [self._cross_attention] if hasattr(layer, "multihead_attn") else []
            parts = [self._self_attention, *crosses, self._network]
            for part, following in zip(parts, norms_behind(layer, behind)):
                self.calls += part(number, layer, x)
                if following is None:
                    self.calls.append(partial(torch.add, self._out, stream, out=y))
                else:
                    residual = stream if pre_norm else x
                    self.calls.append(operations.norm(self._out, residual, _norm(following), y, self._sums))
                x, y = y, x
        if norm is not None and not pre_norm:
            self.calls.append(operations.norm(x, None, _norm(norm), y, None))
            x = y
        self.output = x
        """(R, d): buffer of the output, overwritten by the next step."""

    def _self_attention(self, number: int, layer: Any, x: Tensor) -> list[Call]:
        attention = layer.self_attn
        return [
            product(x, attention.in_proj_weight, attention.in_proj_bias, self._joint),
            self._operations.attend_to_ancestors(self._joint, self._own[number], self._heads, self._heads_joined),
            product(self._heads_joined, attention.out_proj.weight, attention.out_proj.bias, self._out),
        ]

    def _cross_attention(self, number: int, layer: Any, x: Tensor) -> list[Call]:
        attention, bias = layer.multihead_attn, layer.multihead_attn.in_proj_bias
        query_bias, (keys, values) = None if bias is None else bias[: self._width], self._memory[number]
        return [
            product(x, attention.in_proj_weight[: self._width], query_bias, self._query),
            self._operations.attend_to_memory(self._query, keys, values, self._heads_joined),
            product(self._heads_joined, attention.out_proj.weight, attention.out_proj.bias, self._out),
        ]

    def _network(self, number: int, layer: Any, x: Tensor) -> list[Call]:
        weight, bias = layer.linear1.weight, layer.linear1.bias
        hidden = self._hidden[: len(x) * len(weight)].view(len(x), -1)
        last = product(hidden, layer.linear2.weight, layer.linear2.bias, self._out)
        if layer.activation is nn.functional.relu and bias is not None and x.is_cuda:  # cuBLASLt epilogue
            first = partial(torch._addmm_activation, bias.detach(), x, weight.detach().t(), use_gelu=False, out=hidden)
            return [first, last]
        return [product(x, weight, bias, hidden), _activation(layer.activation, hidden), last]


def _norm(norm: Any) -> Norm:
    weight, bias = (None if each is None else each.detach() for each in (norm.weight, norm.bias))
    return Norm(weight, bias, norm.eps)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Call:
    """Return a call that writes x weight^T + bias, (M, N), to out."""
    weight = weight.detach().t()
    if bias is None:
        return partial(torch.mm, x, weight, out=out)
    return partial(torch.addmm, bias.detach(), x, weight, out=out)


def _activation(activation: Callable[..., Tensor], x: Tensor) -> Call:
    """Return a call that applies activation to x in place."""
    if activation is nn.functional.relu:
        return partial(torch.relu_, x)
    return lambda: x.copy_(activation(x))


def remember_places(past: Past) -> Tensor:
    """Append the new tokens to the past of their rows; returns their cache indices (R,)."""
    rows, steps = past.ancestors.shape
    positions = past.position[:, None].expand(-1, rows // len(past.position)).reshape(-1)
    places = torch.arange(rows, device=positions.device) * steps + positions
    past.ancestors.scatter_(1, positions[:, None], places[:, None])
    return places
