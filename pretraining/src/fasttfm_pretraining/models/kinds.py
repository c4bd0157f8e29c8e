"""Model classes by kind, and loading from the directories of `fasttfm lm` and `fasttfm mlm`."""

from pathlib import Path
from typing import Any

from fasttfm.errors import UserError
from fasttfm.store.model_dir import read_kind
from fasttfm.store.weights import with_weights
from fasttfm_pretraining.kinds import kinds_of
from fasttfm_pretraining.models.bert import Bert, BertPretraining
from fasttfm_pretraining.models.electra import Electra
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.llama import Llama
from fasttfm_pretraining.models.saved import read_run

CLASSES: dict[str, Any] = {
    "gpt": GPT,
    "llama": Llama,
    "bert": BertPretraining,
    "albert": BertPretraining,
    "electra": Electra,
}
"""Class of each kind; its constructor takes the configuration alone."""


def read_model(command: str, folder: Path, checkpoint: str = "best") -> Any:
    """Load a model directory of `fasttfm lm` or `fasttfm mlm`, in float32 and evaluation mode.

    checkpoint: best, last, average, an update's number, or a path. Hugging Face's folders are read by
    pretraining.interop. Raises UserError for missing or damaged files, or another kind of model.
    """
    kind, kinds = read_kind(folder), kinds_of(command)
    if kind not in kinds:
        raise UserError(
            f"{folder}: is of a model of kind {kind}: {' or '.join(kinds)} is needed; fasttfm {command} makes one"
        )
    config, weights, saved = read_run(folder, kind, checkpoint)
    return with_weights(lambda: CLASSES[kind](config.model), weights, saved).eval()


def read_body(folder: Path, checkpoint: str = "best") -> Bert:
    """Load the part of a directory to fine-tune: the body without pre-training heads; ELECTRA's discriminator."""
    model = read_model("mlm", folder, checkpoint)
    return model.discriminator if isinstance(model, Electra) else model.body
