"""Training of the encoder-decoder Transformer on prepared sentence pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.config import Config, Values, build
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError
from fasttfm.folders import Verification
from fasttfm.models import Transformer
from fasttfm.models.distillation import layer_map
from fasttfm.training.progress import tell
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

    def weights_for(self, model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """All; for a model of fewer layers every second, third … of the layers (Sanh et al. 2019, section 3)."""
        for stack in ("encoder", "decoder"):
            weights = _fewer_layers(weights, stack, len(getattr(model, stack).layers))
        return weights

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


def _fewer_layers(weights: dict[str, Tensor], stack: str, layers: int) -> dict[str, Tensor]:
    """The weights with evenly spaced layers of the stack alone; as they are where these are not spread evenly."""
    prefix = f"{stack}.layers."
    there = len({name.split(".")[2] for name in weights if name.startswith(prefix)})
    if there <= layers or there % layers:
        return weights
    chosen = {str(theirs): str(ours) for ours, theirs in enumerate(layer_map(there, layers))}
    tell(f"--init-from: of {there} {stack} layers {', '.join(str(int(number) + 1) for number in chosen)}")
    kept = {}
    for name, tensor in weights.items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            kept[name] = tensor
        elif number in chosen:
            kept[f"{prefix}{chosen[number]}.{rest}"] = tensor
    return kept
