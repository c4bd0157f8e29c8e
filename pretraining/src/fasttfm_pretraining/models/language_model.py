"""Base class of language models: logits, loss, and incremental decoding."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fasttfm.config import sections_of
from fasttfm.config.presets import preset_section
from fasttfm.models.attention import Lengths
from fasttfm.models.cache import DecoderCache
from fasttfm.models.model import Model, token_loss
from fasttfm.models.packing import Packing
from fasttfm.models.plain import apply_linear
from fasttfm.store.weights import with_weights
from fasttfm_pretraining.models.saved import read_run

if TYPE_CHECKING:
    from typing_extensions import Self

    from fasttfm_pretraining.data.documents import TextBatch

IGNORED = -100
"""A target that carries no loss."""


class LanguageModel(Model):
    """p(token | the tokens before it)."""

    kind: ClassVar[str]
    """Name in fasttfm_pretraining.kinds; also its folder of presets and its module in interop."""
    config: Any
    """Has vocab_size, and max_length, the most tokens of a sequence."""
    embedding: nn.Embedding
    output: nn.Linear

    @classmethod
    def from_preset(cls, name: str, *, vocab_size: int, **changes: Any) -> Self:
        """Build the model of a preset (presets/KIND/NAME.yaml) with a vocabulary size and changed fields."""
        fields = {**preset_section(name, "model", cls.kind), "vocab_size": vocab_size, **changes}
        return cls(sections_of(cls.kind)["model"](**fields))

    @classmethod
    def from_pretrained(cls, folder: str | Path, checkpoint: str = "best") -> Self:
        """The model of a directory of `fasttfm lm train` or `fasttfm lm import`, in float32.

        checkpoint: best, last, average, an update's number, or a path. Hugging Face's folders are read by
        interop.gpt.read() and interop.llama.read(). Raises UserError naming what is missing, damaged or of another
        model.
        """
        config, weights, saved = read_run(Path(folder), cls.kind, checkpoint)
        return with_weights(lambda: cls(config.model), weights, saved).eval()

    def share_table(self) -> None:
        """Tie the output table to the embedding, now and after loading."""
        _share_table(self)
        self.register_load_state_dict_post_hook(_share_table)

    @abstractmethod
    def hidden(self, tokens: Tensor, lengths: Lengths = None, cache: DecoderCache | None = None) -> Tensor:
        """Last layer's output (B, L, d) for tokens (B, L) that follow the cached ones."""

    def places(self, tokens: Tensor, lengths: Lengths, cache: DecoderCache | None) -> tuple[int, Tensor | None]:
        """Position of the first token, and of every token if packed (T,).

        Raises ValueError for more than config.max_length positions.
        """
        packing = lengths if isinstance(lengths, Packing) else None
        first = 0 if cache is None else cache.length
        longest = first + tokens.shape[1] if packing is None else packing.longest
        if longest > self.config.max_length:
            raise ValueError(f"a sequence has {longest} tokens: this model has positions for {self.config.max_length}")
        return first, None if packing is None else packing.columns

    def forward(
        self, tokens: Tensor, lengths: Lengths = None, *, targets: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Any:
        """Logits (B, L, V) for the token after each of tokens (B, L) int64.

        lengths (B,): tokens before padding; None where nothing is padded; or a Packing, and then tokens are (1, T).
        targets: of tokens' shape, IGNORED for none. batch_loss() calls the model with them, so that wrappers such as
        FSDP take part; then returns the two losses. Raises ValueError for more than
        config.max_length positions.
        """
        hidden = self.hidden(tokens, lengths)
        if targets is None:
            return apply_linear(self.output, hidden)
        return token_loss(hidden, self.output, targets, label_smoothing=label_smoothing, pad_id=IGNORED)

    def batch_loss(
        self, batch: TextBatch, *, label_smoothing: float = 0.0, packed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(label-smoothed loss, loss without smoothing and without gradient), sums over all targets, 0-d each.

        Sequences do not attend to one another. packed is ignored: there is no padding.
        """
        tokens, targets, lengths = batch.tokens, batch.targets, None
        if batch.is_even:
            tokens, targets = (x.view(-1, batch.longest) for x in (tokens, targets))
        else:
            lengths = Packing.from_lengths(batch.lengths, batch.longest, batch.target_tokens)
        return self(tokens, lengths, targets=targets, label_smoothing=label_smoothing)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (R, V) float32 for the token after tokens (R, n), which follow the cached ones."""
        return apply_linear(self.output, self.hidden(tokens, cache=cache)[:, -1]).float()

    @torch.no_grad()
    def log_probabilities(self, sequences: list[list[int]], scored: list[int]) -> Tensor:
        """ln p of the last `scored[i]` tokens of each sequence given those before them, (N,) float32.

        Each sequence has at least one token before the scored ones.
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
        chosen = apply_linear(self.output, hidden).float().log_softmax(-1).gather(1, targets[counted, None])[:, 0]
        return chosen.new_zeros(len(sequences)).index_add_(0, rows[counted], chosen)


def _share_table(model: LanguageModel, _: Any = None) -> None:
    """Re-tie the shared table, which load_state_dict(assign=True) separates."""
    model.output.weight = model.embedding.weight
