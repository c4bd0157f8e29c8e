"""Transformer for time series: linear layers instead of token embeddings."""

import torch
from torch import Tensor, nn

from fasttfm.errors import ArgumentError
from fasttfm.nn import (
    MultiheadAttention,
    PositionalEncoding,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fasttfm.nn.masks import causal_mask


class TimeSeriesTransformer(nn.Module):
    """An encoder-decoder Transformer for time series, with linear input and output layers (sources: time series).

    d_model: feature size; nhead, num_encoder_layers, num_decoder_layers, dropout as in torch.nn.Transformer;
    dim_feedforward_encoder, dim_feedforward_decoder: hidden widths of the feed-forward networks;
    src_input_size, tgt_input_size: values per position; tgt_output_size: output values per position, 1 for a series,
    the vocabulary size for tokens;
    embed: apply a Linear to d_model before the positions; without it, inputs are 1 wide (broadcast to all channels) or
    d_model wide;
    positional_encoding: 'paper', 'tensor2tensor' or None, which suits some series better;
    causal_target_mask: target position i attends to targets up to i; triangular_memory_mask: and to sources up to i;
    max_length: positions in the table. Layers are batch-first and post-norm with ReLU. Raises ArgumentError for
    an input of another width.
    """

    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 1, num_decoder_layers: int = 1,
        dim_feedforward_encoder: int = 2048, dim_feedforward_decoder: int = 2048, dropout: float = 0.1, *,
        src_input_size: int = 1, tgt_input_size: int = 1, tgt_output_size: int = 1, embed: bool = True,
        positional_encoding: str | None = "paper", causal_target_mask: bool = True, triangular_memory_mask: bool = True,
        max_length: int = 5000,
    ) -> None:  # fmt: skip
        super().__init__()
        self.d_model = d_model
        self.causal_target_mask = causal_target_mask
        self.triangular_memory_mask = triangular_memory_mask
        self.source_embedding = nn.Linear(src_input_size, d_model) if embed else None
        self.target_embedding = nn.Linear(tgt_input_size, d_model) if embed else None
        self.positions: nn.Module = nn.Dropout(dropout)
        if positional_encoding is not None:
            self.positions = PositionalEncoding(d_model, dropout, max_length, positional_encoding, batch_first=True)
        self.encoder = TransformerEncoder(
            TransformerEncoderLayer(d_model, nhead, dim_feedforward_encoder, dropout, "relu", batch_first=True),
            num_encoder_layers,
        )
        self.decoder = TransformerDecoder(
            TransformerDecoderLayer(d_model, nhead, dim_feedforward_decoder, dropout, "relu", batch_first=True),
            num_decoder_layers,
        )
        self.generator = nn.Linear(d_model, tgt_output_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weights: Xavier uniform matrices, biases 0, norms 1."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, MultiheadAttention):
                for part in module.in_proj_weight.chunk(3):  # Xavier's bound for each square projection
                    nn.init.xavier_uniform_(part)
                nn.init.zeros_(module.in_proj_bias)
            elif isinstance(module, nn.Linear):  # including attention's out_proj
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def memory_mask(self, target_length: int, source_length: int, device: torch.device) -> Tensor | None:
        """Mask (L, S) bool of keys above the diagonal, True is masked; None without triangular_memory_mask."""
        return causal_mask(target_length, source_length, device) if self.triangular_memory_mask else None

    def _embedded(self, name: str, x: Tensor, embedding: nn.Linear | None) -> Tensor:
        """Embed x (B, L, width) to (B, L, d_model), with positions and dropout."""
        widths = (1, self.d_model) if embedding is None else (embedding.in_features,)
        if x.dim() != 3 or x.shape[2] not in widths:
            allowed = " or ".join(map(str, widths))
            raise ArgumentError(f"{name} {tuple(x.shape)} must be (batch, length, {allowed})")
        return self.positions(x.expand(-1, -1, self.d_model) if embedding is None else embedding(x))

    def encode(self, source: Tensor) -> Tensor:
        """Encode source (B, S, src_input_size) to the memory (B, S, d_model)."""
        return self.encoder(self._embedded("source", source, self.source_embedding))

    def decode(self, target: Tensor, memory: Tensor) -> Tensor:
        """Decode target (B, L, tgt_input_size) over memory (B, S, d_model) to (B, L, d_model)."""
        embedded = self._embedded("target", target, self.target_embedding)
        mask = self.memory_mask(target.shape[1], memory.shape[1], memory.device)
        return self.decoder(embedded, memory, memory_mask=mask, tgt_is_causal=self.causal_target_mask)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The output (B, L, tgt_output_size) for source (B, S, src_input_size) and target (B, L, tgt_input_size)."""
        return self.generator(self.decode(target, self.encode(source)))
