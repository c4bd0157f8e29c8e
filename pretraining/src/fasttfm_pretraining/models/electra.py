"""ELECTRA (Clark et al. 2020): a generator fills masked positions, a discriminator detects replaced tokens.

    x^mask --generator--> logits (M, V) --sampled--> x^corrupt --discriminator--> logit of "replaced" (B, L)
    loss = masked language modelling of the generator + 50 * binary cross entropy of the discriminator over all tokens

Both share their embeddings (words, positions, segments and norm). A sampled token that is the original counts as
original, and no gradient flows through the sampling. The discriminator is what is fine-tuned: `discriminator` is a
models.bert.Bert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.feed_forward import ACTIVATIONS
from fasttfm.models.attention import Lengths
from fasttfm.models.model import Model, reset_parameters
from fasttfm.models.packing import Packing
from fasttfm_pretraining.config.bert import BertConfig, ElectraConfig
from fasttfm_pretraining.models.bert import Bert, MaskedHead, inputs


class ReplacedHead(nn.Module):
    """Hidden states to one logit each; above 0 predicts a replaced token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.output = nn.Linear(config.d_model, 1)
        reset_parameters(self, config.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., d) to (...)."""
        return self.output(self.activation(self.transform(hidden))).squeeze(-1)


class Detection(NamedTuple):
    """Outputs of generator and discriminator for a batch."""

    masked: Tensor
    """(M, V): the generator's logits at the masked positions."""
    tokens: Tensor
    """(B, L), or packed (1, T): the discriminator's input, with sampled tokens at the masked positions."""
    is_replaced: Tensor
    """Of the same shape, bool: replaced tokens."""
    replaced: Tensor
    """Of the same shape: the discriminator's logits."""


class Electra(Model):
    """Generator and discriminator. Sampling uses torch's global generator (torch.manual_seed)."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        self.discriminator = Bert(config.discriminator())
        self.replaced = ReplacedHead(config.discriminator())
        self.generator = Bert(config.generator())
        self.generator.embeddings = self.discriminator.embeddings
        self.masked = MaskedHead(config.generator())

    def forward(
        self, tokens: Tensor, segments: Tensor | None, lengths: Lengths, positions: Tensor, labels: Tensor
    ) -> Detection:
        """tokens (B, L) masked, segments and lengths as Bert takes them; positions and labels (M,) int64: where they
        are masked, counted over the rows, and what stood there."""
        hidden = self.generator(tokens, segments, lengths)  # (B, L, d')
        masked = self.masked(hidden.flatten(0, 1)[positions], self.generator.embeddings.word.weight)  # (M, V)
        sampled = sample(masked.detach())  # (M,)
        corrupted = tokens.flatten().index_copy(0, positions, sampled)
        is_replaced = torch.zeros_like(corrupted, dtype=torch.bool).index_copy(0, positions, sampled != labels)
        seen = corrupted.view_as(tokens)
        replaced = self.replaced(self.discriminator(seen, segments, lengths))  # (B, L)
        return Detection(masked, seen, is_replaced.view_as(tokens), replaced)

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """Loss of a data.masking.MaskedBatch, and the generator's loss without gradient; 0-d sums.

        The first is, over the number of masked tokens, the generator's mean loss of these plus discriminator_weight
        times the discriminator's mean loss of all tokens.
        """
        loss, nll, *_ = self._losses(batch, label_smoothing, packed)
        return loss, nll

    def batch_scores(self, batch: Any, *, label_smoothing: float = 0.0) -> dict[str, Tensor]:
        """Sums over a batch, 0-d each: `loss` and `nll` of batch_loss(); how many masked tokens the generator
        (`masked`) and how many of all tokens the discriminator (`tokens`) tells right; how many are replaced
        (`replaced`) and, of these, how many are noticed (`noticed`)."""
        loss, nll, said, lengths = self._losses(batch, label_smoothing, False)
        kept = _kept(said.tokens, lengths)
        noticed, is_replaced = (said.replaced > 0) & kept, said.is_replaced & kept
        return {
            "loss": loss,
            "nll": nll,
            "masked": (said.masked.argmax(-1) == batch.labels).sum(),
            "tokens": ((noticed == is_replaced) & kept).sum(),
            "replaced": is_replaced.sum(),
            "noticed": (noticed & is_replaced).sum(),
        }

    def _losses(self, batch: Any, label_smoothing: float, packed: bool) -> tuple[Tensor, Tensor, Detection, Lengths]:
        tokens, segments, lengths, positions = inputs(batch, packed)
        said: Detection = self(tokens, segments, lengths, positions, batch.labels)
        loss, nll = F.cross_entropy(said.masked, batch.labels, label_smoothing=label_smoothing, reduction="sum")
        detection = mean_detection_loss(said, lengths)
        return loss + self.config.discriminator_weight * batch.target_tokens * detection, nll, said, lengths


def sample(masked: Tensor) -> Tensor:
    """One token each from softmax(logits (M, V)), (M,) int64, by the largest of logits with Gumbel noise."""
    noise = torch.empty_like(masked, dtype=torch.float32).exponential_().log_()
    return (masked.float() - noise).argmax(dim=-1)


def mean_detection_loss(said: Detection, lengths: Lengths) -> Tensor:
    """Mean binary cross entropy over the tokens that are not padding, 0-d float32."""
    logits, wanted = said.replaced.float(), said.is_replaced.float()
    kept = _kept(said.tokens, lengths)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, wanted, kept.float(), reduction="sum")
    return loss / kept.sum()


def _kept(tokens: Tensor, lengths: Lengths) -> Tensor:
    """Mark the tokens (B, L), or packed (1, T), that are not padding."""
    if lengths is None or isinstance(lengths, Packing):
        return torch.ones_like(tokens, dtype=torch.bool)
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
