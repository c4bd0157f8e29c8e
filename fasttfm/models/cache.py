"""Keys and values kept between two steps of a decoder (pytorch#49791)."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.errors import ArgumentError
from fasttfm.functional.attention.dense import attention
from fasttfm.functional.attention.step import cached_attention

_FIRST_CAPACITY = 16


class AttentionCache:
    """Keys and values (B, H, S, D) of one attention.

    grows: True for self-attention, whose every call adds keys; False for attention over the encoder's output, whose
    keys are computed in the first call alone. capacity: positions to make room for at once; more are made as they come.
    """

    def __init__(self, *, grows: bool, capacity: int | None = None) -> None:
        self.grows = grows
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def rows(self) -> int | None:
        """The batch size B; None while the cache is empty."""
        return None if self._keys is None else self._keys.shape[0]

    @property
    def complete(self) -> bool:
        """True if all keys and values are cached, so that none is computed again."""
        return not self.grows and self._keys is not None

    def update(self, keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds keys and values (B, H, n, D), or none where the cache is complete; returns all (B, H, S, D)."""
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
        self._keys = self._stored(self._keys, keys, end)
        self._values = self._stored(self._values, values, end)
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def reserve(self, like: Tensor, rows: int) -> None:
        """Makes room for `capacity` positions of rows like those of `like` (., H, ., D), before the first update."""
        shape = (rows, like.shape[1], self.capacity or _FIRST_CAPACITY, like.shape[3])
        self._keys, self._values = like.new_empty(shape), like.new_empty(shape)

    def attend(self, query: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """The joined heads (B, L, H * D) of query (B, H, L, D) over all cached keys, at inference.

        In a cache that grows the queries are its newest positions and see no later one. key_lengths (B,): keys at or
        past it are not attended.
        """
        assert self._keys is not None
        assert self._values is not None
        keys, values = self._keys[:, :, : self.length], self._values[:, :, : self.length]
        if self.grows and query.shape[2] > 1:
            first = self.length - query.shape[2]
            heads = attention(query, keys, values, key_lengths=key_lengths, causal=True, causal_offset=first)
        else:
            heads = cached_attention(query, keys, values, key_lengths)
        return heads.transpose(1, 2).flatten(2)

    def _stored(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        """buffer with new at positions length .. end; it doubles, so that a token costs constant time on average."""
        size = 0 if buffer is None else buffer.shape[2]
        if end > size:
            size = max(end, 2 * size, _FIRST_CAPACITY) if self.capacity is None else max(end, self.capacity)
            larger = new.new_empty(new.shape[0], new.shape[1], size, new.shape[3])
            if buffer is not None:
                larger[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = larger
        assert buffer is not None
        buffer[:, :, self.length : end] = new
        return buffer

    def reorder(self, rows: Tensor) -> None:
        """Makes row r a copy of the old row rows[r]; rows (R,) int64, any number of them."""
        if self._keys is None or self._values is None:
            return
        if not self.grows:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
            return
        moved = None
        if rows.shape[0] == self._keys.shape[0]:  # between two tokens most rows stay in place: the others are copied
            moved = (rows != torch.arange(rows.shape[0], device=rows.device)).nonzero()[:, 0]
            rows = rows[moved]
        self._keys = self._reordered(self._keys, rows, moved)
        self._values = self._reordered(self._values, rows, moved)

    def _reordered(self, buffer: Tensor, rows: Tensor, moved: Tensor | None) -> Tensor:
        history = buffer[:, :, : self.length].index_select(0, rows)
        if moved is not None:
            buffer[:, :, : self.length].index_copy_(0, moved, history)
            return buffer
        new = buffer.new_empty(rows.shape[0], *buffer.shape[1:])
        new[:, :, : self.length] = history
        return new


class LayerCache(NamedTuple):
    """Keys and values that one decoder layer remembers."""

    target: AttentionCache
    """Of self-attention."""
    memory: AttentionCache
    """Of attention over the encoder's output."""


class DecoderCache:
    """Keys and values of the positions that a decoder has seen, so that each is computed once.

        cache = DecoderCache()
        for token in ...:
            output = decoder(embedded_token, memory, cache=cache)      # (N, 1, E): only what is new

    Attention is then causal, and keys and values of `memory` are computed in the first call alone, so every call must
    be given the same memory. capacity: positions to make room for at once; more are made as they come. source_lengths
    (B,): of the memory without its padding. shared_memory: the K rows (hypotheses) of a sentence, row = sentence * K +
    k, share its keys and values of the memory.
    """

    def __init__(
        self, capacity: int | None = None, *, source_lengths: Tensor | None = None, shared_memory: bool = False
    ) -> None:
        self.capacity = capacity
        self.source_lengths = source_lengths
        self.shared_memory = shared_memory
        self.layers: list[LayerCache] = []

    @property
    def length(self) -> int:
        """Target positions seen."""
        return self.layers[0].target.length if self.layers else 0

    def layer(self, number: int) -> LayerCache:
        """The caches of one decoder layer."""
        while len(self.layers) <= number:
            target = AttentionCache(grows=True, capacity=self.capacity)
            self.layers.append(LayerCache(target, AttentionCache(grows=False)))
        return self.layers[number]

    def reorder(self, rows: Tensor, *, memory: bool | None = None) -> None:
        """Makes row r a copy of the old row rows[r]; rows (R,) int64, as a beam chooses, drops or repeats them.

        memory=False leaves the encoder's keys and values as they are, which saves their copy while every row keeps its
        sentence; they always stay with shared_memory, whose rows keep to sentence-major order and are equally many for
        each sentence.
        """
        for target, source in self.layers:
            target.reorder(rows)
            if memory or (memory is None and not self.shared_memory):
                source.reorder(rows)

    def keep(self, sentences: Tensor) -> None:
        """Keeps only these sentences; sentences (B',) int64, rising."""
        beams = 1
        first = self.layers[0] if self.layers else None
        if first is not None and self.shared_memory and first.target.rows and first.memory.rows:
            beams = first.target.rows // first.memory.rows
        rows = (sentences[:, None] * beams + torch.arange(beams, device=sentences.device)).flatten()
        for target, source in self.layers:
            target.reorder(rows)
            source.reorder(sentences if self.shared_memory else rows)
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths.index_select(0, sentences)
