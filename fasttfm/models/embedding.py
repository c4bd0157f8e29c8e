"""Token embeddings with sinusoidal or learned positions (Vaswani et al. 2017, sections 3.4 and 3.5)."""

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.packing import Packing
from fasttfm.models.plain import EMBEDDING, untouched
from fasttfm.reference import positional_encoding


class Sinusoids(nn.Module):
    """Table (length, width) of sinusoids: a non-persistent buffer, recomputed when a model leaves the meta device."""

    table: Tensor
    _outgrown: tuple[Tensor, ...] = ()
    """Earlier tables, kept alive for CUDA graphs that read them."""

    def __init__(
        self, length: int, width: int, variant: str = "paper", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, first: int = 0,
    ) -> None:  # fmt: skip
        """first: position of the table's first row."""
        super().__init__()
        self.variant = variant
        self.first = first
        table = positional_encoding(length, width, variant, first=first)
        self.register_buffer("table", table.to(device, dtype or torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Called by every conversion; to_empty() would leave the table uninitialized."""
        was_meta = self.table.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.table.is_meta:
            self._fill(self.table.shape[0], self.table.device)
        return self

    @torch.inference_mode(False)  # DDP writes to buffers, also to one that a search has extended
    def _fill(self, length: int, device: torch.device) -> None:
        table = positional_encoding(length, self.table.shape[1], self.variant, first=self.first, device="cpu")
        self.table = table.to(device, self.table.dtype)

    def rows(self, length: int, device: torch.device) -> Tensor:
        """The table, with at least `length` rows, on device."""
        if length > self.table.shape[0]:
            self._outgrown += (self.table,)
            self._fill(2 * length, device)
        elif self.table.is_meta and device.type != "meta":  # parameters were assigned to a model on the meta device
            self._fill(self.table.shape[0], device)
        return self.table


class LearnedPositions(nn.Embedding):
    """Learned table (length, width); row 0 is the first token's, without fairseq's padding rows before it."""

    @property
    def table(self) -> Tensor:
        """The weight, under the name that Sinusoids has."""
        return self.weight

    def rows(self, length: int, device: torch.device) -> Tensor:
        """The table. Raises ValueError if it has fewer than `length` rows."""
        if length > self.num_embeddings:
            raise ValueError(f"a sequence has {length} tokens: this model has positions for {self.num_embeddings}")
        return table_of(self)


_TABLES = EMBEDDING | {LearnedPositions}


def embed(
    tokens: Tensor, embedding: Any, positions: Sinusoids | LearnedPositions, *, pad_id: int, dropout: Dropout,
    first_position: int = 0, packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """dropout(embedding(tokens) * sqrt(width) + position), (B, L, width) for tokens (B, L); zero at pad_id.

    packing: tokens are packed, (1, T). An embedding that is not plain is called as a module. Raises ValueError for
    tokens beyond the learned positions.
    """
    last = packing.length if packing is not None else first_position + tokens.shape[1]
    if isinstance(positions, LearnedPositions):
        table = _with_padding(positions, tokens, last, pad_id, first_position, packing)
    else:
        table = positions.rows(last, tokens.device)
    # a slice, so that the signature does not depend on the first position
    table = table[packing.columns] if packing is not None else table[first_position:last]
    return add_positions(tokens, embedding, table, dropout=dropout, scale=table.shape[1] ** 0.5, pad_id=pad_id)


def add_positions(
    tokens: Tensor, embedding: Any, table: Tensor, *, dropout: Dropout, scale: float = 1.0, pad_id: int | None = None,
    first_position: int = 0,
) -> Tensor:  # fmt: skip
    """functional.embed() of a module's table; an embedding that is not plain is called."""
    if _is_plain(embedding):
        places: dict[str, Any] = {"pad_id": pad_id, "first_position": first_position}
        return F.embed(tokens, embedding.weight, table, scale=scale, **places, **dropout.options())
    x = embedding(tokens) * scale + table[first_position : first_position + tokens.shape[1]]
    if pad_id is not None:
        x = x.masked_fill((tokens == pad_id)[..., None], 0.0)
    return nn.functional.dropout(x, dropout.dropout_p)


def table_of(embedding: Any) -> Tensor:
    """embedding(all rows), (rows, width): the weight itself if the module is plain."""
    weight = embedding.weight
    return weight if _is_plain(embedding) else embedding(torch.arange(weight.shape[0], device=weight.device))


def _is_plain(embedding: Any) -> bool:
    """Return whether calling the embedding only reads rows of its weight."""
    return untouched(embedding, _TABLES) and ordinary(embedding.weight) and not embedding.max_norm


def _with_padding(
    positions: LearnedPositions, tokens: Tensor, last: int, pad_id: int, first: int, packing: Packing | None
) -> Tensor:
    """The table up to position `last`: batch sizes are rounded up, so padding may exceed it, where rows are zeros."""
    extra = last - positions.num_embeddings
    table = table_of(positions)
    if extra <= 0:
        return table
    places = packing.columns if packing is not None else (tokens != pad_id).nonzero()[:, 1] + first
    positions.rows(int(places.max()) + 1 if len(places) else 0, tokens.device)
    return nn.functional.pad(table, (0, 0, 0, extra))
