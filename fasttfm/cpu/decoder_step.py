"""A decoder's step in a search on a CPU as one straight run of products and passes.

A step of a small batch is short: going through modules, views and registered operators takes longer than the
products. Here the products of a decoder are looked up once a search, results lie in buffers that are used again, and
what lies between two products is one pass (cpu/step_loops.py). In int8 a pass also scales the sums of the
product before it and quantizes what the next one reads. In floating point the numbers are those of the modules, with
post-norm to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm.blocks.inspect import ATTENTION, EMBEDDING, LAYER, LINEAR, NORM, ordinary, untouched
from fasttfm.cpu import step_passes
from fasttfm.cpu.linear import FrozenLinear, frozen, frozen_in_int8
from fasttfm.cpu.step_cache import StepCache
from fasttfm.cpu.step_passes import array

_SELECTED = 256
"""Outputs of a product where not all are computed: always as many, so that a sum does not depend on the selection."""


def runs_straight(model: Any, memory: Tensor) -> bool:
    """Return whether DecoderStep computes what a Transformer's modules would, none of which is hooked or wrapped."""
    layers, norm = list(model.decoder.layers), model.decoder.norm
    if not (frozen(memory) and layers and layers[0].norm_first == (norm is not None)):
        return False
    if frozen_in_int8() and memory.dtype != torch.float32:
        return False
    norms = [each for layer in layers for each in (layer.norm1, layer.norm2, layer.norm3)] + [norm] * (norm is not None)
    linears = [each for layer in layers for each in (layer.linear1, layer.linear2)]
    attentions = [each for layer in layers for each in (layer.self_attn, layer.multihead_attn)]
    linears += [each.out_proj for each in attentions] + [model.output]
    parameters = list(model.decoder.parameters())
    return (
        untouched(model.target_embedding, EMBEDDING)
        and not model.target_embedding.max_norm
        and all(untouched(each, LAYER) and each.activation is nn.functional.relu for each in layers)
        and all(untouched(each, NORM) and each.weight is not None and each.bias is not None for each in norms)
        and all(untouched(each, LINEAR) for each in linears)
        and all(untouched(each, ATTENTION) for each in attentions)
        and ordinary(*parameters)
        and {each.dtype for each in parameters} == {memory.dtype}
        and not torch.is_autocast_enabled("cpu")
    )


_Norm = tuple[Any, Any, float]


def _arrays(norm: nn.LayerNorm) -> _Norm:
    """Its weight and bias (d,) as arrays, and its eps."""
    return array(norm.weight), array(norm.bias), norm.eps


class _Layer:
    """The products of a decoder layer, and its norms in the order in which they are needed."""

    def __init__(self, layer: Any, norms: list[Any]) -> None:
        attention, cross = layer.self_attn, layer.multihead_attn
        width = attention.out_proj.weight.shape[0]
        bias = None if cross.in_proj_bias is None else cross.in_proj_bias[:width]
        self.joint = FrozenLinear(attention.in_proj_weight, attention.in_proj_bias)
        self.self_output = FrozenLinear(attention.out_proj.weight, attention.out_proj.bias)
        self.query = FrozenLinear(cross.in_proj_weight[:width], bias)
        self.cross_output = FrozenLinear(cross.out_proj.weight, cross.out_proj.bias)
        self.hidden = FrozenLinear(layer.linear1.weight, layer.linear1.bias, relu=True)
        self.output = FrozenLinear(layer.linear2.weight, layer.linear2.bias)
        self.norms = [_arrays(each) for each in norms]


class _Rows:
    """Rows between two passes: R of them, and zeros up to a number that products are made of."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, int8: bool) -> None:
        self.values = torch.zeros(rows, width, dtype=dtype)
        self.array = array(self.values)
        self.integers = torch.zeros(rows, width, dtype=torch.int8) if int8 else None
        self.quantized = None if self.integers is None else self.integers.numpy()
        self.scales = np.zeros(rows, np.float32) if int8 else None

    def times(self, product: FrozenLinear) -> tuple[Any, Any, Any]:
        """The product as an array, the scales of its rows and its bias, which are still to be used in int8."""
        if self.integers is None:
            return array(product.multiply(self.values)), None, None
        return product.multiply(self.integers).numpy(), self.scales, product.bias


class DecoderStep:
    """A Transformer's step with a StepCache in a few compiled calls; made inside frozen_weights() and used there."""

    def __init__(self, model: Any) -> None:
        layers = list(model.decoder.layers)
        self.pre_norm = layers[0].norm_first
        following = [*(layer.norm1 for layer in layers[1:]), model.decoder.norm]
        self.layers = [
            _Layer(each, [each.norm2, each.norm3, after] if self.pre_norm else [each.norm1, each.norm2, each.norm3])
            for each, after in zip(layers, following)
        ]
        self.first = _arrays(layers[0].norm1) if self.pre_norm else None
        self.output = FrozenLinear(model.output.weight, model.output.bias)
        self._output_weights = model.output.weight, model.output.bias
        self._selected: tuple[Tensor, list[FrozenLinear]] | None = None
        self.table, self.positions = model.target_embedding.weight, model.target_positions
        self.pad = model.config.pad_id
        self.int8 = self.output.int8
        self._table_of_positions: Any = None
        self._buffers: dict[int, tuple[_Rows, _Rows, _Rows, Any]] = {}
        self._zeros = np.zeros(self.table.shape[0] if model.output.bias is None else 0, np.float32)

    def __call__(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """Logits (R, V) of the token after tokens (R,), as the product gives them; the cache grows by one position."""
        loops = step_passes.loops()
        count = tokens.shape[0]
        x, heads, hidden, stream = self._rows(self.output.size(count))
        places, positions = self._places(cache.length + 1), cache.positions.numpy()
        start = x.array if self.first is None else stream
        scale = self.table.shape[1] ** 0.5
        loops.embed(tokens.numpy(), array(self.table), places, positions, scale, self.pad, start)
        if self.first is not None:
            zeros = np.zeros_like(stream)
            self._add_norm(loops, (zeros, None, None), self.first, count, x, stream)
        elif self.int8:
            loops.quantize_rows(step_passes.team(), x.array[:count], x.quantized, x.scales)
        for number, layer in enumerate(self.layers):
            self_cache, memory = cache.layer(number)
            self_cache.attend_into(loops, x.times(layer.joint), heads)
            self._add_norm(loops, heads.times(layer.self_output), layer.norms[0], count, x, stream)
            memory.attend_into(loops, x.times(layer.query), heads)
            self._add_norm(loops, heads.times(layer.cross_output), layer.norms[1], count, x, stream)
            self._add_norm(loops, self._hidden(loops, x, layer, count, hidden), layer.norms[2], count, x, stream)
        cache.advance()
        return self._logits(loops, x, count)

    def _places(self, length: int) -> Any:
        """float32 array of at least so many positions."""
        if self._table_of_positions is None or len(self._table_of_positions) < length:
            self._table_of_positions = self.positions.rows(length, self.table.device).detach().float().numpy()
        return self._table_of_positions

    def _rows(self, size: int) -> tuple[_Rows, _Rows, _Rows, Any]:
        """The buffers for `size` rows: what products read, attention's heads, the hidden layer, and the stream."""
        if size not in self._buffers:
            width, dtype = self.table.shape[1], self.table.dtype
            hidden = self.layers[0].hidden.outputs if self.int8 else 1
            made = [_Rows(size, each, dtype, self.int8) for each in (width, width, hidden)]
            self._buffers[size] = (made[0], made[1], made[2], array(torch.zeros(size, width, dtype=dtype)))
        return self._buffers[size]

    def _add_norm(self, loops: Any, product: tuple, norm: _Norm, count: int, x: _Rows, stream: Any) -> None:
        """The stream with a product added, and x its norm; with post-norm x is the stream."""
        residual = stream if self.pre_norm else x.array
        results = x.array, stream, x.quantized, x.scales
        loops.add_layer_norm(step_passes.team(), *product, residual, *norm, count, *results)

    def _hidden(self, loops: Any, x: _Rows, layer: _Layer, count: int, hidden: _Rows) -> tuple[Any, Any, Any]:
        if not self.int8:
            return array(layer.output.multiply(layer.hidden.multiply(x.values))), None, None
        loops.quantize_relu(step_passes.team(), *x.times(layer.hidden), count, hidden.quantized, hidden.scales)
        return hidden.times(layer.output)

    def select_outputs(self, tokens: Tensor | None) -> None:
        """From now on only the logits of these tokens (U,) int64 are computed, the others are -inf; None: all."""
        self._selected = None
        if tokens is None:
            return
        weight, bias = self._output_weights
        rows = tokens.new_zeros(-(-len(tokens) // _SELECTED) * _SELECTED)
        rows[: len(tokens)] = tokens
        products = [
            FrozenLinear(weight[part], None if bias is None else bias[part], temporary=True)
            for part in rows.split(_SELECTED)
        ]
        self._selected = tokens, products

    def _logits(self, loops: Any, x: _Rows, count: int) -> Tensor:
        if self._selected is None:
            return self._scaled_sums(loops, x, self.output, count)
        tokens, products = self._selected
        parts = [self._scaled_sums(loops, x, product, count) for product in products]
        computed = torch.cat(parts, dim=1)[:, : len(tokens)]
        logits = computed.new_full((count, self.table.shape[0]), -torch.inf)
        return logits.index_copy_(1, tokens, computed)

    def _scaled_sums(self, loops: Any, x: _Rows, product: FrozenLinear, count: int) -> Tensor:
        if x.integers is None:
            return product.multiply(x.values)[:count]
        sums = product.multiply(x.integers)[:count]
        loops.scale_rows(step_passes.team(), sums.numpy(), x.scales, product.bias, False, sums.numpy())
        return sums
