"""Keys and values kept between two calls of a decoder (pytorch#49791)."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.nn.errors import ArgumentError

_FIRST_CAPACITY = 16


class AttentionCache:
    """Keys and values (B, H, S, D) of one attention.

    grows: True for self-attention, whose every call adds keys; False for attention over the encoder's output, whose
    keys are computed in the first call alone.
    """

    def __init__(self, *, grows: bool, capacity: int | None = None) -> None:
        self.grows = grows
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether keys and values need not be computed again."""
        return not self.grows and self._keys is not None

    def extend(self, keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds keys and values (B, H, n, D); returns all (B, H, S, D)."""
        if keys is None or values is None:
            assert self._keys is not None
            assert self._values is not None
            return self._keys, self._values
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ArgumentError("cache is for inference, it passes no gradient: call under torch.no_grad()")
        if not self.grows:
            self._keys, self._values, self.length = keys, values, keys.shape[2]
            return keys, values
        if self._keys is not None and self._keys.shape[0] != keys.shape[0]:
            raise ArgumentError(
                f"the cache holds {self._keys.shape[0]} rows, the input has {keys.shape[0]}: "
                "call cache.reorder(rows) where rows end or multiply"
            )
        end = self.length + keys.shape[2]
        self._keys = self._store(self._keys, keys, end)
        self._values = self._store(self._values, values, end)
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _store(self, kept: Tensor | None, new: Tensor, end: int) -> Tensor:
        """kept with new at positions length .. end; room doubles so that a token costs constant time on average."""
        room = 0 if kept is None else kept.shape[2]
        if end > room:
            room = max(end, 2 * room, _FIRST_CAPACITY) if self.capacity is None else max(end, self.capacity)
            larger = new.new_empty(new.shape[0], new.shape[1], room, new.shape[3])
            if kept is not None:
                larger[:, :, : self.length] = kept[:, :, : self.length]
            kept = larger
        assert kept is not None
        kept[:, :, self.length : end] = new
        return kept

    def reorder(self, rows: Tensor) -> None:
        """Row r goes on from what row rows[r] was; rows (R,) int64, any number of them."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)


class DecoderCache:
    """What a TransformerDecoder remembers of the positions it has seen, so that each is computed once.

        cache = DecoderCache()
        for token in ...:
            output = decoder(embedded_token, memory, cache=cache)      # (N, 1, E): only what is new

    Attention is then causal, and keys and values of `memory` are computed in the first call alone, so every call must
    be given the same memory. capacity: positions to make room for at once; more are found as they come.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.layers: list[tuple[AttentionCache, AttentionCache]] = []

    @property
    def length(self) -> int:
        """Target positions seen."""
        return self.layers[0][0].length if self.layers else 0

    def layer(self, number: int) -> tuple[AttentionCache, AttentionCache]:
        """The caches of one decoder layer: self-attention, and attention over the encoder's output."""
        while len(self.layers) <= number:
            self.layers.append((AttentionCache(grows=True, capacity=self.capacity), AttentionCache(grows=False)))
        return self.layers[number]

    def reorder(self, rows: Tensor, *, memory: bool = True) -> None:
        """Row r goes on from what row rows[r] was; rows (R,) int64: chosen by a beam, ended ones left out, or repeated.

        memory=False leaves the encoder's keys and values as they are, which saves their copy while every row keeps its
        sentence.
        """
        for own, cross in self.layers:
            own.reorder(rows)
            if memory:
                cross.reorder(rows)
