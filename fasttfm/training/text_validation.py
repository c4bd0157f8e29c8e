"""Validation of a model of text: its loss on what was held out, per token and per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fasttfm.training.protocols import TrainingBatches
from fasttfm.training.validation import DividedValidator, LossScore
from fasttfm.training.workers import Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore(LossScore):
    """What one validation of a language model found, per token."""

    bits_per_byte: float
    """Of all tokens together, over the bytes of the text: comparable between vocabularies."""

    def record(self) -> dict[str, Any]:
        """The numbers by name, as a line of the log has them."""
        return {**LossScore.record(self), "bits_per_byte": self.bits_per_byte}

    def __str__(self) -> str:
        bits = f"{self.bits_per_byte:.3f} bits per byte"
        return f"held-out loss {self.nll:.3f}, perplexity {self.shown_perplexity}, {bits}"


class LossValidator(DividedValidator[list[float]]):
    """Sums a model's loss over given batches, and makes a score of it."""

    def __init__(
        self,
        batches: TrainingBatches,
        order: Sequence[np.ndarray],
        score: Callable[[float, float, int], Any],
        *,
        label_smoothing: float,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        """order: the elements of each batch. score: of (loss, nll, targets), sums over all batches.

        autocast: matrix products' type, None fp32. What batches draw at random is that of epoch 0, always.
        """
        self.batches, self.order, self.score_of = batches, order, score
        self.label_smoothing, self.device, self.autocast = label_smoothing, device, autocast

    def part(self, model: Any, rank: int, size: int) -> list[float]:
        """Sums of loss and nll, and the targets, of a rank's batches."""
        totals, targets = torch.zeros(2, dtype=torch.float64, device=self.device), 0
        for indices in self.order[rank::size]:
            batch = self.batches.batch(indices, 0).to(self.device)
            totals += torch.stack(model.batch_loss(batch, label_smoothing=self.label_smoothing)).double()
            targets += batch.target_tokens
        return [*totals.tolist(), targets]

    def score(self, part: list[float], workers: Workers) -> Any:
        """Of all batches."""
        loss, nll, targets = workers.sum(part)
        return self.score_of(loss, nll, int(targets))


def text_score(text_bytes: int) -> Callable[[float, float, int], TextScore]:
    """Makes the score of sums over a text of so many bytes."""

    def score(loss: float, nll: float, targets: int) -> TextScore:
        bits = nll / math.log(2) / text_bytes
        return TextScore(loss=loss / targets, nll=nll / targets, bits_per_byte=bits)

    return score
