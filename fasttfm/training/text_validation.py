"""Validation of a model of text: its loss on what was held out, per token and per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fasttfm.training.protocols import TrainingBatches
from fasttfm.training.workers import ALONE, Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore:
    """What one validation of a language model found."""

    loss: float
    """What is minimised, per token, in nats."""
    nll: float
    """Cross entropy per token without smoothing, in nats."""
    bits_per_byte: float
    """Of all tokens together, over the bytes of the text: comparable between vocabularies."""

    @property
    def perplexity(self) -> float:
        """exp(nll), per token."""
        return math.exp(min(self.nll, 700))

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better."""
        return (0.0, -self.nll)

    @property
    def outputs(self) -> Sequence[str]:
        """None."""
        return ()

    def record(self) -> dict[str, Any]:
        """The numbers by name, as a line of the log has them."""
        return {
            "loss": self.loss,
            "nll": self.nll,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }

    def __str__(self) -> str:
        perplexity = f"{self.perplexity:.2f}" if self.perplexity < 1e6 else f"{self.perplexity:.2e}"
        return f"held-out loss {self.nll:.3f}, perplexity {perplexity}, {self.bits_per_byte:.3f} bits per byte"


class LossValidator:
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
        self.batches, self.order, self.score = batches, order, score
        self.label_smoothing, self.device, self.autocast = label_smoothing, device, autocast

    def __call__(
        self,
        model: Any,
        workers: Workers = ALONE,
        stoppable: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """As training.protocols.Scorer: each rank takes a part of the batches, all get the score."""
        sums, interrupt = [0.0] * 3, None
        try:
            with stoppable():
                sums = self._part(model, workers.rank, workers.size)
        except KeyboardInterrupt as raised:
            interrupt = raised
        if workers.sum([interrupt is not None])[0]:  # nobody waits for a rank that has gone on elsewhere
            raise interrupt or KeyboardInterrupt
        loss, nll, targets = workers.sum(sums)
        return self.score(loss, nll, int(targets))

    def _part(self, model: Any, rank: int, size: int) -> list[float]:
        training = model.training
        model.eval()
        totals, targets = torch.zeros(2, dtype=torch.float64, device=self.device), 0
        try:
            with torch.no_grad(), torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                for indices in self.order[rank::size]:
                    batch = self.batches.batch(indices, 0).to(self.device)
                    totals += torch.stack(model.batch_loss(batch, label_smoothing=self.label_smoothing)).double()
                    targets += batch.target_tokens
        finally:
            model.train(training)
        return [*totals.tolist(), targets]


def text_score(text_bytes: int) -> Callable[[float, float, int], TextScore]:
    """Makes the score of sums over a text of so many bytes."""

    def score(loss: float, nll: float, targets: int) -> TextScore:
        bits = nll / math.log(2) / text_bytes
        return TextScore(loss=loss / targets, nll=nll / targets, bits_per_byte=bits)

    return score
