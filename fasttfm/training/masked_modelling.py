"""Training of an encoder-only model on prepared documents: fasttfm mlm train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fasttfm.checkpoints.model_dir import read_config, read_kind
from fasttfm.checkpoints.vocabulary import refuse_another_vocabulary
from fasttfm.config import RunConfig, Values, build_run
from fasttfm.config.masking import MaskingConfig
from fasttfm.data.documents import Documents, PreparedDocuments
from fasttfm.data.masked_rows import MaskedBatches
from fasttfm.data.masking import BERT_SHARES, ELECTRA_SHARES, Masker, read_phrases
from fasttfm.data.masking_vocabulary import masking_vocabulary
from fasttfm.data.text_tokenizer import TextTokenizer
from fasttfm.errors import UserError
from fasttfm.folders import Verification
from fasttfm.models.encoders import read_encoder
from fasttfm.training.masked_validation import MaskedScore, MaskedValidator
from fasttfm.training.pretraining import LanguageModelling
from fasttfm.training.updates import AUTOCAST

_PAIRS = {"mlm+nsp": "nsp", "mlm+sop": "sop"}
_OBJECTIVES = {"bert": "mlm+nsp", "albert": "mlm+sop", "electra": "electra"}
"""Of each kind, where nobody says."""


class MaskedModelling(LanguageModelling):
    """The hidden tokens of each row, and what the objective asks besides; of a bert, albert or electra."""

    def open(self, data_dir: Path) -> PreparedDocuments:
        """A directory of fasttfm mlm prepare, or of fasttfm lm prepare."""
        data = super().open(data_dir)
        if data.tokenizer.mask is None:
            raise UserError(
                f"{data_dir}: its vocabulary has no piece for a hidden token ([MASK]): prepare it with fasttfm mlm "
                "prepare, without --tokenizer or with that of a BERT"
            )
        return data

    def build(self, values: Values, data: PreparedDocuments) -> RunConfig:
        """The size of the vocabulary is that of the data, and the head of pairs is as the objective says."""
        objective = values["data"].setdefault("objective", _OBJECTIVES[self.kind])
        if (objective == "electra") != (self.kind == "electra"):
            presets = "electra-small or electra-tiny" if objective == "electra" else "bert-tiny or albert-tiny"
            raise UserError(f"--objective {objective} is not for a model of kind {self.kind}: give --preset {presets}")
        if self.kind != "electra":
            values["model"].setdefault("sentence_head", objective in _PAIRS)
        config = super().build(values, data)
        if self.kind != "electra" and config.model.sentence_head != config.data.has_pairs:
            raise UserError(
                f"--objective {objective} and sentence_head {str(config.model.sentence_head).lower()} do not go "
                "together: leave sentence_head out"
            )
        return config

    def batches(self, config: Any, data: PreparedDocuments, verification: Verification | None) -> MaskedBatches:
        """Rows of like length, masked anew in every epoch."""
        return masked_batches(config.data, data.train, data.tokenizer, config.training.seed, verification)

    def validator(self, config: Any, data: PreparedDocuments, device: torch.device) -> MaskedValidator:
        """Losses and accuracies on what was held out, always masked alike."""
        return MaskedValidator(
            masked_batches(config.data, data.valid, data.tokenizer),
            label_smoothing=config.training.label_smoothing,
            device=device,
            autocast=AUTOCAST[config.training.precision],
        )


def masked_batches(
    config: MaskingConfig,
    documents: Documents,
    tokenizer: TextTokenizer,
    seed: int = 0,
    verification: Verification | None = None,
) -> MaskedBatches:
    """The batches that a configuration asks for; UserError for documents or phrases that give none."""
    vocabulary = masking_vocabulary(tokenizer)
    masker = Masker(
        vocabulary,
        rate=config.mask_rate,
        shares=ELECTRA_SHARES if config.objective == "electra" else BERT_SHARES,
        whole_words=config.whole_words,
        phrases=read_phrases(Path(config.phrases), tokenizer.encode) if config.phrases else None,
    )
    try:
        return MaskedBatches(
            documents,
            masker,
            row_length=config.row_length,
            max_tokens=config.max_tokens,
            seed=seed,
            pairs=_PAIRS.get(config.objective),
            line=getattr(tokenizer, "newline", None),
            verification=verification,
        )
    except ValueError as error:
        raise UserError(f"{error}: give longer documents, or fewer of their separators") from error


def evaluate(model_dir: Path, data_dir: Path, checkpoint: str, device: torch.device) -> MaskedScore:
    """The score of a model directory on the held-out part of prepared documents, with rows and masks of its training.

    Raises UserError where either cannot be read, or the documents are of another vocabulary.
    """
    model = read_encoder(model_dir, checkpoint)
    kind = read_kind(model_dir)
    task, config = MaskedModelling(kind), build_run(read_config(model_dir, kind))
    data = task.open(data_dir)
    refuse_another_vocabulary(data, model_dir)
    data.verify().finish()
    return task.validator(config, data, device)(model.to(device))
