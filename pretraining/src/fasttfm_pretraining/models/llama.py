"""Llama (Touvron et al. 2023): a decoder alone with RMSNorm, rotary positions, SwiGLU and grouped queries.

    x = word                                                        (B, L, d)
    x = x + attention(rotary(q), rotary(k), v) W_o                  (B, L, d), causal, of q, k, v = RMSNorm(x) W
    x = x + (silu(y W_gate) * y W_up) W_down, y = RMSNorm(x)        (B, L, d), inside (B, L, d_ff)
    logits = RMSNorm(x) W_output                                    (B, L, V)

No layer has a bias. Rows are padded on the right, or lie packed one after the other in a single row.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.models.attention import Lengths
from fasttfm.models.cache import DecoderCache, LayerCache
from fasttfm.models.model import reset_parameters
from fasttfm.models.packing import Packing
from fasttfm.models.plain import apply_linear
from fasttfm.models.residual import NO_SEED, LayerSeed
from fasttfm.models.stack import Stack
from fasttfm.nn.modules import RMSNorm
from fasttfm_pretraining.config.llama import LlamaConfig
from fasttfm_pretraining.models.language_model import LanguageModel


class Turns(NamedTuple):
    """Positions of a layer's input tokens."""

    cos: Tensor  # (P, D / 2)
    sin: Tensor  # (P, D / 2)
    positions: Tensor  # (L,), or packed (T,)


class LlamaLayer(nn.Module):
    """Self-attention, then feed-forward; each normalizes its input and adds to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, size = config.d_model, config.head_width
        self.head_size = size
        self.norm1 = RMSNorm(width, config.norm_eps)
        self.query = nn.Linear(width, config.heads * size, bias=False)
        self.key = nn.Linear(width, config.groups * size, bias=False)
        self.value = nn.Linear(width, config.groups * size, bias=False)
        self.out = nn.Linear(config.heads * size, width, bias=False)
        self.norm2 = RMSNorm(width, config.norm_eps)
        self.gate = nn.Linear(width, config.d_ff, bias=False)
        self.up = nn.Linear(width, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, width, bias=False)

    def forward(
        self,
        x: Tensor,
        turns: Turns,
        lengths: Lengths = None,
        *,
        seed: LayerSeed = NO_SEED,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (B, L, d), or packed (1, T, d); returns the same shape. cache: x continues the cached positions.

        seed: unused, as this layer has no dropout; all layers of a stack accept it.
        """
        y = self.norm1(x)
        q, k, v = (
            apply_linear(each, y).unflatten(-1, (-1, self.head_size)) for each in (self.query, self.key, self.value)
        )
        if isinstance(lengths, Packing):
            q, k, v = q[0], k[0], v[0]  # (T, H, D)
            q, k = F.rotary(q, *turns), F.rotary(k, *turns)
            heads = F.varlen_attention(
                q, k, v, lengths.starts, lengths.starts, lengths.longest, lengths.longest, causal=True
            )[None]  # (1, T, H, D)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (B, H, L, D)
            q, k, first = F.rotary(q, *turns), F.rotary(k, *turns), 0
            if cache is not None:
                first = cache.target.length
                k, v = cache.target.update(k, v)
            heads = F.attention(q, k, v, key_lengths=lengths, causal=True, causal_offset=first).transpose(1, 2)
        x = x + apply_linear(self.out, heads.flatten(2))
        y = self.norm2(x)
        hidden = nn.functional.silu(apply_linear(self.gate, y)) * apply_linear(self.up, y)  # (B, L, d_ff)
        return x + apply_linear(self.down, hidden)


class Llama(LanguageModel):
    """p(token | the tokens before it); see LlamaConfig for every choice."""

    kind = "llama"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.decoder = Stack(
            [LlamaLayer(config) for _ in range(config.layers)], RMSNorm(config.d_model, config.norm_eps)
        )
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        cos, sin = F.rotary_tables(
            config.max_length,
            config.head_width,
            base=config.rotary_base,
            factor=config.rotary_factor,
            bands=config.rotary_bands,
        )
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if config.tie_embeddings:
            self.share_table()
        reset_parameters(self, config.init_std)

    def hidden(self, tokens: Tensor, lengths: Lengths = None, cache: DecoderCache | None = None) -> Tensor:
        """Last layer's output (B, L, d) for tokens (B, L) that follow the cached ones."""
        first, columns = self.places(tokens, lengths, cache)
        if columns is None:
            columns = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        return self.decoder(self.embedding(tokens), Turns(self.cos, self.sin, columns), lengths, cache=cache)
