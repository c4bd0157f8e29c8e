"""Weights that a forward pass reads in the place of parameters, which merges launches of many layers.

A training step reads some two hundred parameters. A Weights object makes one node of the autograd graph a stack of
layers (functional/parameters.py) read them all: it casts them together, projects the memory to the keys and values of
all decoder layers by one product, and adds up in one launch the gradients of biases and norms that kernels leave in
parts. A model makes it where a pass begins, and its layers are given it.

Nothing is merged without gradients or kernels, under torch.compile, for parameters that are not ordinary float32
tensors, and where any module in a stack has hooks or is of another class than was built.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm.blocks.inspect import NORM, fused_activation, hooked, plain_width, untouched
from fasttfm.functional.merging import attention_bias_parts, feed_forward_bias_parts, norm_adds_bias, norm_parts
from fasttfm.functional.parameters import Slice, Sum, read_parameters


class Projection(NamedTuple):
    """The linear layer from a width to queries, keys, values, or several of them."""

    weight: Tensor
    bias: Tensor | None
    bias_sums: Tensor | None = None
    """Takes the gradient of the bias where attention sums it; `bias` takes none then."""


class Rows(NamedTuple):
    """Rows that a stack sees: padding counts, unless the sequences are packed."""

    sequences: int
    tokens: int
    longest: int
    """Tokens of the longest sequence."""


class Work(NamedTuple):
    """A stack of layers, and the rows that it is going to see."""

    stack: Any
    """Has `layers`, which have self_attn, linear1, linear2, norm1 and norm2 (decoder layers also multihead_attn and
    norm3), and `norm`, or None."""
    rows: Rows
    memory: Rows | None = None
    """Of the encoder's output, for a decoder."""


class Weights:
    """Tensors that a pass takes in the place of parameters."""

    def __init__(self) -> None:
        self.values: dict[Hashable, Tensor] = {}
        """By the parameter's id, or by what is read and the attention's id."""
        self.sums: dict[Hashable, Tensor] = {}
        """What takes the gradient of a bias in its place, in parts; keys likewise."""
        self._memory_numbers: dict[int, int] = {}
        """The place of an attention over the memory, by its id, among those of its stack."""
        self._products: tuple[Tensor, ...] = ()
        """Keys and values (B, S, 2, H, D) of the memory for each of them, once they are computed."""

    def self_projection(self, attention: Any) -> Projection:
        """To queries, keys and values."""
        bias = id(attention.in_proj_bias)
        return Projection(self.values[id(attention.in_proj_weight)], self.values[bias], self.sums.get(bias))

    def query_projection(self, attention: Any) -> Projection:
        """To the queries of attention over a memory."""
        key = _query(attention, "bias")
        return Projection(self.values[_query(attention, "weight")], self.values[key], self.sums.get(key))

    def memory_product(self, attention: Any, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys and values (B, S, 2, H, D) of the memory (B, S, d), and what takes the gradient of their bias. One
        product makes those of all layers."""
        if not self._products:
            product = nn.functional.linear(memory, self.values["memory weight"], self.values["memory bias"])
            heads = product.view(*memory.shape[:2], -1, 2, attention.heads, memory.shape[2] // attention.heads)
            self._products = heads.unbind(2)
        return self._products[self._memory_numbers[id(attention)]], self.sums.get(_memory(attention))


def read_together(*works: Work) -> Weights | None:
    """The weights of a pass through these stacks, read through one node each; None where that is of no use."""
    like = next(works[0].stack.parameters(), None)
    if torch.compiler.is_compiling() or like is None or not torch.is_grad_enabled() or not norm_adds_bias(like):
        return None
    plans = []
    for work in works:
        if not work.rows.tokens or not _is_plain(work.stack):
            return None
        plans.append(_Plan(work, like.device))
        if not plans[-1].complete:
            return None
    weights = Weights()
    for plan in plans:
        plan.add_to(weights)
    return weights


def _is_plain(stack: Any) -> bool:
    """Return whether nothing in the stack is more than its class, and all parameters are float32."""
    return (
        not hooked(stack)
        and all(map(plain_width, stack.layers))
        and (stack.norm is None or untouched(stack.norm, NORM))
        and all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in stack.parameters())
    )


def _query(attention: Any, name: str) -> Hashable:
    return "query", name, id(attention)


def _memory(attention: Any) -> Hashable:
    return "memory", id(attention)


class _Plan:
    """Tensors that the layers of a stack read. `complete` is False where a module is of a class that was not built."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.rows, self.memory_rows, self.device = work.rows, work.memory, device
        autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else torch.float32
        self.complete = True
        self.parts: dict[Hashable, int | None] = {}
        """What _parts() was told."""
        self.products: dict[Hashable, list[Slice]] = {}
        self.biases: dict[Hashable, list[Slice]] = {}
        self.sums: dict[Hashable, Sum] = {}
        layers: list[Any] = list(dict.fromkeys(work.stack.layers))  # a layer may be used several times
        self.cross = [layer.multihead_attn for layer in layers if hasattr(layer, "multihead_attn")]
        for layer in layers:
            self._self_attention(layer.self_attn)
            if hasattr(layer, "multihead_attn"):
                self._cross_attention(layer.multihead_attn)
            last = layer is work.stack.layers[-1] and layer.norm_first and work.stack.norm is None
            self._feed_forward(layer, ends_in_norm=not last)
            self._norms(layer.norm1, layer.norm2, getattr(layer, "norm3", None))
        self._norms(work.stack.norm)
        self._memory()

    def add_to(self, weights: Weights) -> None:
        """Makes the node, and tells what it gives."""
        groups = (list(self.products.values()), list(self.biases.values()), list(self.sums.values()))
        products, biases, sums = read_parameters(*groups, self.dtype)
        weights.values |= dict(zip(self.products, products)) | dict(zip(self.biases, biases))
        memory = {_memory(attention) for attention in self.cross}
        for key, value in zip(self.sums, sums):
            (weights.sums if key in self.biases or key in memory else weights.values)[key] = value
        weights._memory_numbers |= {id(attention): number for number, attention in enumerate(self.cross)}

    def _parts(self, kind: Callable[..., int | None], *arguments: Any) -> int | None:
        """Into how many parts a kind of gradient comes: asked once, not once a layer."""
        key = kind, arguments
        if key not in self.parts:
            self.parts[key] = kind(*arguments)
        return self.parts[key]

    def _linear(self, module: Any) -> bool:
        """Return whether the module has a bias; the plan is not complete where it has none."""
        self.complete = self.complete and module.bias is not None
        return module.bias is not None

    def _norms(self, *norms: Any) -> None:
        for norm in norms:
            if norm is not None:
                self._vector(norm.weight)
                self._vector(norm.bias)

    def _whole(self, parameter: Tensor) -> None:
        self.products[id(parameter)] = [Slice(parameter)]

    def _vector(self, parameter: Tensor) -> None:
        """A parameter of a norm, or the bias that the norm adds."""
        parts = self._parts(norm_parts, self.rows.tokens, parameter.shape[0], self.device)
        if parts is not None:
            self.sums[id(parameter)] = Sum(Slice(parameter), parts)

    def _attention_bias(self, key: Hashable, part: Slice, keys: int, head_size: int) -> bool:
        """Return whether attention sums the gradient of this bias of a projection."""
        parts = self._parts(attention_bias_parts, self.rows.sequences, keys, head_size, self.dtype, self.device)
        if parts is None:
            return False
        self.sums[key] = Sum(part, parts)
        return True

    def _self_attention(self, attention: Any) -> None:
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        self._whole(weight)
        summed = self._attention_bias(id(bias), Slice(bias), self.rows.longest, weight.shape[1] // attention.heads)
        (self.biases if summed else self.products)[id(bias)] = [Slice(bias)]
        self._last(attention.out_proj)

    def _cross_attention(self, attention: Any) -> None:
        assert self.memory_rows is not None
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        width = weight.shape[1]
        self.products[_query(attention, "weight")] = [Slice(weight, 0, width)]
        key, part = _query(attention, "bias"), Slice(bias, 0, width)
        summed = self._attention_bias(key, part, self.memory_rows.longest, width // attention.heads)
        (self.biases if summed else self.products)[key] = [part]
        self._last(attention.out_proj)

    def _memory(self) -> None:
        """One projection to the keys and values of all layers."""
        if not self.cross:
            return
        assert self.memory_rows is not None
        width, keys = self.cross[0].in_proj_weight.shape[1], self.memory_rows.longest
        self.products["memory weight"] = [Slice(attention.in_proj_weight, width) for attention in self.cross]
        parts = [Slice(attention.in_proj_bias, width) for attention in self.cross]
        head_size = width // self.cross[0].heads
        summed = [
            self._attention_bias(_memory(attention), part, keys, head_size)
            for attention, part in zip(self.cross, parts)
        ]
        (self.biases if all(summed) else self.products)["memory bias"] = parts

    def _last(self, linear: Any, *, ends_in_norm: bool = True) -> None:
        """The last product of a sub-layer."""
        if self._linear(linear):
            self._whole(linear.weight)
            (self._vector if ends_in_norm else self._whole)(linear.bias)

    def _feed_forward(self, layer: Any, *, ends_in_norm: bool) -> None:
        first, second = layer.linear1, layer.linear2
        if not (self._linear(first) and self._linear(second)):
            return
        self._whole(first.weight)
        self._whole(first.bias)
        if fused_activation(layer.activation):
            out, hidden = second.weight.shape
            parts = self._parts(feed_forward_bias_parts, self.rows.tokens, hidden, out, self.dtype, self.device)
            assert parts is not None
            self.biases[id(first.bias)] = self.products.pop(id(first.bias))
            self.sums[id(first.bias)] = Sum(Slice(first.bias), parts)
        self._last(second, ends_in_norm=ends_in_norm)
