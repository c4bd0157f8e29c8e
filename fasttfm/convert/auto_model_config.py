"""transformers' configuration class of fasttfm's translation models."""

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from fasttfm.config.model import TransformerConfig
from fasttfm.models.pretrained import MODEL_TYPE, SPECIAL_TOKENS

_FIELDS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
_NAMES = {"max_length": "max_position_embeddings"}  # max_length is a setting of generate()


class FasttfmConfig(PretrainedConfig):
    """The fields of TransformerConfig, and `decoding`, as in config.json."""

    model_type = MODEL_TYPE

    def __init__(self, **values: Any) -> None:
        for name, default in _FIELDS.items():
            value = values.pop(name, 8 if default is dataclasses.MISSING else default)
            setattr(self, _NAMES.get(name, name), value)
        self.decoding = values.pop("decoding", {})
        super().__init__(**{"is_encoder_decoder": True, **SPECIAL_TOKENS, **values})

    def transformer(self) -> TransformerConfig:
        """Return the configuration of models.Transformer."""
        return TransformerConfig(**{name: getattr(self, _NAMES.get(name, name)) for name in _FIELDS})
