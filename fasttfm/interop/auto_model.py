"""Our models behind Hugging Face's AutoModelForSeq2SeqLM.

    register()                                                 # once
    model = AutoModelForSeq2SeqLM.from_pretrained(DIR)         # what Transformer.save_pretrained() wrote
    model.generate(input_ids=ids, attention_mask=mask)

Every step computes the whole prefix anew: for speed there is decoding.Translator. Needs the package transformers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.blocks.loss import logits
from fasttfm.config.model import TransformerConfig
from fasttfm.data.tokenizer import BOS, PAD, UNK
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.models.pretrained import MODEL_TYPE, SPECIAL_TOKENS

try:
    from transformers import (
        AutoConfig,
        AutoModelForSeq2SeqLM,
        GenerationConfig,
        GenerationMixin,
        PretrainedConfig,
        PreTrainedModel,
    )
    from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
except ImportError:
    raise UserError('the package transformers is needed: pip install "fasttfm[hf]"') from None

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
        super().__init__(**{"is_encoder_decoder": True, "use_cache": False, **SPECIAL_TOKENS, **values})

    def transformer(self) -> TransformerConfig:
        """The configuration of models.Transformer."""
        return TransformerConfig(**{name: getattr(self, _NAMES.get(name, name)) for name in _FIELDS})


class _Encoder(nn.Module):
    """What generate() calls first."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.models = [model]  # in a list, whose parameters are not this module's too

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.models[0].encode(input_ids, _lengths(attention_mask)))


class FasttfmForSeq2SeqLM(PreTrainedModel, GenerationMixin):
    """A models.Transformer with transformers' arguments and outputs; padding is on the right."""

    config_class = FasttfmConfig
    main_input_name = "input_ids"

    def __init__(self, config: FasttfmConfig, model: Transformer | None = None) -> None:
        super().__init__(config)
        self.model = model or Transformer(config.transformer())

    @classmethod
    def from_pretrained(cls, path: str | Path, *_: Any, config: Any = None, **options: Any) -> FasttfmForSeq2SeqLM:  # type: ignore[override]
        """The model of a directory on this machine. UserError for what is missing or damaged."""
        given = config or FasttfmConfig.from_pretrained(path)
        model = cls(given, Transformer.from_pretrained(path))
        decoding = given.decoding
        model.generation_config = GenerationConfig(
            num_beams=decoding.get("beam", 4),
            length_penalty=decoding.get("alpha", 1.0) if decoding.get("length_penalty") == "power" else 1.0,
            early_stopping="never",
            suppress_tokens=[PAD, BOS] if decoding.get("allow_unk") else [PAD, UNK, BOS],
            use_cache=False,
            **SPECIAL_TOKENS,
        )
        return model.eval()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        """The encoder: input_ids (B, S) to (B, S, d)."""
        return _Encoder(self.model)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, encoder_outputs: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """What forward() is given at a step."""
        return {
            "decoder_input_ids": input_ids,
            "encoder_outputs": encoder_outputs,
            "attention_mask": attention_mask,
        }

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        """Logits (B, L, V) of decoder_input_ids (B, L); with labels (B, L), -100 ignored, the mean loss too."""
        lengths = _lengths(attention_mask)
        if encoder_outputs is None:
            assert input_ids is not None
            memory = self.model.encode(input_ids, lengths)
        else:
            memory = encoder_outputs[0]
        if decoder_input_ids is None and labels is not None:
            shifted = labels[:, :-1].masked_fill(labels[:, :-1] == -100, PAD)
            decoder_input_ids = torch.cat([torch.full_like(labels[:, :1], BOS), shifted], dim=1)
        assert decoder_input_ids is not None
        hidden = self.model._decode(decoder_input_ids, None, memory, lengths, self.model._seed())
        scores = logits(hidden, self.model.output)
        loss = None if labels is None else nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        return Seq2SeqLMOutput(loss=loss, logits=scores, encoder_last_hidden_state=memory)


def register() -> None:
    """Make directories of Transformer.save_pretrained() known to AutoConfig and AutoModelForSeq2SeqLM."""
    AutoConfig.register(MODEL_TYPE, FasttfmConfig, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FasttfmConfig, FasttfmForSeq2SeqLM, exist_ok=True)


def _lengths(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.sum(dim=1)
