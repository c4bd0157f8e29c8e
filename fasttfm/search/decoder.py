"""Decoder steps of a search: caches and one target position at a time.

On a CPU with numba a plain model runs a step as one fused pass (search/cpu/decoder_step.py) over a cache that never
moves rows (cpu/step_cache.py). Otherwise a step calls the model's layers with a models.cache.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fasttfm.cpu.linear import batch_invariant
from fasttfm.cpu.step_cache import StepCache
from fasttfm.cpu.step_passes import takes
from fasttfm.errors import UserError
from fasttfm.functional import backends
from fasttfm.functional.dropout import NO_DROPOUT
from fasttfm.models.cache import DecoderCache
from fasttfm.models.embedding import embed
from fasttfm.models.plain import apply_linear
from fasttfm.models.transformer import Transformer
from fasttfm.search.cpu.decoder_step import DecoderStep, fuses_step
from fasttfm.search.cpu.encoder_pass import encode, fuses_encoder


def decoder_of(model: Any) -> Any:
    """The object that starts caches and takes steps: a TransformerDecoder, or the model itself (an ensemble)."""
    return model if hasattr(model, "start_cache") else TransformerDecoder(model)


def positions_of(model: Any) -> int | None:
    """Number of positions of a model, or the smallest of an ensemble; None: unlimited."""
    sizes = [getattr(each.config, "positions", None) for each in getattr(model, "models", [model])]
    return min((size for size in sizes if size is not None), default=None)


def refuse_longer(model: Any, sources: Iterable[int], targets: Iterable[int]) -> None:
    """Raise UserError for lengths (with begin- and end-of-sentence) beyond the model's learned positions."""
    most = positions_of(model)
    for side, lengths in (("source", sources), ("target", targets)):
        longest = max(lengths, default=0)
        if most is not None and longest > most:
            raise UserError(
                f"a {side} has {longest:,} tokens with its markers: this model has learned positions for {most:,}"
            )


class TransformerDecoder:
    """Decoder steps of a models.Transformer."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Encoder output (B, S, d) for source (B, S). Call inside one frozen_weights()."""
        if self.fuses_encoder and source.numel():
            return encode(self.model, source, source_lengths)
        return self.model.encode(source, source_lengths)

    @functools.cached_property
    def fuses_encoder(self) -> bool:
        """Return whether each sentence is encoded by itself, without padding."""
        rows, is_ours = self._nothing(), getattr(self.model.encode, "__func__", None) is Transformer.encode
        return is_ours and _compiled(rows) and fuses_encoder(self.model, rows)

    def _nothing(self) -> Tensor:
        """Empty tensor with the model's dtype and device."""
        weight = self.model.output.weight
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def takes_sentences(self) -> bool:
        """Return whether sentences may join a running search without affecting others. Call inside frozen_weights()."""
        rows = self._nothing()
        return _compiled(rows) and batch_invariant(rows) and fuses_step(self.model, rows)

    @torch.no_grad()
    def start_cache(
        self,
        memory: Tensor,
        source_lengths: Tensor | None = None,
        *,
        rows_per_sentence: int = 1,
        beam: int | None = None,
        max_length: int,
    ) -> DecoderCache | StepCache:
        """An empty cache for max_length target tokens.

        memory (B, S, d): encoder output, whose keys and values are computed here. rows_per_sentence: hypotheses at the
        first step; beam: from the second step on; None: the same.
        """
        if _compiled(memory) and memory.shape[0] and fuses_step(self.model, memory):
            cache = StepCache(DecoderStep(self.model), max_length)
            self._join(cache, memory, source_lengths, beam or rows_per_sentence, rows_per_sentence)
            return cache
        moving = DecoderCache(max_length, source_lengths=source_lengths, shared_memory=True)
        for number, layer in enumerate(self.model.decoder.layers):
            keys, values = (x.contiguous() for x in layer.multihead_attn.keys_values(memory))
            moving.layer(number).memory.update(keys, values)
            own = keys.new_empty(0, layer.self_attn.num_heads, 0, memory.shape[2] // layer.self_attn.num_heads)
            moving.layer(number).target.reserve(own, memory.shape[0] * rows_per_sentence)
        return moving

    @torch.no_grad()
    def start_running(self) -> StepCache:
        """An empty cache for join(), if takes_sentences()."""
        return StepCache(DecoderStep(self.model))

    @torch.no_grad()
    def join(
        self, cache: StepCache, source: Tensor, source_lengths: Tensor, *, beam: int, rows_per_sentence: int
    ) -> None:
        """Add sentences, source (B, S), to a cache from start_running(), with rows_per_sentence rows each at their
        first step and `beam` rows from then on."""
        self._join(cache, self.encode(source, source_lengths), source_lengths, beam, rows_per_sentence)

    def _join(
        self, cache: StepCache, memory: Tensor, lengths: Tensor | None, beam: int, rows_per_sentence: int
    ) -> None:
        if lengths is None:
            lengths = torch.full((memory.shape[0],), memory.shape[1], device="cpu")
        cache.join(cache.fused.keys_values(memory), lengths, beam, rows_per_sentence)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: DecoderCache | StepCache) -> Tensor:
        """Logits (R, V) float32 of the token after tokens (R,), one per cache row; the cache grows by one position.

        The next step may overwrite them.
        """
        if cache.capacity is not None and cache.length >= cache.capacity:
            raise ValueError(
                f"the cache holds {cache.capacity} positions and is full: start it with a larger max_length"
            )
        if isinstance(cache, StepCache):
            return cache.fused(tokens, cache).float()
        model, first = self.model, cache.length
        table, pad_id = model.target_embedding, model.config.pad_id
        places = {"pad_id": pad_id, "first_position": first}
        x = embed(tokens[:, None], table, model.target_positions, dropout=NO_DROPOUT, **places)
        y = model.decoder(x, None, None, cache.source_lengths, cache=cache)  # (R, 1, d)
        return apply_linear(model.output, y[:, 0]).float()


def _compiled(x: Tensor) -> bool:
    """Return whether the compiled loops apply to tensors like x."""
    return backends.current != "triton" and takes(x)
