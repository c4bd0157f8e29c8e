"""Sequences of a padded batch laid one after the other, so that padding costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True, slots=True)
class Packing:
    """Positions of the T elements of B sequences, in a batch padded to length S and in the packed (T, E) tensor.

        packing = Packing.from_padding_mask(padding)       # (B, S) bool, True is padding
        output = encoder(src, packing=packing)             # zeros at padding, which nothing was computed for

    The layers themselves take packed tensors: layer(packing.pack(src), packing=packing).
    """

    positions: Tensor
    """(T,) int64: the place of each element in the batch, counted row by row."""
    starts: Tensor
    """(B + 1,) int32: where each sequence begins among the packed elements, and the end of the last."""
    longest: int
    """No sequence has more elements."""
    batch: int
    """B."""
    length: int
    """S."""
    columns: Tensor
    """(T,) int64: the position of each element in its row of the padded batch."""

    @classmethod
    def from_padding_mask(cls, key_padding_mask: Tensor) -> Packing:
        """The packing without the elements that key_padding_mask (B, S) bool marks True; waits for the device once."""
        if key_padding_mask.dtype != torch.bool:
            raise ArgumentTypeError(
                f"key_padding_mask has dtype {key_padding_mask.dtype}: bool, True for padding, is needed"
            )
        if key_padding_mask.dim() != 2:
            raise ArgumentError(f"key_padding_mask {tuple(key_padding_mask.shape)} must be (batch, length)")
        kept = ~key_padding_mask
        lengths = kept.sum(dim=1, dtype=torch.int32)
        positions = kept.flatten().nonzero()[:, 0]
        batch, length = kept.shape
        longest, columns = int(lengths.max()) if batch else 0, positions % max(length, 1)
        return cls(positions, _starts(lengths), longest, batch, length, columns)

    @classmethod
    def from_lengths(cls, lengths: Tensor, length: int, tokens: int) -> Packing:
        """The packing of sequences with padding at their ends; lengths (B,), padded to `length`.

        tokens: the sum of lengths, told because a GPU would have to be waited for.
        """
        starts = _starts(lengths)
        device, batch = lengths.device, lengths.shape[0]
        rows = torch.repeat_interleave(torch.arange(batch, device=device), lengths, output_size=tokens)
        columns = torch.arange(tokens, device=device) - starts[rows]
        return cls(rows * length + columns, starts, length, batch, length, columns)

    @property
    def tokens(self) -> int:
        """The number of elements T."""
        return self.positions.shape[0]

    def pack_tokens(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) to (1, T)."""
        return tokens.flatten()[self.positions][None]

    def pack(self, x: Tensor, batch_first: bool = True) -> Tensor:
        """x (B, S, E), or (S, B, E), to (T, E)."""
        x = x if batch_first else x.transpose(0, 1)
        if x.dim() != 3 or tuple(x.shape[:2]) != (self.batch, self.length):
            raise ArgumentError(
                f"x {tuple(x.shape)} must be ({self.batch}, {self.length}, E) to be packed, batch first"
            )
        return x.reshape(-1, x.shape[-1]).index_select(0, self.positions)

    def unpack(self, y: Tensor, batch_first: bool = True) -> Tensor:
        """y (T, E) to (B, S, E), or (S, B, E), zero at padding."""
        x = y.new_zeros(self.batch * self.length, y.shape[-1]).index_copy(0, self.positions, y)
        x = x.view(self.batch, self.length, y.shape[-1])
        return x if batch_first else x.transpose(0, 1)


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
