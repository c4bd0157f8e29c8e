"""A time-series model in plain PyTorch, whose layers come from fasttfm.nn: the imports are all that was changed."""

import torch
from torch import nn

from fasttfm.nn import (  # was: from torch.nn import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)


class SeriesModel(nn.Module):
    """source (B, S, 1), target (B, L, 1) to (B, L, 1)."""

    def __init__(self, d_model: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.source = nn.Linear(1, d_model)
        self.target = nn.Linear(1, d_model)
        self.encoder = TransformerEncoder(
            TransformerEncoderLayer(
                d_model, heads, dim_feedforward=64, dropout=0.0, activation="relu", batch_first=True
            ),
            num_layers=2,
        )
        self.decoder = TransformerDecoder(
            TransformerDecoderLayer(
                d_model, heads, dim_feedforward=48, dropout=0.0, activation="relu", batch_first=True
            ),
            num_layers=2,
        )
        self.generator = nn.Linear(d_model, 1)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        length, keys = target.shape[1], source.shape[1]
        causal = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        triangle = torch.triu(torch.full((length, keys), float("-inf")), diagonal=1)
        memory = self.encoder(self.source(source))
        return self.generator(self.decoder(self.target(target), memory, tgt_mask=causal, memory_mask=triangle))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = SeriesModel()
    print(model(torch.randn(2, 12, 1), torch.randn(2, 6, 1)).shape)
