"""Packed batches: sequences concatenated without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of B sequences with T elements in total, padded to length S or packed to (T, E).

        packing = Packing.from_padding_mask(padding)       # (B, S) bool, True is padding
        output = encoder(src, packing=packing)             # padding is skipped, its outputs are zeros

    Layers take packed tensors: layer(packing.pack(src), packing=packing).
    """

    positions: Tensor
    """(T,) int64: index of each element in the flattened padded batch."""
    starts: Tensor
    """(B + 1,) int32: the cu_seqlens of the packed tensor."""
    longest: int
    """Upper bound of the sequence lengths (max_seqlen)."""
    batch: int
    """B."""
    length: int
    """S."""
    columns: Tensor
    """(T,) int64: the position of each element in its row of the padded batch."""

    @classmethod
    def from_padding_mask(cls, key_padding_mask: Tensor) -> Packing:
        """Skip the elements where key_padding_mask (B, S) bool is True; synchronizes with the device once."""
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
        """Skip padding behind lengths (B,) in a batch padded to `length`; tokens: sum of lengths, to avoid a sync."""
        starts = _starts(lengths)
        device, batch = lengths.device, lengths.shape[0]
        rows = torch.repeat_interleave(torch.arange(batch, device=device), lengths, output_size=tokens)
        columns = torch.arange(tokens, device=device) - starts[rows]
        return cls(rows * length + columns, starts, length, batch, length, columns)

    @property
    def tokens(self) -> int:
        """Total number of elements T."""
        return self.positions.shape[0]

    def pack_tokens(self, tokens: Tensor) -> Tensor:
        """Pack tokens (B, S) to (1, T)."""
        return tokens.flatten()[self.positions][None]

    def pack(self, x: Tensor, batch_first: bool = True) -> Tensor:
        """Pack x (B, S, E), or (S, B, E), to (T, E)."""
        x = x if batch_first else x.transpose(0, 1)
        if x.dim() != 3 or tuple(x.shape[:2]) != (self.batch, self.length):
            raise ArgumentError(
                f"x {tuple(x.shape)} must be ({self.batch}, {self.length}, E) to be packed, batch first"
            )
        return x.reshape(-1, x.shape[-1]).index_select(0, self.positions)

    def unpack(self, y: Tensor, batch_first: bool = True) -> Tensor:
        """Unpack y (T, E) to (B, S, E), or (S, B, E), zero at padding."""
        x = y.new_zeros(self.batch * self.length, y.shape[-1]).index_copy(0, self.positions, y)
        x = x.view(self.batch, self.length, y.shape[-1])
        return x if batch_first else x.transpose(0, 1)


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
