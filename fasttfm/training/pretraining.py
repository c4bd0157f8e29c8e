"""Training of a language model on prepared documents: fasttfm lm train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig, Values, build_run
from fasttfm.data.documents import PreparedDocuments, RowBatches
from fasttfm.folders import Verification
from fasttfm.models.kinds import model_class
from fasttfm.training.protocols import Scorer, TrainingBatches
from fasttfm.training.task import Task, check_row_length
from fasttfm.training.text_validation import LossValidator, text_score
from fasttfm.training.updates import AUTOCAST


class LanguageModelling(Task):
    """The next token of each row, of the models of a kind."""

    def __init__(self, kind: str = "gpt") -> None:
        """kind: a key of config.KINDS whose section `data` is a DocumentsConfig."""
        self.kind = kind

    def open(self, data_dir: Path) -> PreparedDocuments:
        """A directory of fasttfm lm prepare."""
        return PreparedDocuments.open(data_dir)

    def build(self, values: Values, data: PreparedDocuments) -> RunConfig:
        """The size of the vocabulary is that of the data."""
        config = build_run(values, {"vocab_size": len(data.tokenizer)})
        check_row_length(config, ", or a larger --max-length")
        return config

    def model(self, config: Any) -> Any:
        """A model of the kind."""
        return model_class(self.kind)(config)

    def batches(self, config: Any, data: PreparedDocuments, verification: Verification | None) -> TrainingBatches:
        """Full rows, shuffled in every epoch."""
        sizes = config.data
        return RowBatches(data.train, sizes.row_length, sizes.max_tokens, config.training.seed, verification)

    def validator(self, config: Any, data: PreparedDocuments, device: torch.device) -> Scorer:
        """The loss on all rows of what was held out."""
        rows = RowBatches(data.valid, config.data.row_length, config.data.max_tokens)
        return LossValidator(
            rows,
            rows.in_order(),
            text_score(data.valid.bytes),
            label_smoothing=config.training.label_smoothing,
            device=device,
            autocast=AUTOCAST[config.training.precision],
        )
