"""Text in, text out: a trained model with its tokenizers and decoding settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fasttfm.data.tokenizer import EOS, Tokenizer
from fasttfm.decoding.config import DecodingConfig
from fasttfm.decoding.scoring import score_ids
from fasttfm.decoding.search import search_ids
from fasttfm.errors import UserError

if TYPE_CHECKING:
    from fasttfm.models import Transformer

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PREFIX_RULE = "one line is needed for each input line: an empty one where the translation may begin anyhow"


@dataclass(frozen=True, slots=True)
class Translation:
    """One translation of one line."""

    text: str
    """One line of text, without any character that ends a line."""
    score: float
    """Log-probability divided by the length penalty; 0 for an empty line."""
    log_probability: float
    """Natural logarithm of the probability that the model gives the output's tokens; 0 for an empty line."""


class Translator:
    """Translates lines of text; every line gets its own translation, whatever stands beside it.

    A line of white space alone has the empty translation. A line of more than config.max_source_length tokens is cut
    off there; `cut_lines` counts those and `first_cut_line` (from 1) names the first.
    """

    def __init__(
        self,
        model: Transformer,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
    ) -> None:
        """config None means the defaults of DecodingConfig. The model is used where it is, in the type that it has."""
        self.model = model
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.config = config or DecodingConfig()
        self.cut_lines = 0
        self.first_cut_line: int | None = None

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        checkpoint: str = "best",
        device: str | torch.device | None = None,
        precision: Precision = "fp32",
        **decoding: Any,
    ) -> Translator:
        """The model that `fasttfm train` left in a directory.

        checkpoint: best, last, average, an update's number, or the path of a checkpoint. device None: a GPU where
        there is one. precision: type of weights and matrix products. decoding: fields of DecodingConfig that differ
        from those in the model's config.yaml. Raises UserError naming what is missing, damaged or of another model.
        """
        from fasttfm.config import build, gather
        from fasttfm.models import Transformer
        from fasttfm.training.checkpoint import check_vocabulary, load_weights, read_weights, resolve_checkpoint

        path = Path(path)
        if not (path / "config.yaml").is_file():
            what = (
                "has no config.yaml" if path.is_dir() else "is not a directory" if path.exists() else "does not exist"
            )
            raise UserError(f"{path}: {what}: give the model directory that fasttfm train --out made")
        values = gather(files=[path / "config.yaml"], overrides=decoding)
        if "vocab_size" not in values["model"]:
            raise UserError(f"{path / 'config.yaml'}: is cut off: it has no model.vocab_size; copy it back")
        config = build(values)
        joint = (path / "spm.model").exists()
        source_tokenizer = Tokenizer.load(path / ("spm.model" if joint else "spm.src.model"))
        target_tokenizer = source_tokenizer if joint else Tokenizer.load(path / "spm.tgt.model")
        for tokenizer, size, side in (
            (source_tokenizer, config.model.source_vocab_size or config.model.vocab_size, "source"),
            (target_tokenizer, config.model.vocab_size, "target"),
        ):
            if len(tokenizer) != size:
                raise UserError(
                    f"{path}: its {side} SentencePiece model has {len(tokenizer):,} pieces but config.yaml says "
                    f"{size:,}: copy both from the same training run"
                )
        where = pick_device(device)
        folder = resolve_checkpoint(path, checkpoint)
        check_vocabulary(folder, path)
        model = Transformer(config.model)
        load_weights(model, read_weights(folder), folder)
        model.to(device=where, dtype=_DTYPES[precision]).eval()
        return cls(model, source_tokenizer, target_tokenizer, config.decoding)

    def translate(self, lines: Sequence[str], prefixes: Sequence[str] | None = None) -> list[str]:
        """The best translation of each line, in order. prefixes: how each translation must begin ("" for anyhow)."""
        return [translations[0].text for translations in self.translate_nbest(lines, prefixes)]

    def translate_nbest(
        self, lines: Sequence[str], prefixes: Sequence[str] | None = None, first_line: int = 1
    ) -> list[list[Translation]]:
        """The config.nbest best translations of each line, best first; an empty line has one, which is empty.

        first_line: number of lines[0] in the whole input, which sampling and the count of cut lines go by.
        """
        if prefixes is not None and len(prefixes) != len(lines):
            raise ValueError(f"{len(prefixes)} prefixes for {len(lines)} lines: give one for each, '' for none")
        sources = self._encode(lines, first_line)
        hypotheses = search_ids(
            self.model,
            list(sources.values()),
            self.config,
            prefixes=None if prefixes is None else [self.target_tokenizer.encode(prefixes[row]) for row in sources],
            numbers=[first_line - 1 + row for row in sources],
        )
        results = [[Translation("", 0.0, 0.0)] for _ in lines]
        for row, found in zip(sources, hypotheses):
            results[row] = [
                Translation(one_line(self.target_tokenizer.decode(each.tokens)), each.score, each.log_probability)
                for each in found
            ]
        return results

    def translate_stream(
        self, lines: Iterable[str], prefixes: Iterable[str] | None = None
    ) -> Iterator[list[Translation]]:
        """Translations line by line, as translate_nbest; reads config.buffer_size lines ahead and holds no more."""
        lines = iter(lines)
        beginnings = None if prefixes is None else iter(prefixes)
        first_line = 1
        while buffer := list(itertools.islice(lines, self.config.buffer_size)):
            begin = None if beginnings is None else list(itertools.islice(beginnings, len(buffer)))
            if begin is not None and len(begin) < len(buffer):
                raise UserError(f"there are only {first_line - 1 + len(begin):,} prefixes, {_PREFIX_RULE}")
            yield from self.translate_nbest(buffer, begin, first_line)
            first_line += len(buffer)
        if beginnings is not None and next(beginnings, None) is not None:
            raise UserError(f"there are more prefixes than the {first_line - 1:,} lines of the input, {_PREFIX_RULE}")

    def score(self, sources: Sequence[str], targets: Sequence[str]) -> list[float]:
        """The natural logarithm of the probability of each target, end-of-sentence included, given its source."""
        return score_ids(
            self.model,
            [[*self.source_tokenizer.encode(source), EOS] for source in sources],
            [self.target_tokenizer.encode(target) for target in targets],
            max_tokens=self.config.batch_tokens,
        )

    def _encode(self, lines: Sequence[str], first_line: int) -> dict[int, list[int]]:
        """Ids with end-of-sentence of the lines that have any text, by their place in lines."""
        longest = self.config.max_source_length
        sources = {}
        for row, line in enumerate(lines):
            ids = self.source_tokenizer.encode(line) if line.strip() else []
            if len(ids) > longest:
                self.cut_lines += 1
                self.first_cut_line = self.first_cut_line or first_line + row
                ids = ids[:longest]
            if ids:
                sources[row] = [*ids, EOS]
        return sources


def one_line(text: str) -> str:
    """text with each character that some reader takes for the end of a line (U+2028, form feed, ...) as a space."""
    return " ".join(text.splitlines())


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device named, or a GPU where there is one and the CPU elsewhere. UserError for one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"device {device!r} is unknown: give cpu, cuda or cuda:1") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device!s} is not there ({torch.cuda.device_count()} GPUs are visible): give cpu")
    try:
        torch.zeros((), device=chosen).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"device {device!s} cannot be used here ({reason}): give cpu or cuda") from None
    return chosen
