"""Class of each kind of model that pre-training makes."""

from __future__ import annotations

from typing import Any

from fasttfm.pretraining.models.albert import AlbertPretraining
from fasttfm.pretraining.models.bert import BertPretraining
from fasttfm.pretraining.models.electra import Electra
from fasttfm.pretraining.models.gpt import GPT
from fasttfm.pretraining.models.llama import Llama

_CLASSES: dict[str, Any] = {
    "gpt": GPT,
    "llama": Llama,
    "bert": BertPretraining,
    "albert": AlbertPretraining,
    "electra": Electra,
}


def model_class(kind: str) -> Any:
    """The class, which makes a model from its configuration alone."""
    return _CLASSES[kind]
