"""A Transformer for series of numbers: linear maps in place of token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttfm.nn import (
    PositionalEncoding,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)


class TimeSeriesTransformer(nn.Module):
    """Encoder and decoder on a Linear(1, d_model) of each series, a Linear(d_model, 1) behind (sources: time series).

    d_model, heads; encoder_layers, decoder_layers; d_ff_encoder, d_ff_decoder: width inside the feed-forward networks;
    dropout; positional_encoding: 'paper', 'tensor2tensor' or None, because some series do better without;
    triangular_memory_mask: target position i sees source positions up to i, as the document has it, or all of them.
    The target attends causally. Masks are kept and rebuilt when a length or the device changes.
    """

    def __init__(
        self,
        d_model: int = 64,
        heads: int = 4,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        d_ff_encoder: int = 128,
        d_ff_decoder: int = 128,
        dropout: float = 0.1,
        positional_encoding: str | None = "paper",
        triangular_memory_mask: bool = True,
        max_length: int = 5000,
    ) -> None:
        super().__init__()
        self.triangular_memory_mask = triangular_memory_mask
        self.source_embedding = nn.Linear(1, d_model)
        self.target_embedding = nn.Linear(1, d_model)
        self.positions: nn.Module = nn.Dropout(dropout)
        if positional_encoding is not None:
            self.positions = PositionalEncoding(d_model, dropout, max_length, positional_encoding, batch_first=True)
        encoder_layer = TransformerEncoderLayer(d_model, heads, d_ff_encoder, dropout, "relu", batch_first=True)
        decoder_layer = TransformerDecoderLayer(d_model, heads, d_ff_decoder, dropout, "relu", batch_first=True)
        self.encoder = TransformerEncoder(encoder_layer, encoder_layers)
        self.decoder = TransformerDecoder(decoder_layer, decoder_layers)
        self.generator = nn.Linear(d_model, 1)
        self._memory_mask: Tensor | None = None

    def memory_mask(self, target_length: int, source_length: int, device: torch.device) -> Tensor | None:
        """(L, S) bool, True hides: all but the lower triangle; None without triangular_memory_mask."""
        if not self.triangular_memory_mask:
            return None
        kept, shape = self._memory_mask, (target_length, source_length)
        if kept is None or tuple(kept.shape) != shape or kept.device != device:
            kept = torch.ones(shape, dtype=torch.bool, device=device).triu_(1)
            self._memory_mask = kept
        return kept

    def encode(self, source: Tensor) -> Tensor:
        """source (B, S, 1) to memory (B, S, d_model)."""
        return self.encoder(self.positions(self.source_embedding(source)))

    def decode(self, target: Tensor, memory: Tensor) -> Tensor:
        """target (B, L, 1) and memory (B, S, d_model) to (B, L, d_model)."""
        mask = self.memory_mask(target.shape[1], memory.shape[1], memory.device)
        embedded = self.positions(self.target_embedding(target))
        return self.decoder(embedded, memory, memory_mask=mask, tgt_is_causal=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source (B, S, 1), target (B, L, 1): the series' past and the decoder's input; returns (B, L, 1)."""
        return self.generator(self.decode(target, self.encode(source)))
