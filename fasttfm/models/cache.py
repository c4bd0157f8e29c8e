"""What a decoder remembers between two tokens of a search."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class DecoderCache:
    """Keys and values of every decoder layer for B sentences with K rows (hypotheses) each; row = sentence * K + k."""

    self_keys: list[Tensor]
    """Per layer (B * K, H, capacity, D); the first `length` positions are filled."""
    self_values: list[Tensor]
    """As self_keys."""
    cross_keys: list[Tensor]
    """Per layer (B, H, S, D), computed once from the encoder's output and shared by a sentence's rows."""
    cross_values: list[Tensor]
    """As cross_keys."""
    source_lengths: Tensor | None
    """(B,) int64, or None where no source position is padding."""
    capacity: int
    """Most target positions that the cache can hold."""
    length: int = 0
    """Target positions held now."""

    def reorder(self, rows: Tensor) -> None:
        """Row r of the new cache continues old row rows[r]; rows (R,) int64 keeps to sentence-major order.

        The number of rows may change (expanding to the beam, dropping rows) as long as each sentence has equally many.
        """
        count = self.self_keys[0].shape[0]
        moved = None
        if rows.shape[0] == count:  # between two tokens most rows go on where they are: only the others are copied
            moved = (rows != torch.arange(count, device=rows.device)).nonzero()[:, 0]
            rows = rows[moved]
        for kept in (self.self_keys, self.self_values):
            for layer, old in enumerate(kept):
                history = old[:, :, : self.length].index_select(0, rows)
                if moved is not None:
                    old[:, :, : self.length].index_copy_(0, moved, history)
                else:
                    kept[layer] = old.new_empty(rows.shape[0], *old.shape[1:])
                    kept[layer][:, :, : self.length] = history

    def keep(self, sentences: Tensor) -> None:
        """Drops every sentence but these; sentences (B',) int64, rising."""
        before = self.cross_keys[0].shape[0]
        rows_per_sentence = self.self_keys[0].shape[0] // before
        self.cross_keys = [k.index_select(0, sentences) for k in self.cross_keys]
        self.cross_values = [v.index_select(0, sentences) for v in self.cross_values]
        if self.source_lengths is not None:
            self.source_lengths = self.source_lengths.index_select(0, sentences)
        beams = sentences.new_tensor(range(rows_per_sentence))
        self.reorder((sentences[:, None] * rows_per_sentence + beams).flatten())
