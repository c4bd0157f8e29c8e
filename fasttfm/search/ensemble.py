"""Ensembles: several models that average their next-token probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.search.batches import multiplies_in_int8, multiply_in_int8
from fasttfm.search.decoder import decoder_of


class Ensemble(nn.Module):
    """Several Transformers as one model for search and scoring."""

    def __init__(self, models: Sequence[Any]) -> None:
        """models: with equal vocabularies and padding id; otherwise ValueError."""
        super().__init__()
        if not models:
            raise ValueError("an ensemble has no models: give at least one")
        sizes = {
            (each.config.vocab_size, each.config.source_vocab_size or each.config.vocab_size, each.config.pad_id)
            for each in models
        }
        if len(sizes) > 1:
            raise ValueError(f"models of an ensemble must share vocabularies and padding: {sorted(sizes)} were given")
        self.models = nn.ModuleList(models)
        self.config = models[0].config
        multiply_in_int8(self, any(map(multiplies_in_int8, models)))

    def forward(self, *inputs: Any) -> Tensor:
        """Log-probabilities (B, L, V) float32; same arguments as a model's forward."""
        return self.together([model(*inputs) for model in self.models])

    def cross_attention(self, *inputs: Any, layer: int) -> Tensor:
        """Cross-attention weights of a decoder layer, averaged over models, (B, L, S) float32."""
        models: list[Any] = list(self.models)
        return torch.stack([model.cross_attention(*inputs, layer=layer) for model in models]).mean(dim=0)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> list[Tensor]:
        """Encoder outputs of all models."""
        return [model.encode(source, source_lengths) for model in self._decoders()]

    def start_cache(self, memory: list[Tensor], source_lengths: Tensor | None = None, **sizes: int) -> Caches:
        """Empty caches of all models."""
        return Caches(
            [model.start_cache(each, source_lengths, **sizes) for model, each in zip(self._decoders(), memory)]
        )

    def step(self, tokens: Tensor, cache: Caches) -> Tensor:
        """Log-probabilities (R, V) float32 of the token after tokens (R,)."""
        return self.together([model.step(tokens, each) for model, each in zip(self._decoders(), cache.caches)])

    def _decoders(self) -> list[Any]:
        return [decoder_of(each) for each in self.models]

    def together(self, logits: list[Tensor]) -> Tensor:
        """Combine the logits of all models, each (..., V), into log-probabilities float32."""
        log_probabilities = torch.stack([each.float().log_softmax(dim=-1) for each in logits])  # (models, ..., V)
        return log_probabilities.logsumexp(dim=0) - math.log(len(logits))


class Caches:
    """Caches of all models of an ensemble."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches

    @property
    def moves_nothing(self) -> bool:
        """Return whether rows can be permuted for free."""
        return all(getattr(cache, "moves_nothing", False) for cache in self.caches)

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Make row r continue old row rows[r], as row ranks[r] of its sentence; sentences without rows are removed."""
        for cache in self.caches:
            cache.go_on(rows, ranks)
