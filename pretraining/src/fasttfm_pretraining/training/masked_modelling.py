"""Training and validation of an encoder-only model on prepared documents: fasttfm mlm train and mlm evaluate."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig, Values, build
from fasttfm.errors import UserError
from fasttfm.store.model_dir import read_config, read_kind
from fasttfm.store.vocabulary import refuse_another_vocabulary
from fasttfm.training.validation import DividedValidator, Score, settings_of
from fasttfm.training.workers import Workers
from fasttfm_pretraining.config.data import MaskingConfig
from fasttfm_pretraining.data.documents import Documents, PreparedDocuments
from fasttfm_pretraining.data.masked_rows import MaskedBatches
from fasttfm_pretraining.data.masking import BERT_SHARES, ELECTRA_SHARES, Masker, read_phrases
from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.models.kinds import read_model
from fasttfm_pretraining.training.language_modelling import LanguageModelling

_PAIRS = {"mlm+nsp": "nsp", "mlm+sop": "sop"}
_OBJECTIVES = {"bert": "mlm+nsp", "albert": "mlm+sop", "electra": "electra"}
"""Default objective of each kind."""
_NAMES = ("loss", "nll", "masked", "sentences", "tokens", "replaced", "noticed")
"""Keys of a model's batch_scores()."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedScore(Score):
    """Results of one validation, per masked token. For ELECTRA nll is the generator's; accuracies are in [0, 1]."""

    masked_accuracy: float
    """Accuracy on masked tokens."""
    sentence_accuracy: float | None = None
    """Accuracy on sentence pairs (next sentence or sentence order); chance is 0.5."""
    detection_accuracy: float | None = None
    """Accuracy of ELECTRA's discriminator; about nine in ten tokens are originals."""
    noticed: float | None = None
    """Recall on replaced tokens."""

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: the negative of the minimized losses."""
        return (0.0, -self.loss)

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
    """Accumulates losses and accuracies over held-out rows, with fixed masks and pairs."""

    def __init__(self, batches: MaskedBatches, **settings: Any) -> None:
        """batches: held-out text, masked as in epoch 0. settings: as in DividedValidator."""
        super().__init__(**settings)
        self.batches, self.order = batches, batches.in_order()

    def part(self, model: Any, rank: int, size: int) -> list[float]:
        """Sums over a rank's batches, then its numbers of masked tokens, pairs and tokens."""
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
        """The score over all batches."""
        *totals, hidden, rows, tokens = workers.sum(part)
        hidden = max(hidden, 1)
        total = dict(zip(_NAMES, totals))
        return MaskedScore(
            loss=total["loss"] / hidden,
            nll=total["nll"] / hidden,
            masked_accuracy=total["masked"] / hidden,
            sentence_accuracy=total["sentences"] / rows if rows else None,
            detection_accuracy=total["tokens"] / tokens if total["tokens"] else None,
            noticed=total["noticed"] / max(total["replaced"], 1) if total["tokens"] else None,
        )


class MaskedModelling(LanguageModelling):
    """Masked language modelling with BERT, ALBERT or ELECTRA, and the objective's further losses."""

    def open(self, data_dir: Path) -> PreparedDocuments:
        """A directory of fasttfm mlm prepare, or of fasttfm lm prepare."""
        data = super().open(data_dir)
        if data.tokenizer.mask is None:
            raise UserError(
                f"{data_dir}: its vocabulary has no piece for a hidden token ([MASK]): prepare it with fasttfm mlm "
                "prepare, without --spm or with the tokenizer.json of a BERT"
            )
        return data

    def build(self, values: Values, data: PreparedDocuments) -> RunConfig:
        """Takes the vocabulary size from the data and the pair head from the objective."""
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

    def batches(self, config: Any, data: PreparedDocuments) -> MaskedBatches:
        """Batches of rows of similar length, masked anew each epoch."""
        return masked_batches(
            config.data, data.train, data.tokenizer, config.training.seed, config.training.update_freq
        )

    def validator(self, config: Any, data: PreparedDocuments, device: torch.device) -> MaskedValidator:
        """Losses and accuracies on the held-out rows, with fixed masks."""
        batches = masked_batches(config.data, data.valid, data.tokenizer)
        return MaskedValidator(batches, **settings_of(config.training, device))


def masked_batches(
    config: MaskingConfig, documents: Documents, tokenizer: TextTokenizer, seed: int = 0, together: int = 1
) -> MaskedBatches:
    """Batches for a configuration; `together` of them make an update.

    Raises UserError if documents or phrases yield none.
    """
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
            line=tokenizer.newline,
            together=together,
        )
    except ValueError as error:
        raise UserError(f"{error}: give longer documents, or fewer of their separators") from error


def evaluate(model_dir: Path, data_dir: Path, checkpoint: str, device: torch.device) -> MaskedScore:
    """Score of a model directory on the held-out part of prepared documents, with the rows and masks of its training.

    Raises UserError if either cannot be read or the vocabularies differ.
    """
    model = read_model("mlm", model_dir, checkpoint)
    kind = read_kind(model_dir)
    task, config = MaskedModelling(kind), build(read_config(model_dir, kind))
    data = task.open(data_dir)
    refuse_another_vocabulary(data, model_dir)
    return task.validator(config, data, device)(model.to(device))
