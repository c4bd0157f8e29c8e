"""Class of each kind of model (config.KINDS has their configuration)."""

from __future__ import annotations

from typing import Any

from fasttfm.models.albert import AlbertPretraining
from fasttfm.models.bert import BertPretraining
from fasttfm.models.electra import Electra
from fasttfm.models.gpt import GPT
from fasttfm.models.llama import Llama
from fasttfm.models.transformer import Transformer

_CLASSES: dict[str, Any] = {
    "transformer": Transformer,
    "gpt": GPT,
    "llama": Llama,
    "bert": BertPretraining,
    "albert": AlbertPretraining,
    "electra": Electra,
}


def model_class(kind: str) -> Any:
    """The class, which makes a model from its configuration alone."""
    return _CLASSES[kind]
