"""GPT (Radford et al. 2018, 2019; Brown et al. 2020): a decoder alone, which predicts each token from those before it.

    x = dropout(word + position)              (B, L, d), positions learned
    x = layers(x)                             (B, L, d), causal; pre-norm and one more norm after them, GPT-1 post-norm
    logits = x word^T                         (B, L, V), the table of the embedding

Rows are padded on the right, with lengths (B,), or lie packed one after the other in a single row.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.blocks.attention import Lengths
from fasttfm.blocks.cache import DecoderCache
from fasttfm.blocks.loss import logits, token_loss
from fasttfm.blocks.merging import Work
from fasttfm.blocks.packing import Packing
from fasttfm.checkpoints.saved import read_run
from fasttfm.checkpoints.weights import with_weights
from fasttfm.config.gpt import GPTConfig
from fasttfm.models.layers import SITES_PER_LAYER, EncoderLayer, Stack, reset_parameters
from fasttfm.models.model import Model, merged_pass, recorded_weights, rows_of
from fasttfm.presets import preset_section

if TYPE_CHECKING:
    from fasttfm.data.documents import TextBatch

IGNORED = -100
"""A target that carries no loss."""
_STD = 0.02


class GPT(Model):
    """p(token | the tokens before it); see GPTConfig for every choice."""

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
        _share_table(self)
        self.register_load_state_dict_post_hook(_share_table)
        self.reset_parameters()

    @classmethod
    def from_preset(cls, name: str, *, vocab_size: int, **changes: Any) -> GPT:
        """The model of a preset (fasttfm/presets/gpt/NAME.yaml) with a vocabulary and any fields changed."""
        return cls(GPTConfig(**{**preset_section(name, "model", "gpt"), "vocab_size": vocab_size, **changes}))

    @classmethod
    def from_pretrained(cls, folder: str | Path, checkpoint: str = "best") -> GPT:
        """The model of a directory of `fasttfm lm train` or `fasttfm lm import`, in float32.

        checkpoint: best, last, average, an update's number, or a path. Hugging Face's folders are read by
        interop.gpt.read(). Raises UserError naming what is missing, damaged or of another model.
        """
        config, weights, saved = read_run(Path(folder), "gpt", checkpoint)
        return with_weights(lambda: cls(config.model), weights, saved).eval()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal(0, 0.02) matrices, those that end a sub-layer as config.branch_std says; biases 0, norms 1."""
        for part in (self.embedding, self.positions, self.decoder):  # the output's table is the embedding's
            reset_parameters(part, _STD)
        for layer in self.decoder.layers:
            for last in (layer.self_attn.out_proj, layer.linear2):
                nn.init.normal_(last.weight, std=self.config.branch_std)

    # ----------------------------------------------------------------------------------------------- the forward pass

    def forward(
        self, tokens: Tensor, lengths: Lengths = None, *, targets: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Any:
        """Logits (B, L, V) for the token after each of tokens (B, L) int64.

        lengths (B,): tokens before padding; None where nothing is padded; or a Packing, and then tokens are (1, T).
        targets, of tokens' shape, IGNORED where there is none: what batch_loss() asks for by calling the model, so that
        whoever wraps it (FSDP) takes part; then the two losses come back. Raises ValueError for more than
        config.max_length positions.
        """
        hidden = self.hidden(tokens, lengths)
        if targets is None:
            return logits(hidden, self.output)
        return token_loss(hidden, self.output, targets, label_smoothing=label_smoothing, pad_id=IGNORED)[:2]

    def hidden(self, tokens: Tensor, lengths: Lengths = None, cache: DecoderCache | None = None) -> Tensor:
        """Return the last layer's output (B, L, d) for tokens (B, L), after those that a cache has seen."""
        packing = lengths if isinstance(lengths, Packing) else None
        first = 0 if cache is None else cache.length
        longest = first + tokens.shape[1] if packing is None else packing.longest
        if longest > self.config.max_length:
            raise ValueError(f"a sequence has {longest} tokens: this model has positions for {self.config.max_length}")
        seed = F.draw_seed(tokens.device) if self.training else None
        positions = self.positions.weight if packing is None else self.positions(packing.columns)
        dropout: dict[str, Any] = {} if seed is None else {"dropout_p": self.config.dropout, "seed": seed, "site": 0}
        x = F.embed(tokens, self.embedding.weight, positions, first_position=first, **dropout)  # (B, L, d)
        with merged_pass(Work(self.decoder, rows_of(tokens, lengths))):
            return self.decoder(x, lengths, seed=seed, cache=cache)

    def batch_loss(
        self, batch: TextBatch, *, label_smoothing: float = 0.0, packed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(label-smoothed loss, loss without smoothing and without gradient), sums over all targets, 0-d each.

        No sequence sees another. packed has no meaning: nothing is padded.
        """
        tokens, targets, lengths = batch.tokens, batch.targets, None
        if batch.is_even:
            tokens, targets = (x.view(-1, batch.longest) for x in (tokens, targets))
        else:
            lengths = Packing.from_lengths(batch.lengths, batch.longest, batch.target_tokens)
        return self(tokens, lengths, targets=targets, label_smoothing=label_smoothing)

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor) -> list[Tensor]:
        """Every layer's weights of tokens (B, L), (B, H, L, L), without dropout; row i looks at columns 0 to i."""
        mode = self.training
        self.eval()
        with recorded_weights(layer.self_attn for layer in self.decoder.layers) as weights:
            self.hidden(tokens)
        self.train(mode)
        return weights

    # ------------------------------------------------------------------------------------------ step-by-step decoding

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (R, V) float32 for the token after tokens (R, n), which come after those that the cache has seen."""
        return logits(self.hidden(tokens, cache=cache)[:, -1], self.output).float()

    @torch.no_grad()
    def log_probabilities(self, sequences: list[list[int]], scored: list[int]) -> Tensor:
        """ln p of the last `scored[i]` tokens of each sequence given those before them, (N,) float32.

        A sequence has at least one token more than are scored.
        """
        device = self.embedding.weight.device
        longest = max(map(len, sequences)) - 1
        lengths = torch.tensor([len(each) - 1 for each in sequences], device=device)
        tokens = torch.tensor([token for each in sequences for token in each[:-1]], device=device)[None]
        targets = torch.tensor([token for each in sequences for token in each[1:]], device=device)
        rows = torch.repeat_interleave(torch.arange(len(sequences), device=device), lengths)
        ends = lengths.cumsum(0)[rows]
        counted = torch.arange(len(rows), device=device) >= ends - torch.tensor(scored, device=device)[rows]
        hidden = self.hidden(tokens, Packing.from_lengths(lengths, longest, tokens.shape[1]))[0, counted]
        chosen = logits(hidden, self.output).float().log_softmax(-1).gather(1, targets[counted, None])[:, 0]
        return chosen.new_zeros(len(sequences)).index_add_(0, rows[counted], chosen)


def _share_table(model: GPT, _: Any = None) -> None:
    """Makes the shared table one parameter again, which load_state_dict(assign=True) does not."""
    model.output.weight = model.embedding.weight
