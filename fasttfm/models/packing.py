"""Sentences one after the other without padding, for a pass that computes none.

Only token numbers are packed: the layers then see one long row, and attention keeps its sentences apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where each of B sentences lies in a row of T tokens."""

    starts: Tensor
    """(B + 1,) int64."""
    longest: int
    """No sentence has more tokens."""

    @property
    def count(self) -> int:
        return self.starts.shape[0] - 1


@dataclass(frozen=True, slots=True)
class Packing:
    """Which places of a padded (B, L) are tokens."""

    sequences: Sequences
    places: Tensor
    """(T,) int64 into the flattened (B, L)."""
    positions: Tensor
    """(T,) int64, from 0 in every sentence."""

    @classmethod
    def of(cls, lengths: Tensor, padded_length: int, tokens: int) -> Packing:
        """lengths (B,), whose sum is `tokens`: told, because a GPU would have to be waited for."""
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        rows = torch.repeat_interleave(
            torch.arange(lengths.shape[0], device=lengths.device), lengths, output_size=tokens
        )
        positions = torch.arange(tokens, device=lengths.device) - starts[rows]
        return cls(Sequences(starts, padded_length), rows * padded_length + positions, positions)

    def pack(self, x: Tensor) -> Tensor:
        """x (B, L) to (1, T)."""
        return x.flatten()[self.places][None]
