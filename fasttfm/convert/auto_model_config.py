"""The configuration and the search of our models as transformers has them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from fasttfm.config.model import TransformerConfig
from fasttfm.data.tokenizer import BOS, PAD, UNK
from fasttfm.models.pretrained import MODEL_TYPE, SPECIAL_TOKENS

_FIELDS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
_NAMES = {"max_length": "max_position_embeddings"}  # generate() takes max_length for a setting of its own


class FasttfmConfig(PretrainedConfig):
    """The fields of TransformerConfig, and `decoding`, as config.json has them."""

    model_type = MODEL_TYPE

    def __init__(self, **values: Any) -> None:
        for name, default in _FIELDS.items():
            value = values.pop(name, 8 if default is dataclasses.MISSING else default)
            setattr(self, _NAMES.get(name, name), value)
        self.decoding = values.pop("decoding", {})
        super().__init__(**{"is_encoder_decoder": True, **SPECIAL_TOKENS, **values})

    def transformer(self) -> TransformerConfig:
        """The configuration of models.Transformer."""
        return TransformerConfig(**{name: getattr(self, _NAMES.get(name, name)) for name in _FIELDS})


def search(decoding: Mapping[str, Any]) -> GenerationConfig:
    """Return transformers' search settings of a directory of ours."""
    return GenerationConfig(
        num_beams=decoding.get("beam", 4),
        length_penalty=decoding.get("alpha", 1.0) if decoding.get("length_penalty", "power") == "power" else 1.0,
        early_stopping=decoding.get("early_stopping", True) or "never",
        suppress_tokens=[PAD, BOS] if decoding.get("allow_unk") else [PAD, UNK, BOS],
        **SPECIAL_TOKENS,
    )
