"""GPT (Radford et al. 2018, 2019; Brown et al. 2020): a decoder alone, which predicts each token from those before it.

    x = dropout(word + position)              (B, L, d), positions learned
    x = layers(x)                             (B, L, d), causal; pre-norm and one more norm after them, GPT-1 post-norm
    logits = x word^T                         (B, L, V), the table of the embedding

Rows are padded on the right, with lengths (B,), or lie packed one after the other in a single row.
"""

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.dropout import NO_DROPOUT, Dropout
from fasttfm.models.attention import Lengths
from fasttfm.models.cache import DecoderCache
from fasttfm.models.embedding import add_positions, table_of
from fasttfm.models.layers import EncoderLayer
from fasttfm.models.model import recorded_weights, reset_parameters
from fasttfm.models.residual import SITES_PER_LAYER
from fasttfm.models.stack import Stack
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.models.language_model import LanguageModel

_STD = 0.02


class GPT(LanguageModel):
    """p(token | the tokens before it); see GPTConfig for every choice."""

    kind = "gpt"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        layer, width = config.layer_config(), config.d_model
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_length, width)
        norm = nn.LayerNorm(width, config.layer_norm_eps) if config.norm_first else None
        layers = [EncoderLayer(layer, causal=True) for _ in range(config.layers)]
        self.decoder = Stack(layers, norm, first_site=SITES_PER_LAYER)
        self.output = nn.Linear(width, config.vocab_size, bias=False)
        self.share_table()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal(0, 0.02) matrices, those that end a sub-layer as config.branch_std says; biases 0, norms 1."""
        for part in (self.embedding, self.positions, self.decoder):  # the output's table is the embedding's
            reset_parameters(part, _STD)
        for layer in self.decoder.layers:
            for last in (layer.self_attn.out_proj, layer.linear2):
                nn.init.normal_(last.weight, std=self.config.branch_std)

    def hidden(self, tokens: Tensor, lengths: Lengths = None, cache: DecoderCache | None = None) -> Tensor:
        """Last layer's output (B, L, d) for tokens (B, L) that follow the cached ones."""
        first, columns = self.places(tokens, lengths, cache)
        seed = F.draw_seed(tokens.device) if self.training else None
        positions = table_of(self.positions) if columns is None else self.positions(columns)
        dropout = NO_DROPOUT if seed is None else Dropout(self.config.dropout, seed)
        x = add_positions(tokens, self.embedding, positions, dropout=dropout, first_position=first)  # (B, L, d)
        return self.decoder(x, lengths, seed=seed, cache=cache)

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor) -> list[Tensor]:
        """Attention weights (B, H, L, L) of every layer for tokens (B, L), causal, without dropout."""
        mode = self.training
        self.eval()
        try:
            with recorded_weights(layer.self_attn for layer in self.decoder.layers) as weights:
                self.hidden(tokens)
        finally:
            self.train(mode)
        return weights
