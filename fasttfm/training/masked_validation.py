"""Validation of a masked language model on held-out text, always with the same hidden tokens and pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fasttfm.data.masked_rows import MaskedBatches
from fasttfm.training.validation import DividedValidator, LossScore
from fasttfm.training.workers import Workers

_NAMES = ("loss", "nll", "masked", "sentences", "tokens", "replaced", "noticed")
"""What batch_scores() of a model may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedScore(LossScore):
    """What one validation found, per hidden token; nll is of ELECTRA that of its generator; shares are in [0, 1]."""

    masked_accuracy: float
    """Hidden tokens whose likeliest is the right one."""
    sentence_accuracy: float | None = None
    """Pairs told right, of next sentence or sentence order; half of them are by guessing."""
    detection_accuracy: float | None = None
    """Tokens that ELECTRA's discriminator tells right; about nine in ten are originals."""
    noticed: float | None = None
    """Replaced tokens that it notices."""

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: by all that is minimised."""
        return (0.0, -self.loss)

    def record(self) -> dict[str, Any]:
        """The numbers by name, as a line of the log has them."""
        values = LossScore.record(self)
        for name in ("masked_accuracy", "sentence_accuracy", "detection_accuracy", "noticed"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        return values

    def __str__(self) -> str:
        shown = [
            f"held-out loss {self.loss:.3f}",
            f"masked tokens {self.nll:.3f} nats, {self.masked_accuracy:.1%} right",
        ]
        if self.sentence_accuracy is not None:
            shown.append(f"pairs {self.sentence_accuracy:.1%} right")
        if self.detection_accuracy is not None:
            shown.append(f"replaced tokens {self.noticed:.1%} noticed, {self.detection_accuracy:.1%} of all right")
        return ", ".join(shown)


class MaskedValidator(DividedValidator[list[float]]):
    """Sums what a model tells right over held-out rows."""

    def __init__(
        self,
        batches: MaskedBatches,
        *,
        label_smoothing: float = 0.0,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        """batches: of held-out text; what they draw is that of epoch 0, always. autocast: products' type, None fp32."""
        self.batches, self.order = batches, batches.in_order()
        self.label_smoothing, self.device, self.autocast = label_smoothing, device, autocast

    def part(self, model: Any, rank: int, size: int) -> list[float]:
        """The sums of a rank's batches; then its hidden tokens, its rows that are pairs, and its tokens."""
        totals = torch.zeros(len(_NAMES), dtype=torch.float64, device=self.device)
        hidden = rows = tokens = 0
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            for number in range(rank, len(self.order), size):
                torch.manual_seed(number)  # what a generator samples, whoever has the batch
                batch = self.batches.batch(self.order[number], 0).to(self.device)
                scores = model.batch_scores(batch, label_smoothing=self.label_smoothing)
                zero = totals.new_zeros(())
                totals += torch.stack([scores.get(name, zero).double() for name in _NAMES])
                hidden += batch.target_tokens
                rows += len(batch.lengths) if "sentences" in scores else 0
                tokens += batch.source_tokens + batch.target_tokens
        return [*totals.tolist(), hidden, rows, tokens]

    def score(self, part: list[float], workers: Workers) -> MaskedScore:
        """Of all batches."""
        *totals, hidden, rows, tokens = workers.sum(part)
        total = dict(zip(_NAMES, totals))
        return MaskedScore(
            loss=total["loss"] / hidden,
            nll=total["nll"] / hidden,
            masked_accuracy=total["masked"] / hidden,
            sentence_accuracy=total["sentences"] / rows if rows else None,
            detection_accuracy=total["tokens"] / tokens if total["tokens"] else None,
            noticed=total["noticed"] / max(total["replaced"], 1) if total["tokens"] else None,
        )
