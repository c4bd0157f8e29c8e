"""Decoder step of a search on a CPU, fused into products and compiled passes.

For a small batch, modules, views and registered operators take longer than the products. Here the products of a decoder
are prepared once per search, results go to reused buffers, and everything between two products is one pass
(cpu/step_loops.py). In int8 a pass also scales the sums of the previous product and quantizes the input of the next. In
floating point the numbers are those of the modules, with post-norm bit for bit.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from fasttfm.cpu import step_passes
from fasttfm.cpu.linear import FrozenLinear, frozen_in_int8, kept_with_weights
from fasttfm.cpu.step_cache import StepCache
from fasttfm.cpu.step_passes import array
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.plain import LINEAR, untouched
from fasttfm.search.cpu.encoder_pass import norm_arrays, norms_of, plain_stack

_SELECTED = 256
"""Outputs per product when few are selected; a fixed number, so that a sum does not depend on the selection."""


def fuses_step(model: Any, memory: Tensor) -> bool:
    """Return whether DecoderStep is equivalent to the model's modules: plain classes without hooks or wrappers."""
    embedding, output = model.target_embedding, model.output
    return (
        not (frozen_in_int8() and memory.dtype != torch.float32)
        and plain_stack(model.decoder, embedding, memory)
        and untouched(output, LINEAR)
        and ordinary(embedding.weight, output.weight, output.bias)
    )


class _Layer:
    """Products of a decoder layer, and its norms in order of use."""

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
        self.norms = [norm_arrays(each) for each in norms]


def _products(model: Any, norms: list[Any]) -> tuple[list[_Layer], FrozenLinear]:
    """The decoder layers, with norms in order of use, and the product to the vocabulary."""
    layers = [_Layer(each, norms[3 * n : 3 * n + 3]) for n, each in enumerate(model.decoder.layers)]
    return layers, FrozenLinear(model.output.weight, model.output.bias)


class _Rows:
    """Buffer of rows between two passes."""

    def __init__(self, operand: Tensor, values: Tensor, scales: Any) -> None:
        self.operand, self._values = operand, values
        """Input of the next product."""
        self.scales = scales
        self.arrays = array(values), None if scales is None else operand.numpy(), scales
        """Outputs of a pass: values, and in int8 the quantized rows with their scales."""

    def first(self, rows: int) -> "_Rows":
        """The first rows, in the same memory."""
        return _Rows(self.operand[:rows], self._values[:rows], None if self.scales is None else self.scales[:rows])

    def times(self, linear: FrozenLinear, sums: Tensor) -> tuple[Callable[[], Any], Any, Any]:
        """The call that multiplies the rows by a weight, to sums; in int8 also row scales and bias to apply to it."""
        return linear.reading(self.operand, sums), self.scales, linear.bias


class _Memory:
    """Memory of up to `rows` rows between the passes. All layers and row counts share it, as each pass reads only what
    the product before it wrote."""

    def __init__(self, layers: list[_Layer], rows: int, width: int, dtype: torch.dtype) -> None:
        self.rows, int8, hidden = rows, layers[0].joint.int8, layers[0].hidden.outputs

        def buffer(width: int) -> _Rows:
            values = torch.zeros(rows, width, dtype=dtype, device="cpu")
            operand, scales = (values.byte(), np.zeros(rows, np.float32)) if int8 else (values, None)
            return _Rows(operand, values, scales)

        self.x, self.heads, self.hidden = buffer(width), buffer(width), buffer(hidden if int8 else 1)
        self.stream = torch.zeros(rows, width, dtype=dtype, device="cpu")
        widest = max(3 * width, hidden + width)  # followed_by() keeps two results
        self.sums = torch.zeros(rows * widest, dtype=torch.float32 if int8 else dtype, device="cpu")


class _Buffers:
    """Buffers between the products of a number of rows, and these products per layer."""

    def __init__(self, layers: list[_Layer], memory: _Memory, rows: int) -> None:
        self.x, heads, hidden = (each.first(rows) for each in (memory.x, memory.heads, memory.hidden))
        self.heads, self.hidden, self.stream = heads.arrays, hidden.arrays, array(memory.stream[:rows])
        x, sums = self.x, memory.sums
        self.layers: list[Any] = []
        for each in layers:
            attention = (
                x.times(each.joint, sums), heads.times(each.self_output, sums), x.times(each.query, sums),
                heads.times(each.cross_output, sums),
            )  # fmt: skip
            if x.scales is not None:
                network: Any = x.times(each.hidden, sums), hidden.times(each.output, sums)
            else:
                network = (None,) * 3, (each.hidden.followed_by(each.output, x.operand, sums), None, None)
            self.layers.append((*attention, *network, each.norms))


class DecoderStep:
    """Decoder step of a Transformer with a StepCache in a few compiled calls. Make and use inside frozen_weights()."""

    def __init__(self, model: Any) -> None:
        self.pre_norm = model.decoder.layers[0].norm_first
        norms = norms_of(model.decoder)
        # The weight cache of an ensemble is shared by its members; the id is checked against a live reference.
        key = "decoder step", id(model), self.pre_norm, *[each.eps for each in norms]
        of_model, *products = kept_with_weights(key, lambda: (ref(model), *_products(model, norms[self.pre_norm :])))
        if of_model() is not model:
            products = [*_products(model, norms[self.pre_norm :])]
        self.layers, self.output = products
        self.first = norm_arrays(norms[0]) if self.pre_norm else None
        self._output_weights = model.output.weight, model.output.bias
        self._selected: tuple[Tensor, list[FrozenLinear]] | None = None
        self.table, self.positions = model.target_embedding.weight, model.target_positions
        self.pad = model.config.pad_id
        self.int8 = self.output.int8
        self._table_of_positions: Any = None
        self._memory: _Memory | None = None
        self._buffers: dict[int, _Buffers] = {}
        """Products by row count, in this memory."""

    def __call__(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """Logits (R, V) of the token after tokens (R,), in the product's dtype; the cache grows by one position."""
        loops, team, count = step_passes.loops(), step_passes.team(), tokens.shape[0]
        buffers, width = self._buffers_of(self.output.size(count)), self.table.shape[1]
        x, heads, (_, *hidden), stream = buffers.x.arrays, buffers.heads, buffers.hidden, buffers.stream
        (ancestors, slots, positions), memory_rows, caches = cache.arrays()
        residual = stream if self.pre_norm else x[0]  # with post-norm x is the stream
        end = count, x[0], stream, *x[1:]

        start = x[0] if self.first is None else stream
        places = self._places(cache.length + 1)
        loops.embed(tokens.numpy(), array(self.table), places, positions, width**0.5, self.pad, start)
        if self.first is not None:
            loops.add_layer_norm(team, np.zeros_like(stream), None, None, residual, *self.first, *end)
        elif self.int8:
            loops.quantize_rows(team, x[0][:count], *x[1:])
        for layer, (own, memory) in zip(buffers.layers, caches):
            (joint, *a), (self_output, *b), (query, *c), (cross_output, *d), (network, *e), (last, *f), norms = layer
            loops.attend_to_ancestors(team, joint(), *a, *own, ancestors, slots, positions, *heads)
            loops.add_layer_norm(team, self_output(), *b, residual, *norms[0], *end)
            loops.attend_to_memory(team, query(), *c, *memory, *memory_rows, *heads)
            loops.add_layer_norm(team, cross_output(), *d, residual, *norms[1], *end)
            if self.int8:
                loops.quantize_relu(team, network(), *e, count, *hidden)
            loops.add_layer_norm(team, last(), *f, residual, *norms[2], *end)
        cache.advance()
        return self._logits(buffers.x, count)

    def _buffers_of(self, rows: int) -> _Buffers:
        if self._memory is None or rows > self._memory.rows:
            self._memory, self._buffers = _Memory(self.layers, rows, self.table.shape[1], self.table.dtype), {}
        if rows not in self._buffers:
            self._buffers[rows] = _Buffers(self.layers, self._memory, rows)
        return self._buffers[rows]

    def _places(self, length: int) -> Any:
        """Position table with at least `length` rows, as a float32 array."""
        if self._table_of_positions is None or len(self._table_of_positions) < length:
            self._table_of_positions = self.positions.rows(length, self.table.device).detach().float().numpy()
        return self._table_of_positions

    def select_outputs(self, tokens: Tensor | None) -> None:
        """Compute only the logits of these tokens (U,) int64 from now on, others are -inf; None: all."""
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

    def _logits(self, x: _Rows, count: int) -> Tensor:
        if self._selected is None:
            return self._product(x, self.output, count)
        tokens, products = self._selected
        parts = [self._product(x, product, count) for product in products]
        computed = torch.cat(parts, dim=1)[:, : len(tokens)]
        logits = computed.new_full((count, self.table.shape[0]), -torch.inf)
        return logits.index_copy_(1, tokens, computed)

    @staticmethod
    def _product(x: _Rows, product: FrozenLinear, count: int) -> Tensor:
        if x.scales is None:
            return product.of_rows(len(x.operand))(x.operand)[:count]
        return product.scaled(x.operand, torch.from_numpy(x.scales))[:count]
