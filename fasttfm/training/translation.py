"""Training of the encoder-decoder Transformer on prepared sentence pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import Config, Values, build
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError
from fasttfm.folders import Verification
from fasttfm.models import Transformer
from fasttfm.training.task import Task
from fasttfm.training.updates import AUTOCAST
from fasttfm.training.validate import Validator


class Translation(Task):
    """fasttfm train."""

    def open(self, data_dir: Path) -> PreparedData:
        """A directory of fasttfm prepare."""
        return PreparedData.open(data_dir)

    def build(self, values: Values, data: PreparedData) -> Config:
        """The sizes of the vocabularies are those of the data."""
        sizes = {"vocab_size": len(data.target_tokenizer)}
        if not data.joint:
            sizes["source_vocab_size"] = len(data.source_tokenizer)
            if values["model"].get("share_embeddings", "all") == "all":
                raise UserError(
                    f"{data.path}: has a vocabulary for each side, but share_embeddings all needs a joint one: give "
                    "--share-embeddings decoder or none, or prepare the data without --separate-vocab"
                )
        return build(values, sizes)

    def model(self, config: Any) -> Transformer:
        """A Transformer."""
        return Transformer(config)

    def batches(self, config: Config, data: PreparedData, verification: Verification | None) -> TokenBatches:
        """Pairs of like length together."""
        batching = config.data
        try:
            return TokenBatches(
                data.train,
                batching.max_tokens,
                config.training.seed,
                batching.max_sentence_tokens,
                batching.subword_sampling,
                (data.source_tokenizer, data.target_tokenizer),
                verification,
            )
        except ValueError as error:
            raise UserError(f"{data.path}: {error}: raise --max-tokens or --max-sentence-tokens") from error

    def validator(self, config: Config, data: PreparedData, device: torch.device) -> Validator:
        """Loss and, where the recipe asks for it, BLEU."""
        recipe = config.training
        return Validator(
            data,
            max_tokens=config.data.max_tokens,
            label_smoothing=recipe.label_smoothing,
            decoding=dataclasses.replace(config.decoding, beam=recipe.valid_beam, nbest=1)
            if recipe.valid_bleu
            else None,
            device=device,
            bleu_tokenizer=recipe.valid_bleu_tokenizer,
            autocast=AUTOCAST[recipe.precision],
        )
