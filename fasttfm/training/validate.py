"""Validation: loss and BLEU of the model as it stands, and the translations themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fasttfm.data.batches import collate
from fasttfm.data.prepared import PreparedData
from fasttfm.data.scoring import bleu
from fasttfm.data.shapes import length_batches, round_length
from fasttfm.data.tokenizer import EOS
from fasttfm.decoding import DecodingConfig, translate_ids
from fasttfm.decoding.translator import one_line
from fasttfm.training.validation import DividedValidator, LossScore
from fasttfm.training.workers import Workers

if TYPE_CHECKING:
    from fasttfm.models import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation(LossScore):
    """What one validation found, per target token."""

    bleu: float | None
    """Cased sacreBLEU of the translations against the raw references; None when only the loss was asked for."""
    translations: list[str]
    """One a validation pair, in order; empty when only the loss was asked for."""

    @property
    def outputs(self) -> list[str]:
        """What is kept beside the log."""
        return self.translations

    def record(self) -> dict[str, Any]:
        """The numbers by name, as a line of the log has them."""
        numbers = LossScore.record(self)
        return numbers if self.bleu is None else {**numbers, "bleu": self.bleu}

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: BLEU if there is one, and with equal BLEU or none the lower loss."""
        return (self.bleu or 0.0, -self.nll)

    def __str__(self) -> str:
        shown = f"validation loss {self.loss:.3f}, perplexity {self.shown_perplexity}"
        return shown if self.bleu is None else f"{shown}, BLEU {self.bleu:.2f}"


class Validator(DividedValidator[tuple[list[float], list[str]]]):
    """Validates on the validation pairs of prepared data; the batches are made once. Draws no random numbers."""

    def __init__(
        self,
        data: PreparedData,
        *,
        max_tokens: int,
        label_smoothing: float,
        decoding: DecodingConfig | None,
        device: torch.device,
        bleu_tokenizer: str = "13a",
        autocast: torch.dtype | None = None,
    ) -> None:
        """decoding: how to translate for BLEU, None for the loss alone. autocast: matrix products' type, None fp32."""
        self.data = data
        self.label_smoothing = label_smoothing
        self.decoding = None if decoding is None else replace(decoding, nbest=1, sampling=False)
        self.device = device
        self.bleu_tokenizer = bleu_tokenizer
        self._references: list[str] = []
        if decoding is not None:
            # what is damaged or not installed is better said now than in an hour
            self._references = data.valid_target_text
            bleu(["."], ["."], tokenize=bleu_tokenizer)
        self.autocast = autocast
        pairs = data.valid
        widths = np.column_stack([pairs.source_lengths, pairs.target_lengths]) + 1
        self._batches = []
        for group in length_batches(widths.max(axis=1), max_tokens):
            size = [round_length(int(width)) for width in widths[group].max(axis=0)]
            batch = collate([pairs.source(i) for i in group], [pairs.target(i) for i in group], size)
            self._batches.append(batch.to(device))
        self._sources = [[*map(int, pairs.source(i)), EOS] for i in range(len(pairs))]

    def part(self, model: Transformer, rank: int, size: int) -> tuple[list[float], list[str]]:
        """Sums of loss and nll, and the tokens, of a rank's batches; the translations of its sources."""
        sums = self._loss(model, rank, size)
        if self.decoding is None:
            return sums, []
        outputs = translate_ids(model, self._sources[rank::size], self.decoding)
        return sums, [one_line(self.data.target_tokenizer.decode(ids)) for ids in outputs]

    def score(self, part: tuple[list[float], list[str]], workers: Workers) -> Validation:
        """Of all pairs, and with BLEU the translations in their order."""
        loss, nll, tokens = workers.sum(part[0])
        if self.decoding is None:
            return Validation(loss=loss / tokens, nll=nll / tokens, bleu=None, translations=[])
        whole = [""] * len(self._sources)
        for rank, translations in enumerate(workers.gather(part[1])):
            whole[rank :: workers.size] = translations
        value = bleu(whole, self._references, tokenize=self.bleu_tokenizer).value
        return Validation(loss=loss / tokens, nll=nll / tokens, bleu=value, translations=whole)

    def _loss(self, model: Transformer, rank: int, size: int) -> list[float]:
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        tokens = 0
        for batch in self._batches[rank::size]:
            loss, nll = model.batch_loss(batch, label_smoothing=self.label_smoothing)
            sums += torch.stack([loss, nll]).double()
            tokens += batch.target_tokens
        return [*sums.tolist(), tokens]
