"""A causal language model in one file: what a new architecture takes, with its loss and its cached step.

GPT's shape: pre-norm layers with GELU, learned to predict the next token; the output shares the embedding's table.
"""

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.blocks.attention import Attention
from fasttfm.blocks.cache import DecoderCache
from fasttfm.blocks.embedding import Sinusoids, embed
from fasttfm.blocks.loss import logits, token_loss
from fasttfm.blocks.merging import Rows, Work, read_together
from fasttfm.config.model import TransformerConfig
from fasttfm.functional.dropout import NO_DROPOUT, Dropout
from fasttfm.models.layers import SITES_PER_LAYER, EncoderLayer, Stack


class LanguageModel(nn.Module):
    """p(token | the tokens before it). share_layers: one layer, used config.decoder_layers times."""

    def __init__(self, config: TransformerConfig, *, share_layers: bool = False) -> None:
        super().__init__()
        self.config = config
        one = EncoderLayer(config, causal=True)
        others = (one if share_layers else EncoderLayer(config, causal=True) for _ in range(config.decoder_layers - 1))
        norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if config.final_norm else None
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.decoder = Stack([one, *others], norm, first_site=SITES_PER_LAYER)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.output.weight = self.embedding.weight
        self.positions = Sinusoids(config.max_length, config.d_model)
        for module in self.modules():
            if isinstance(module, Attention):
                nn.init.normal_(module.in_proj_weight, std=0.02)
                nn.init.zeros_(module.in_proj_bias)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def hidden(self, tokens: Tensor, lengths: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """(B, L, d) of tokens (B, L), which with a cache go on from those that it has seen."""
        seed = F.draw_seed(tokens.device) if self.training else None
        dropout = NO_DROPOUT if seed is None else Dropout(self.config.embedding_dropout_p, seed, 0)
        first = 0 if cache is None else cache.length
        indices = {"pad_id": self.config.pad_id, "first_position": first}
        x = embed(tokens, self.embedding, self.positions, dropout=dropout, **indices)
        weights = read_together(Work(self.decoder, Rows(tokens.shape[0], tokens.numel(), tokens.shape[1])))
        return self.decoder(x, lengths, seed=seed, weights=weights, cache=cache)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (B, L, V) for the token after each of tokens (B, L)."""
        return logits(self.hidden(tokens, lengths), self.output)

    def loss(self, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of predicting tokens (B, L) from those before: (loss, the same without gradient, number of tokens)."""
        before = None if lengths is None else lengths - 1
        return token_loss(self.hidden(tokens[:, :-1], before), self.output, tokens[:, 1:], pad_id=self.config.pad_id)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (B, V) for the token after tokens (B, n), the next ones after those that the cache has seen."""
        return logits(self.hidden(tokens, cache=cache)[:, -1], self.output)
