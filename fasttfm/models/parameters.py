"""The parameters of a Transformer as one pass reads them.

A training pass through the kernels reads all of them through one node a stack (functional/parameters.py): cast
together, the keys and values of all decoder layers projected by one matrix, and the gradients of biases and norms,
which the kernels leave as partial sums, added up in one launch. Any other pass reads them as they are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.parameters import Part, Sum, read_parameters


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of attention."""

    weight: Tensor
    bias: Tensor
    bias_parts: Tensor | None = None
    """Takes the gradient of the bias, where attention sums it; None: the bias itself does."""


@dataclass(slots=True)
class Parameters:
    """Call it with a parameter for what a pass reads in its stead."""

    read: dict[Hashable, Tensor] = field(default_factory=dict)
    """By the parameter's id, or by part and module."""
    parts: dict[Hashable, Tensor] = field(default_factory=dict)
    """Takes the gradient of a bias that is read elsewhere; keys likewise."""
    memory: list[Projection] = field(default_factory=list)
    """Keys and values of the encoder's output: a projection for all decoder layers, or one each."""

    def __call__(self, parameter: Tensor) -> Tensor:
        return self.read.get(id(parameter), parameter)

    def parts_of(self, parameter: Tensor) -> Tensor | None:
        """What takes the gradient of a bias, if not what is read of it."""
        return self.parts.get(id(parameter))

    def joint(self, attention: Any) -> Projection:
        """To queries, keys and values."""
        bias = attention.in_proj_bias
        return Projection(self(attention.in_proj_weight), self(bias), self.parts_of(bias))

    def query(self, attention: Any) -> Projection:
        """To the queries of attention over the encoder's output."""
        weight, bias = _query(attention, "weight"), _query(attention, "bias")
        if weight not in self.read:
            width = attention.in_proj_weight.shape[1]
            return Projection(attention.in_proj_weight[:width], attention.in_proj_bias[:width])
        return Projection(self.read[weight], self.read[bias], self.parts.get(bias))

    def memory_parts(self, attention: Any) -> Tensor | None:
        """What takes the gradient of the bias of a layer's keys and values of the encoder's output."""
        return self.parts.get(_memory(attention))


def _query(attention: Any, what: str) -> Hashable:
    return what, id(attention)


def _memory(attention: Any) -> Hashable:
    return "memory", id(attention)


def as_they_are(decoder: Any) -> Parameters:
    """Every parameter itself, and views of those of attention over the encoder's output."""
    read = Parameters()
    for layer in decoder.layers:
        attention = layer.multihead_attn
        width = attention.in_proj_weight.shape[1]
        sizes = [width, 2 * width]  # one split for both uses, or autograd would add two gradients of the whole
        weights, biases = attention.in_proj_weight.split(sizes), attention.in_proj_bias.split(sizes)
        read.read[_query(attention, "weight")], read.read[_query(attention, "bias")] = weights[0], biases[0]
        read.memory.append(Projection(weights[1], biases[1]))
    return read


@dataclass(frozen=True, slots=True)
class Rows:
    """How many tokens a stack sees: padding counts, unless the sentences are packed."""

    sentences: int
    tokens: int
    longest: int


def together(model: Any, source: Rows, target: Rows) -> Parameters | None:
    """The layers' parameters through one node each for encoder and decoder.

    None where that is of no use: without gradients or kernels, under torch.compile, with parameters not in float32.
    """
    like = model.target_embedding.weight
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not F.adds_bias(like):
        return None
    if any(p.dtype != torch.float32 for p in model.parameters()) or not source.tokens * target.tokens:
        return None
    device = like.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else torch.float32
    read = Parameters()
    for stack, rows in ((model.encoder, source), (model.decoder, target)):
        _Stack(stack, rows, source, dtype, device).add_to(read)
    return read


class _Stack:
    """What the layers of the encoder or of the decoder read."""

    def __init__(self, stack: Any, rows: Rows, memory: Rows, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.rows, self.memory_rows = rows, memory
        self.programs: dict[Hashable, int | None] = {}
        """Into how many parts each kind of gradient comes: asked once, not once a layer."""
        self.products: dict[Hashable, list[Part]] = {}
        self.biases: dict[Hashable, list[Part]] = {}
        self.sums: dict[Hashable, Sum] = {}
        self.cross = [layer.multihead_attn for layer in stack.layers if hasattr(layer, "multihead_attn")]
        for index, layer in enumerate(stack.layers):
            self._self_attention(layer.self_attn)
            if self.cross:
                self._cross_attention(layer.multihead_attn)
            self._feed_forward(layer, ends_in_norm=not layer.norm_first or stack.following(index) is not None)
            self._norms(layer.norm1, layer.norm2, layer.norm3 if self.cross else None)
        self._norms(stack.norm)
        self._memory()

    def add_to(self, read: Parameters) -> None:
        groups = (list(self.products.values()), list(self.biases.values()), list(self.sums.values()))
        products, biases, sums = read_parameters(*groups, self.dtype)
        read.read |= dict(zip(self.products, products)) | dict(zip(self.biases, biases))
        memory = {_memory(attention) for attention in self.cross}
        for key, value in zip(self.sums, sums):
            (read.parts if key in self.biases or key in memory else read.read)[key] = value
        if self.cross:
            read.memory.append(Projection(read.read["memory weight"], read.read["memory bias"]))

    def _norms(self, *norms: nn.LayerNorm | None) -> None:
        for norm in norms:
            if norm is not None:
                self._vector(norm.weight)
                self._vector(norm.bias)

    def _whole(self, parameter: Tensor) -> None:
        self.products[id(parameter)] = [Part(parameter)]

    def _vector(self, parameter: Tensor) -> None:
        """A parameter of a norm, or the bias that the norm adds."""
        width = parameter.shape[0]
        if width not in self.programs:
            self.programs[width] = F.norm_programs(self.rows.tokens, width, self.device)
        programs = self.programs[width]
        if programs is not None:
            self.sums[id(parameter)] = Sum(Part(parameter), programs)

    def _attention_bias(self, key: Hashable, part: Part, keys: int, head_size: int) -> bool:
        """Whether attention sums the gradient of this bias of a projection."""
        kind = "attention", keys, head_size
        if kind not in self.programs:
            self.programs[kind] = F.joint_programs(self.rows.sentences, keys, head_size, self.dtype, self.device)
        programs = self.programs[kind]
        if programs is None:
            return False
        self.sums[key] = Sum(part, programs)
        return True

    def _self_attention(self, attention: Any) -> None:
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        self._whole(weight)
        key, parts = id(bias), [Part(bias)]
        summed = self._attention_bias(key, parts[0], self.rows.longest, weight.shape[1] // attention.heads)
        (self.biases if summed else self.products)[key] = parts
        self._output(attention.out_proj, ends_in_norm=True)

    def _cross_attention(self, attention: Any) -> None:
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        width = weight.shape[1]
        self.products[_query(attention, "weight")] = [Part(weight, 0, width)]
        key, parts = _query(attention, "bias"), [Part(bias, 0, width)]
        summed = self._attention_bias(key, parts[0], self.memory_rows.longest, width // attention.heads)
        (self.biases if summed else self.products)[key] = parts
        self._output(attention.out_proj, ends_in_norm=True)

    def _memory(self) -> None:
        """One projection to the keys and values of all layers."""
        if not self.cross:
            return
        width = self.cross[0].in_proj_weight.shape[1]
        self.products["memory weight"] = [Part(attention.in_proj_weight, width) for attention in self.cross]
        parts = [Part(attention.in_proj_bias, width) for attention in self.cross]
        head_size = width // self.cross[0].heads
        summed = [
            self._attention_bias(_memory(attention), part, self.memory_rows.longest, head_size)
            for attention, part in zip(self.cross, parts)
        ]
        (self.biases if all(summed) else self.products)["memory bias"] = parts

    def _output(self, linear: nn.Linear, *, ends_in_norm: bool) -> None:
        """The last product of a sub-layer."""
        self._whole(linear.weight)
        if ends_in_norm:
            self._vector(linear.bias)
        else:
            self._whole(linear.bias)

    def _feed_forward(self, layer: Any, *, ends_in_norm: bool) -> None:
        first, second = layer.linear1, layer.linear2
        self._whole(first.weight)
        self._whole(first.bias)
        if layer.activation == "relu":
            kind = tuple(second.weight.shape)
            if kind not in self.programs:
                out, hidden = kind
                self.programs[kind] = F.feed_forward_programs(self.rows.tokens, hidden, out, self.dtype, self.device)
            programs = self.programs[kind]
            assert programs is not None
            self.biases[id(first.bias)] = self.products.pop(id(first.bias))
            self.sums[id(first.bias)] = Sum(Part(first.bias), programs)
        self._output(second, ends_in_norm=ends_in_norm)
