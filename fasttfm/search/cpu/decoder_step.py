"""Decoder step of a search on a CPU, fused into products and compiled passes.

For a small batch, modules, views and registered operators take longer than the products. Here the products of a decoder
are prepared once per search, results go to reused buffers, and everything between two products is one pass
(cpu/step_loops.py). The calls of a step are recorded once for a number of rows and then made together. In int8 a pass
also scales the sums of the previous product and quantizes the input of the next.
"""

from collections.abc import Iterator
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from fasttfm.cpu import step_passes
from fasttfm.cpu.int8 import quantize_rows
from fasttfm.cpu.linear import FrozenLinear, first_of, frozen_in_int8
from fasttfm.cpu.step_cache import StepCache
from fasttfm.cpu.step_passes import array
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.plain import LINEAR, untouched
from fasttfm.search.cpu.buffers import AtOnce, Buffer, Norm, hidden_of, kept_of
from fasttfm.search.cpu.encoder_pass import plain_stack

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

    def __init__(self, layer: Any, norms: list[Norm]) -> None:
        attention, cross = layer.self_attn, layer.multihead_attn
        width = attention.out_proj.weight.shape[0]
        bias, biases = (None, None) if cross.in_proj_bias is None else cross.in_proj_bias.split([width, 2 * width])
        self.joint = FrozenLinear(attention.in_proj_weight, attention.in_proj_bias)
        self.self_output = FrozenLinear(attention.out_proj.weight, attention.out_proj.bias)
        self.query = FrozenLinear(cross.in_proj_weight[:width], bias)
        self.keys_values = FrozenLinear(cross.in_proj_weight[width:], biases)
        self.cross_output = FrozenLinear(cross.out_proj.weight, cross.out_proj.bias)
        self.hidden, self.activation = hidden_of(layer)
        self.output = FrozenLinear(layer.linear2.weight, layer.linear2.bias)
        self.norms = norms


def _layers(stack: Any, norms: list[Norm]) -> tuple[list[_Layer], Norm | None]:
    """The decoder layers, and the norm before the first one if any."""
    first = norms.pop(0) if stack.layers[0].norm_first else None
    return [_Layer(each, norms[3 * n : 3 * n + 3]) for n, each in enumerate(stack.layers)], first


class _Memory:
    """Memory of up to `rows` rows between the launches. All layers and row counts share it, as each launch reads only
    what the product before it wrote."""

    def __init__(self, layers: list[_Layer], outputs: int, rows: int, dtype: torch.dtype) -> None:
        self.rows, int8, hidden = rows, layers[0].joint.int8, layers[0].hidden.outputs
        width, wide = layers[0].self_output.outputs, torch.float32 if int8 else dtype

        self.x, self.heads, self.hidden = (
            Buffer.new(rows, columns, dtype, int8) for columns in (width, width, hidden if int8 else 1)
        )
        self.stream = torch.zeros(rows, width, dtype=dtype, device="cpu")
        self.sums = torch.zeros(rows * max(3 * width, hidden), dtype=wide, device="cpu")
        self.more_sums = torch.zeros(rows * width, dtype=wide, device="cpu")
        self.logits = torch.zeros(rows * outputs, dtype=wide, device="cpu")
        self.tokens = np.zeros(rows, np.int64)


class DecoderStep:
    """Decoder step of a Transformer with a StepCache in a few compiled calls. Make and use inside frozen_weights()."""

    def __init__(self, model: Any) -> None:
        self.layers, self.first = kept_of(model, model.decoder, _layers)
        self.output = FrozenLinear(model.output.weight, model.output.bias)
        self._output_weights = model.output.weight, model.output.bias
        self._selected: tuple[Tensor, list[FrozenLinear]] | None = None
        self.table, self.positions = model.target_embedding.weight, model.target_positions
        self.pad, self._heads = model.config.pad_id, model.decoder.layers[0].self_attn.num_heads
        self.int8 = self.output.int8
        self._memory: _Memory | None = None
        self._steps: dict[int, Any] = {}
        """Recorded steps by row count."""
        self._place: tuple[ref[StepCache], int] | None = None
        """Cache whose memory the recorded steps use, and where that was."""
        self._positions = 0
        """Positions of the table that they read."""

    def __call__(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """Logits (R, V) of the token after tokens (R,), in the product's dtype; the cache grows by one position.

        The next step overwrites them.
        """
        count, place = tokens.shape[0], (ref(cache), cache.make_room())
        rows = self.output.size(count)
        if self._memory is None or rows > self._memory.rows:
            outputs = -(-self.table.shape[0] // _SELECTED) * _SELECTED
            self._memory, self._place = _Memory(self.layers, outputs, rows, self.table.dtype), None
        if place != self._place or cache.length >= self._positions:
            self._steps, self._place = {}, place
        if count not in self._steps:
            self._steps[count] = self._recorded(self._memory, rows, count, cache)
        self._memory.tokens[:count] = tokens.numpy()
        self._steps[count]()
        cache.advance()
        return self._logits(self._memory, rows)[:count]

    def _recorded(self, memory: _Memory, rows: int, count: int, cache: StepCache) -> Any:
        """The Launches of a step of `count` rows, whose products are of `rows`."""
        loops, width = step_passes.loops(), self.table.shape[1]
        launches = step_passes.loops("launches").Launches()
        x, heads, hidden = (each.first(rows) for each in (memory.x, memory.heads, memory.hidden))
        stream = array(memory.stream[:rows])
        residual = x.arrays[0] if self.first is None else stream  # with post-norm x is the stream
        end = count, x.arrays[0], stream, *x.arrays[1:]
        (ancestors, slots, positions), of_memory, caches = cache.arrays()

        def sums(linear: FrozenLinear, operand: Buffer) -> tuple[Any, Any, Any]:
            """Results of a product, and in int8 the scales of its rows and the bias."""
            out = first_of(memory.sums, rows, linear.outputs)
            return linear.add_to(launches, operand.operand, out), operand.scales, linear.bias

        places = self.positions.rows(cache.length + 1, self.table.device).detach().float().numpy()
        self._positions = len(places)
        embedded = memory.tokens[:count], array(self.table), places, positions, width**0.5, self.pad
        launches.add(loops.embed, *embedded, x.arrays[0] if self.first is None else stream)
        if self.first is not None:
            launches.add(loops.add_layer_norm, np.zeros_like(stream), None, None, residual, *self.first, *end)
        elif self.int8:
            launches.add(loops.quantize_rows, x.arrays[0][:count], *x.arrays[1:])
        for layer, (own, of_source) in zip(self.layers, caches):
            own = *own, ancestors, slots, positions
            launches.add(loops.attend_to_ancestors, *sums(layer.joint, x), *own, *heads.arrays)
            launches.add(loops.add_layer_norm, *sums(layer.self_output, heads), residual, *layer.norms[0], *end)
            launches.add(loops.attend_to_memory, *sums(layer.query, x), *of_source, *of_memory, *heads.arrays)
            launches.add(loops.add_layer_norm, *sums(layer.cross_output, heads), residual, *layer.norms[1], *end)
            inner = first_of(memory.sums, rows, layer.hidden.outputs)
            between = layer.hidden.add_to(launches, x.operand, inner, x.scales)
            if layer.activation is not None:
                launches.add(loops.activate, between, layer.activation)
            if self.int8:
                launches.add(loops.quantize_rows, between[:count], *hidden.arrays[1:])
            operand = hidden.operand if self.int8 else inner
            last = layer.output.add_to(launches, operand, first_of(memory.more_sums, rows, width))
            of_int8 = hidden.scales, layer.output.bias
            launches.add(loops.add_layer_norm, last, *of_int8, residual, *layer.norms[2], *end)
        done = 0
        for each in self._outputs():
            part = memory.logits[done * rows : (done + each.outputs) * rows].view(rows, -1)
            each.add_to(launches, x.operand, part, x.scales)
            done += each.outputs
        return launches

    def keys_values(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values (B, H, S, D) of every layer for memory (B, S, d), each until the next are computed."""
        batch, longest, width = memory.shape
        rows, scales = memory.reshape(-1, width), None
        if self.int8:
            rows, of_rows = quantize_rows(rows)
            scales = of_rows.numpy()
        out = memory.new_empty(batch, longest, 2, self._heads, width // self._heads)
        for layer in self.layers:
            layer.keys_values.add_to(AtOnce(), rows, out.view(len(rows), 2 * width), scales)
            keys, values = out.transpose(1, 3).unbind(2)
            yield keys, values

    def _outputs(self) -> list[FrozenLinear]:
        return [self.output] if self._selected is None else self._selected[1]

    def select_outputs(self, tokens: Tensor | None) -> None:
        """Compute only the logits of these tokens (U,) int64 from now on, others are -inf; None: all."""
        self._selected, self._steps = None, {}
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

    def _logits(self, memory: _Memory, rows: int) -> Tensor:
        """Logits (rows, V) of the products that a step has computed."""
        if self._selected is None:
            return memory.logits[: rows * self.output.outputs].view(rows, -1)
        tokens, products = self._selected
        parts = memory.logits[: rows * _SELECTED * len(products)].view(-1, rows, _SELECTED)
        logits = parts.new_full((rows, self.table.shape[0]), -torch.inf)
        return logits.index_copy_(1, tokens, parts.transpose(0, 1).reshape(rows, -1)[:, : len(tokens)])
