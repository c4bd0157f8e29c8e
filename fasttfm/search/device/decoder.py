"""Decoder step of a Transformer for the rows of a State: calls prepared once, on fixed buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention.paged import WIDEST_HEAD
from fasttfm.functional.backends import kernels_take
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.embedding import LearnedPositions
from fasttfm.models.plain import EMBEDDING, LINEAR, NORM, STACK, plain_width, untouched
from fasttfm.models.step_layers import Call, Operations, StepLayers, product
from fasttfm.search.device.state import State


def decodes(model: Any) -> bool:
    """Return whether StepDecoder is equivalent to the model's modules: plain classes, no hooks, weights of one dtype.

    The encoder must be plain too: a captured graph would not call its hooks at replay.
    """
    names = "encoder", "source_embedding", "decoder", "target_embedding", "output"
    parts: list[Any] = [getattr(model, name, None) for name in names]
    encoder, read, stack, embedding, output = parts
    if hasattr(model, "start_cache") or not all(map(untouched, parts, (STACK, EMBEDDING, STACK, EMBEDDING, LINEAR))):
        return False
    layers, norm = list(stack.layers), stack.norm
    if not all(map(plain_width, (*encoder.layers, *layers))):
        return False
    heads = {attention.num_heads for each in layers for attention in (each.self_attn, each.multihead_attn)}
    return (
        len(heads) == 1
        and len({each.norm_first for each in layers}) == 1
        and all(each is None or untouched(each, NORM) for each in (encoder.norm, norm))
        and (norm is None or layers[0].norm_first)
        and not read.max_norm
        and ordinary(embedding.weight, output.weight, output.bias)
        and not embedding.max_norm
        and len({each.dtype for each in (*stack.parameters(), embedding.weight, output.weight)}) == 1
        and not torch.is_autocast_enabled(embedding.weight.device.type)
    )


def launches(model: Any) -> bool:
    """Return whether kernels can run the steps of a model that decodes()."""
    one = next(model.parameters())
    return (
        kernels_take(backends.current, one.device, one.dtype)
        and model.config.d_model <= WIDEST_HEAD * model.decoder.layers[0].self_attn.num_heads
        and all(each.is_contiguous() for each in (model.target_embedding.weight, *model.decoder.parameters()))
    )


def embed(state: State, table: Tensor, positions: Tensor, pad_id: int, out: Tensor) -> Call:
    """The call that writes table[newest] * sqrt(d) + positions[position], (R, d); zeros for padding tokens."""
    scale = table.shape[1] ** 0.5

    def call() -> None:
        tokens, beam = state.newest.view(-1), state.sizes.beam
        x = table.index_select(0, tokens).float() * scale
        x = x.view(-1, beam, x.shape[1]) + positions.index_select(0, state.position)[:, None]
        out.copy_(x.view(out.shape).masked_fill((tokens == pad_id)[:, None], 0.0))

    return call


class StepDecoder:
    """Caches of a model for the rows of a state, and the calls of a step."""

    def __init__(self, model: Any, state: State, embed: Callable[..., Call], operations: Operations) -> None:
        """model: one that decodes(); its weights are read in place at every step. embed: see embed() here."""
        self.model = model
        weight, sizes, layers = model.output.weight, state.sizes, list(model.decoder.layers)
        width, heads = weight.shape[1], layers[0].self_attn.num_heads
        make = partial(torch.zeros, dtype=weight.dtype, device=weight.device)
        self.memory = make(len(layers), 2, sizes.places + 1, heads, sizes.sources, width // heads)
        """(layers, 2, Q + 1, H, sources, D): cross-attention keys and values, by place."""
        self.logits = make(sizes.rows, sizes.vocabulary)
        """(R, V): logits of the next token."""
        own = make(len(layers), sizes.rows * sizes.steps, 2 * width)
        self.layers = inner = StepLayers(layers, model.decoder.norm, heads, own, self.memory, operations)
        positions = model.target_positions.rows(sizes.steps, weight.device)[: sizes.steps].detach()
        table = positions.float()
        self._calls = [
            embed(state, model.target_embedding.weight.detach(), table, model.config.pad_id, inner.input),
            *inner.calls,
            product(inner.output, weight, model.output.bias, self.logits),
        ]
        if table is not positions and isinstance(model.target_positions, LearnedPositions):
            self._calls.insert(0, partial(table.copy_, positions))  # training may have changed them

    def __call__(self) -> Tensor:
        """Logits (R, V) of the next tokens, in a buffer that the next step overwrites."""
        for call in self._calls:
            call()
        return self.logits

    def remember(self, source: Tensor, lengths: Tensor, places: Tensor) -> None:
        """Encode source (n, S) with lengths (n,), and store keys and values at places (n,)."""
        memory = self.model.encode(source, lengths)
        for layer, kept in zip(self.model.decoder.layers, self.memory):
            for whole, part in zip(kept, layer.multihead_attn.keys_values(memory)):
                whole[:, :, : source.shape[1]].index_copy_(0, places, part)
