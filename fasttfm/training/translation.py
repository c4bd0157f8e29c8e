"""Training task: the encoder-decoder Transformer on prepared sentence pairs."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.config import RunConfig, Values, build
from fasttfm.data.batches import TokenBatches, collate
from fasttfm.data.prepared import PreparedData
from fasttfm.data.sampled_batches import AHEAD, SampledBatches
from fasttfm.data.scoring import AUTO, bleu, tokenizer_of
from fasttfm.data.shapes import length_batches, round_length
from fasttfm.data.tokenizer import EOS
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.store.weights import layer_map
from fasttfm.training.progress import tell
from fasttfm.training.task import Task
from fasttfm.training.validation import DividedValidator, Score, settings_of
from fasttfm.training.workers import Workers, cores_of_rank
from fasttfm.translate.translator import one_line

LEAST_BLEU = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Validation(Score):
    """Results of a validation per target token; outputs are the translations, in order."""

    bleu: float | None
    """Cased sacreBLEU against the raw references; None if only the loss was computed."""

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, higher is better: BLEU, 0 below LEAST_BLEU where it is noise, then the lower loss."""
        return (self.bleu if self.bleu is not None and self.bleu >= LEAST_BLEU else 0.0, -self.nll)

    def __str__(self) -> str:
        shown = f"validation loss {self.loss:.3f}, perplexity {self.shown_perplexity}"
        return shown if self.bleu is None else f"{shown}, BLEU {self.bleu:.2f}"


class Validator(DividedValidator[tuple[list[float], list[str]]]):
    """Validates on the validation pairs of prepared data, without drawing random numbers."""

    def __init__(
        self, data: PreparedData, *, max_tokens: int, decoding: DecodingConfig | None,
        users: DecodingConfig | None = None, bleu_tokenizer: str = AUTO, **settings: Any,
    ) -> None:  # fmt: skip
        """decoding: for BLEU during training; None: loss only. users: decoding of `fasttfm translate`. settings: of
        DividedValidator."""
        super().__init__(**settings)
        self.data = data
        self.decoding, self._users = (
            None if each is None else dataclasses.replace(each, nbest=1, sampling=False) for each in (decoding, users)
        )
        self.bleu_tokenizer = bleu_tokenizer
        self._references: list[str] = []
        if decoding is not None:
            # fail now for damaged data or a missing package
            self._references = data.valid_target_text
            if bleu_tokenizer == AUTO:  # the same on every machine
                self.bleu_tokenizer = tokenizer_of(self._references, packages=False)
            bleu(["."], ["."], tokenize=self.bleu_tokenizer)
        pairs = data.valid
        widths = np.column_stack([pairs.source_lengths, pairs.target_lengths]) + 1
        self._batches = []
        for group in length_batches(widths.max(axis=1), max_tokens):
            size = [round_length(int(width)) for width in widths[group].max(axis=0)]
            batch = collate([pairs.source(i) for i in group], [pairs.target(i) for i in group], size)
            self._batches.append(batch.to(self.device))
        self._sources = [[*map(int, pairs.source(i)), EOS] for i in range(len(pairs))]

    def of_users(self) -> "Validator | None":
        """See DividedValidator."""
        if self.decoding is None or self._users in (None, self.decoding):
            return None
        other = copy.copy(self)
        other.decoding = self._users
        return other

    def part(self, model: Transformer, rank: int, size: int) -> tuple[list[float], list[str]]:
        """Sums of loss, nll and tokens of a rank's batches, and the translations of its sources."""
        sums = self.loss_sums(model, self._batches[rank::size])
        if self.decoding is None:
            return sums, []
        sources, tokenizer = self._sources[rank::size], self.data.target_tokenizer
        outputs = search_ids(model, sources, self.decoding, prefixes=[tokenizer.prefix] * len(sources))
        return sums, [one_line(tokenizer.decode(best[0].tokens)) for best in outputs]

    def score(self, part: tuple[list[float], list[str]], workers: Workers) -> Validation:
        """The score of all pairs; with BLEU, also their translations in order."""
        loss, nll, tokens = workers.sum(part[0])
        if self.decoding is None:
            return Validation(loss=loss / tokens, nll=nll / tokens, bleu=None)
        whole = [""] * len(self._sources)
        for rank, translations in enumerate(workers.gather(part[1])):
            whole[rank :: workers.size] = translations
        value = bleu(whole, self._references, tokenize=self.bleu_tokenizer).value
        return Validation(loss=loss / tokens, nll=nll / tokens, bleu=value, outputs=whole)


class Translation(Task):
    """fasttfm train."""

    def open(self, data_dir: Path) -> PreparedData:
        """Open a directory of fasttfm prepare."""
        return PreparedData.open(data_dir)

    def build(self, values: Values, data: PreparedData) -> RunConfig:
        """Build the configuration with the data's vocabulary sizes."""
        sizes = {"vocab_size": len(data.target_tokenizer)}
        if not data.joint:
            sizes["source_vocab_size"] = len(data.source_tokenizer)
            if values["model"].get("share_embeddings", "all") == "all":
                raise UserError(
                    f"{data.path}: has a vocabulary for each side, but share_embeddings all needs a joint one: give "
                    "--share-embeddings decoder or none, or run fasttfm prepare without --separate-vocab"
                )
        config = build(values, sizes)
        if config.model.positions is not None:
            _refuse_longer(config, data)
        return config

    def model(self, config: Any) -> Transformer:
        """A Transformer."""
        return Transformer(config)

    def weights_for(self, model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """All weights; for a model of fewer layers those of evenly spaced layers (Sanh et al. 2019, section 3)."""
        for stack in ("encoder", "decoder"):
            weights = _fewer_layers(weights, stack, len(getattr(model, stack).layers))
        return weights

    def batches(self, config: RunConfig, data: PreparedData) -> TokenBatches:
        """Batches of pairs of similar length."""
        batching, together = config.data, config.training.update_freq
        args = data.train, batching.max_tokens, config.training.seed, batching.max_sentence_tokens
        try:
            if not batching.subword_sampling:
                return TokenBatches(*args, together=together)
            return SampledBatches(
                *args,
                amount=batching.subword_sampling,
                tokenizers=(data.source_tokenizer, data.target_tokenizer),
                together=together,
                processes=min(AHEAD * together, max(1, cores_of_rank() - 1)),
            )
        except ValueError as error:
            raise UserError(f"{data.path}: {error}: raise --max-tokens or --max-sentence-tokens") from error

    def validator(self, config: RunConfig, data: PreparedData, device: torch.device) -> Validator:
        """Validates the loss and, if the recipe requests it, BLEU."""
        recipe = config.training
        decoding = dataclasses.replace(config.decoding, beam=recipe.valid_beam, nbest=1) if recipe.valid_bleu else None
        return Validator(
            data, max_tokens=config.data.max_tokens, decoding=decoding, users=config.decoding,
            bleu_tokenizer=recipe.valid_bleu_tokenizer, **settings_of(recipe, device),
        )  # fmt: skip


def _refuse_longer(config: RunConfig, data: PreparedData) -> None:
    """Raise UserError if sentences with their marker may exceed the learned positions."""
    most, batching = config.model.max_length, config.data
    limit, name = batching.max_sentence_tokens + 1, "--max-sentence-tokens"
    if batching.subword_sampling:  # a segmentation may be as long as its characters
        limit, name = batching.max_tokens, "--subword-sampling, whose draws have up to --max-tokens"
    longest = 1 + max(int(side.max(initial=0)) for side in (data.valid.source_lengths, data.valid.target_lengths))
    if most < limit:
        raise UserError(f"--max-length {most:,}: {name} needs {limit:,} learned positions: raise --max-length to it")
    if most < longest:
        raise UserError(f"--max-length {most:,}: a validation sentence needs {longest:,} learned positions: raise it")


def _fewer_layers(weights: dict[str, Tensor], stack: str, layers: int) -> dict[str, Tensor]:
    """Keep evenly spaced layers of a stack; unchanged if the number of layers is no multiple."""
    prefix = f"{stack}.layers."
    count = len({name.split(".")[2] for name in weights if name.startswith(prefix)})
    if count <= layers or count % layers:
        return weights
    chosen = {str(theirs): str(ours) for ours, theirs in enumerate(layer_map(count, layers))}
    tell(f"--init-from: of {count} {stack} layers {', '.join(str(int(number) + 1) for number in chosen)}")
    kept = {}
    for name, tensor in weights.items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            kept[name] = tensor
        elif number in chosen:
            kept[f"{prefix}{chosen[number]}.{rest}"] = tensor
    return kept
