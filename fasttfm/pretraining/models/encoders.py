"""Model directories of `fasttfm mlm`, read: whole models of pre-training, and the bodies that are fine-tuned."""

from __future__ import annotations

from pathlib import Path

from fasttfm.checkpoints.model_dir import read_kind
from fasttfm.checkpoints.saved import read_run
from fasttfm.checkpoints.weights import with_weights
from fasttfm.errors import UserError
from fasttfm.pretraining.kinds import kinds_of
from fasttfm.pretraining.models.bert import Bert, BertPretraining
from fasttfm.pretraining.models.electra import Electra
from fasttfm.pretraining.models.kinds import model_class


def read_encoder(folder: Path, checkpoint: str = "best") -> BertPretraining | Electra:
    """The model of a directory of `fasttfm mlm train` or `fasttfm mlm import`, in float32.

    checkpoint: best, last, average, an update's number, or a path. Hugging Face's folders are read by interop.bert.
    Raises UserError naming what is missing, damaged or of another kind of model.
    """
    kind = read_kind(folder)
    if kind not in kinds_of("mlm"):
        raise UserError(
            f"{folder}: is of a model of kind {kind}: {', '.join(kinds_of('mlm'))} are needed; fasttfm mlm makes one"
        )
    config, weights, saved = read_run(folder, kind, checkpoint)
    model: BertPretraining | Electra = with_weights(lambda: model_class(kind)(config.model), weights, saved)
    return model.eval()


def read_encoder_body(folder: Path, checkpoint: str = "best") -> Bert:
    """Read the part of a directory to fine-tune: the body without heads of pre-training; ELECTRA's discriminator."""
    model = read_encoder(folder, checkpoint)
    return model.discriminator if isinstance(model, Electra) else model.body
