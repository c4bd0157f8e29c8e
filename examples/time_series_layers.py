"""A time-series model in plain PyTorch, whose layers come from fasttfm.nn: the imports are all that was changed."""

import math

import torch
from torch import nn

from fasttfm.nn import (  # was: from torch.nn import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)


def sinusoids(length: int, width: int) -> torch.Tensor:
    """(length, width): sines and cosines of the paper, interleaved."""
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angle = torch.arange(length)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def triangle(rows: int, columns: int) -> torch.Tensor:
    """(rows, columns): -inf above the diagonal, else 0."""
    return torch.triu(torch.full((rows, columns), float("-inf")), diagonal=1)


class SeriesModel(nn.Module):
    """source (B, S, 1), target (B, L, 1) to (B, L, tgt_output_size)."""

    def __init__(
        self,
        d_model: int = 64,
        nhead: int = 8,
        num_layers: int = 1,
        dim_feedforward_encoder: int = 2048,
        dim_feedforward_decoder: int = 2048,
        dropout: float = 0.1,
        tgt_output_size: int = 1,
        positional_encoding: bool = True,
    ) -> None:
        super().__init__()
        self.source = nn.Linear(1, d_model)
        self.target = nn.Linear(1, d_model)
        self.dropout = nn.Dropout(dropout)
        table = sinusoids(5000, d_model) * float(positional_encoding)
        self.register_buffer("positions", table, persistent=False)
        encoder_layer = TransformerEncoderLayer(
            d_model, nhead, dim_feedforward_encoder, dropout, activation="relu", batch_first=True
        )
        decoder_layer = TransformerDecoderLayer(
            d_model, nhead, dim_feedforward_decoder, dropout, activation="relu", batch_first=True
        )
        self.encoder = TransformerEncoder(encoder_layer, num_layers)
        self.decoder = TransformerDecoder(decoder_layer, num_layers)
        self.generator = nn.Linear(d_model, tgt_output_size)
        self.target_mask = self.memory_mask = torch.zeros(0, 0)
        for linear in (self.source, self.target, self.generator):
            nn.init.uniform_(linear.weight, -0.1, 0.1)
            nn.init.zeros_(linear.bias)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        length, keys = target.shape[1], source.shape[1]
        if self.memory_mask.shape != (length, keys):  # built again when a length changes
            self.target_mask, self.memory_mask = triangle(length, length), triangle(length, keys)
        memory = self.encoder(self.dropout(self.source(source) + self.positions[:keys]))
        output = self.decoder(
            self.dropout(self.target(target) + self.positions[:length]),
            memory,
            tgt_mask=self.target_mask,
            memory_mask=self.memory_mask,
        )
        return self.generator(output)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = SeriesModel()
    print(model(torch.randn(2, 12, 1), torch.randn(2, 6, 1)).shape)
