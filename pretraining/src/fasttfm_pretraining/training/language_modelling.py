"""Training and validation of a language model on prepared documents: fasttfm lm train and lm evaluate."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig, Values, build
from fasttfm.data.corpus import TextFile
from fasttfm.errors import UserError
from fasttfm.store.model_dir import read_config, read_kind
from fasttfm.store.vocabulary import refuse_another_vocabulary
from fasttfm.training.protocols import TrainingBatches
from fasttfm.training.task import Task
from fasttfm.training.validation import DividedValidator, Score, settings_of
from fasttfm.training.workers import Workers
from fasttfm_pretraining.data.documents import Documents, PreparedDocuments, RowBatches
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.models.kinds import CLASSES


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore(Score):
    """Results of one validation of a language model, per token."""

    bits_per_byte: float
    """Per byte of text: comparable between vocabularies."""

    def __str__(self) -> str:
        bits = f"{self.bits_per_byte:.3f} bits per byte"
        return f"held-out loss {self.nll:.3f}, perplexity {self.shown_perplexity}, {bits}"


class TextValidator(DividedValidator[list[float]]):
    """Loss over all rows of documents, per token and per byte."""

    def __init__(self, rows: RowBatches, **settings: Any) -> None:
        """settings: as DividedValidator takes them."""
        super().__init__(**settings)
        self.rows = rows

    def part(self, model: Any, rank: int, size: int) -> list[float]:
        """Sums of loss and nll and the number of targets over a rank's batches."""
        chosen = self.rows.in_order()[rank::size]
        return self.loss_sums(model, (self.rows.batch(indices).to(self.device) for indices in chosen))

    def score(self, part: list[float], workers: Workers) -> TextScore:
        """The score over all batches."""
        loss, nll, targets = workers.sum(part)
        bits = nll / math.log(2) / self.rows.documents.bytes
        return TextScore(loss=loss / targets, nll=nll / targets, bits_per_byte=bits)


def check_row_length(config: Any, remedy: str = "") -> None:
    """Raise UserError for rows longer than the model's positions. remedy: ends the message."""
    if config.data.row_length > config.model.max_length:
        raise UserError(
            f"--row-length {config.data.row_length}: the model has {config.model.max_length} positions: give at most "
            f"that{remedy}"
        )


class LanguageModelling(Task):
    """Next-token prediction with the models of a kind."""

    def __init__(self, kind: str = "gpt") -> None:
        """kind: a key of pretraining.kinds.KINDS whose section `data` is a DocumentsConfig."""
        self.kind = kind

    def open(self, data_dir: Path) -> PreparedDocuments:
        """A directory of fasttfm lm prepare."""
        return PreparedDocuments.open(data_dir)

    def build(self, values: Values, data: PreparedDocuments) -> RunConfig:
        """Takes the vocabulary size from the data."""
        config = build(values, {"vocab_size": len(data.tokenizer)})
        check_row_length(config, ", or a larger --max-length")
        return config

    def model(self, config: Any) -> Any:
        """A model of the kind."""
        return CLASSES[self.kind](config)

    def batches(self, config: Any, data: PreparedDocuments) -> TrainingBatches:
        """Full rows, reshuffled each epoch."""
        sizes = config.data
        return RowBatches(data.train, sizes.row_length, sizes.max_tokens, config.training.seed)

    def validator(self, config: Any, data: PreparedDocuments, device: torch.device) -> DividedValidator[Any]:
        """Loss over all held-out rows."""
        rows = RowBatches(data.valid, config.data.row_length, config.data.max_tokens)
        return TextValidator(rows, **settings_of(config.training, device))


_BATCH_TOKENS = 4096
"""Tokens per evaluation batch, if a row has fewer."""


def evaluate(
    model: Any,
    tokenizer: TextTokenizer,
    model_dir: Path,
    *,
    data: Path | None = None,
    text: Path | None = None,
    row_length: int | None = None,
) -> TextScore:
    """Score on the held-out part of prepared documents, or on a text as a single document.

    row_length: context length; None: as in training. Raises UserError for another vocabulary, an empty text, and rows
    longer than the model's positions.
    """
    length = row_length
    if length is None:
        length = min(read_config(model_dir, read_kind(model_dir))["data"]["row_length"], model.config.max_length)
    if not 2 <= length <= model.config.max_length:
        raise UserError(f"--row-length {length}: between 2 and {model.config.max_length:,}, the model's positions")
    if data is not None:
        prepared = PreparedDocuments.open(data)
        refuse_another_vocabulary(prepared, model_dir)
        documents = prepared.valid
    else:
        assert text is not None
        lines = list(TextFile(text))
        if not any(line.strip() for line in lines):
            raise UserError(f"{text}: is empty: at least one line of text is needed")
        ids = [token for line in tokenizer.encode_lines(lines) for token in line]
        size = sum(len(line.encode()) + 1 for line in lines)
        documents = Documents.from_lists([ids], tokenizer.end, size, tokenizer.begin)
    rows = RowBatches(documents, length, max(length, _BATCH_TOKENS))
    return TextValidator(rows, device=next(model.parameters()).device)(model)
