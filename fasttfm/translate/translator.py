"""Translator: a trained model with its tokenizers and decoding options, from text to text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fasttfm.config import Values, build
from fasttfm.config.decoding import DecodingConfig
from fasttfm.cpu.int8 import warn_without_route
from fasttfm.data.corpus import read_lines
from fasttfm.data.tokenizer import EOS, PAD, Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizers
from fasttfm.data.unicode_forms import composed, has_text, is_composed
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.models.pretrained import read_values
from fasttfm.search.batches import multiply_in_int8
from fasttfm.search.coverage import check_layer, cross_attention
from fasttfm.search.decoder import positions_of
from fasttfm.search.ensemble import Ensemble
from fasttfm.search.hypotheses import Hypothesis
from fasttfm.search.phrases import Phrases
from fasttfm.search.scoring import score_ids
from fasttfm.search.search import search_ids, search_workers
from fasttfm.search.streaming import stream_ids, stream_text
from fasttfm.store.checkpoint import is_quantized
from fasttfm.store.model_dir import DATA_FILE
from fasttfm.store.vocabulary import read_checkpoint
from fasttfm.store.weights import with_weights
from fasttfm.system.files import read_plain_yaml
from fasttfm.system.folders import VOCABULARY_FILES, reading, unpacked
from fasttfm.system.machine import pick_device
from fasttfm.system.parsing import shown
from fasttfm.system.wording import Tally
from fasttfm.translate.alignment import Links, word_links
from fasttfm.translate.combinations import refuse_config, refuse_idle
from fasttfm.translate.mbr import minimum_bayes_risk
from fasttfm.translate.shortlist import Shortlist
from fasttfm.translate.terminology import Terminology, continuations_of

Precision = Literal["fp32", "bf16", "fp16", "int8"]
_DTYPES = {"fp32": torch.float32, "int8": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORKERS_WORK = 5e11
"""Source tokens times parameters times beam from which worker processes are started: one core of an Intel Xeon with AMX
takes 5 s for that much; starting them takes half as long."""
_PREFIX_RULE = "one line is needed for each input line: an empty one where the translation may begin with any word"


@dataclass(frozen=True, slots=True)
class Translation:
    """A translation of a line."""

    text: str
    """Text without line breaks of any kind."""
    score: float
    """Log-probability divided by the length penalty; with mbr_samples the mean chrF against all samples, 0 to 100.
    0 for an empty line."""
    log_probability: float
    """Natural log of the model's probability of the output tokens; 0 for an empty line."""
    alignment: Links = ()
    """Pairs (source word, target word), counted from 0, if the Translator was created with aligned."""


class Translator:
    """Translates lines of text, independently of each other.

    On a CPU a line gets the same translation and scores, bit for bit and in every precision, whatever batch_tokens,
    buffer_size and the other lines are. On a GPU, and with batch_invariant off, the last bits of a product depend on
    the batch size and may decide between two words that are nearly equally likely.

    A blank line has the empty translation. A line longer than config.max_source_length tokens is truncated. Counters
    with the first line concerned: `cut` truncated lines, `long` lines over twice the longest training line (parts of
    them may be missing), `empty` lines whose translation is empty, `decomposed` lines that are not in Unicode NFC and
    that the vocabulary does not normalize.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        workers: int = 1,
        least_work: float = 0,
        banned: Sequence[str] = (),
        aligned: bool = False,
        terminology: Terminology | None = None,
        shortlist: Shortlist | None = None,
        trained_length: int | None = None,
    ) -> None:
        """The model is used in place, with its device and dtype.

        config: None for the defaults. workers: processes that search batches in parallel on a CPU; close() ends them.
        least_work: source tokens times parameters times beam of a buffer from which they are started. banned: words or
        phrases that no translation contains as the tokenizer spells them, nor longer words that begin with these
        tokens. aligned: add alignments to translations. terminology: required translations of source terms; raises
        UserError with anything but beam search. shortlist: allowed target tokens by source; scores are renormalized
        over them. trained_length: source tokens of the longest training line; None: unknown.
        """
        self.model: Any = model
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.config = config or DecodingConfig()
        if (most := positions_of(model)) is not None and self.config.max_source_length >= most > 1:
            self.config = replace(self.config, max_source_length=most - 1)  # and end-of-sentence
        self.workers = search_workers(model, workers, least_work=least_work)
        self.banned = [ids for ids in map(target_tokenizer.encode, banned) if ids]
        self.aligned = aligned
        self.terminology = terminology
        self.shortlist = shortlist
        if terminology is not None:
            refuse_config({"terminology"}, self.config)
            terminology.refuse_banned(self.banned)
        check_layer(model, self.config.alignment_layer)
        self.trained_length = trained_length
        self.cut, self.long, self.empty, self.decomposed = Tally(), Tally(), Tally(), Tally()

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        checkpoint: str = "best",
        device: str | torch.device | None = None,
        precision: Precision | None = None,
        workers: int | None = None,
        banned: Sequence[str] = (),
        ensemble: Sequence[str | Path] = (),
        aligned: bool = False,
        terminology: str | Path | None = None,
        shortlist: str | Path | None = None,
        **decoding: Any,
    ) -> Translator:
        """Load a translator from a model directory of `fasttfm train`, or from a .zip of its files.

        checkpoint: best, last, average, an update number, or a path. device: None for a GPU if there is one. precision:
        dtype of weights and products, int8 for products only; None: int8 for a model of `fasttfm quantize`, otherwise
        fp32. workers: processes that search batches in parallel on a CPU; None: as many as PyTorch has threads, if
        there is enough work. banned, aligned: see Translator. ensemble: other model directories with the same
        tokenizers, whose probabilities are averaged; their best checkpoints if `checkpoint` is a path. terminology:
        file for Terminology.from_lines(). shortlist: file for Shortlist.load(). decoding: fields of DecodingConfig that
        override the model's config.yaml.
        Raises UserError for files that are missing, damaged or of another model.
        """
        chosen = pick_device(device)
        with ExitStack() as stack:
            path, *members = [stack.enter_context(unpacked(Path(each))) for each in (path, *ensemble)]
            for folder in (path, *members):
                stack.enter_context(reading(folder))
            values = read_values(path, decoding)
            source_tokenizer, target_tokenizer = _tokenizers(path, values)
            sizes = {"vocab_size": len(target_tokenizer), "pad_id": PAD}
            if source_tokenizer is not target_tokenizer:
                sizes["source_vocab_size"] = len(source_tokenizer)
            config = build(values, sizes)
            refuse_idle(decoding, config.decoding, is_aligned=aligned)
            others = [(Path(each), build(read_values(each, {}), sizes).model) for each in members]
            models: list[Any] = []
            is_name = checkpoint in ("best", "last", "average") or checkpoint.isdecimal()
            for folder, shape in ((path, config.model), *others):
                _check_same_tokenizers(path, folder)
                weights, saved = read_checkpoint(folder, checkpoint if is_name or not models else "best")
                model = with_weights(partial(Transformer, shape), weights, saved)
                precision_of_model = precision or ("int8" if is_quantized(saved) else "fp32")
                if precision == "int8" and chosen.type != "cpu":
                    raise UserError(f"--precision int8 is for a CPU, the device is {chosen}: give bf16 or fp16")
                if precision_of_model == "int8":
                    multiply_in_int8(model)
                    warn_without_route()
                models.append(model.to(device=chosen, dtype=_DTYPES[precision_of_model]).eval())
            trained_length = _trained_length(path, values)
        return cls(
            models[0] if len(models) == 1 else Ensemble(models),
            source_tokenizer,
            target_tokenizer,
            config.decoding,
            workers=workers or torch.get_num_threads(),
            least_work=0 if workers else WORKERS_WORK,
            banned=banned,
            aligned=aligned,
            terminology=None
            if terminology is None
            else Terminology.from_lines(read_lines(Path(terminology)), terminology, target_tokenizer),
            shortlist=None
            if shortlist is None
            else Shortlist.load(Path(shortlist), source_tokenizer, target_tokenizer),
            trained_length=trained_length,
        )

    def __enter__(self) -> Translator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes; the next call restarts them."""
        if self.workers is not None:
            self.workers.close()

    def translate(self, lines: Sequence[str], prefixes: Sequence[str] | None = None) -> list[str]:
        """Best translation of each line, in order. prefixes: required beginnings; "" for none."""
        return [translations[0].text for translations in self.translate_nbest(lines, prefixes)]

    def translate_nbest(
        self,
        lines: Sequence[str],
        prefixes: Sequence[str] | None = None,
        numbers: Sequence[int] | None = None,
        required: Sequence[Sequence[Phrases]] | None = None,
    ) -> list[list[Translation]]:
        """The config.nbest best translations of each line, best first; an empty line has one empty translation.

        Duplicate texts are removed, except among samples, so a line may have fewer. numbers: of each line in the whole
        input, from 0, for sampling seeds and counters; None: `lines` are all of it. required: phrases that each
        translation must contain; None: those of the terminology.
        """
        if prefixes is not None and len(prefixes) != len(lines):
            raise ValueError(f"{len(prefixes)} prefixes for {len(lines)} lines: give one for each, '' for none")
        numbers = range(len(lines)) if numbers is None else numbers
        sources = self.encode_lines(lines, numbers)
        if required is None and self.terminology is not None:
            required = [self.terminology.required(line) for line in lines]
        samples = self.config.mbr_samples
        hypotheses = search_ids(
            self.model,
            list(sources.values()),
            replace(self.config, sampling=True, nbest=samples) if samples else self.config,
            prefixes=[self.beginning(prefixes[row] if prefixes else "") for row in sources],
            numbers=[numbers[row] for row in sources],
            banned=self.banned,
            required=None if required is None else [required[row] for row in sources],
            continuations=frozenset() if required is None else continuations_of(self.target_tokenizer),
            allowed=None if self.shortlist is None else [self.shortlist.tokens(ids) for ids in sources.values()],
            workers=self.workers,
        )
        results = [[Translation("", 0.0, 0.0)] for _ in lines]
        written = {}  # row -> tokens of its translations
        for row, best in zip(sources, hypotheses):
            results[row], written[row] = self.translations(best, distinct=not (samples or self.config.sampling))
            if samples:
                chosen = minimum_bayes_risk([each.text for each in results[row]])[: self.config.nbest]
                results[row] = [replace(results[row][index], score=agreement) for index, agreement in chosen]
                written[row] = [written[row][index] for index, _ in chosen]
            if not results[row][0].text:
                self.empty.add(numbers[row] + 1)
        if self.aligned:
            self.align(lines, sources, written, results)
        return results

    def translations(
        self, hypotheses: Sequence[Hypothesis], *, distinct: bool
    ) -> tuple[list[Translation], list[list[int]]]:
        """Texts and tokens of a search's hypotheses. distinct: keep only the first of equal texts."""
        texts = [one_line(self.target_tokenizer.decode(each.tokens)) for each in hypotheses]
        texts = [text if has_text(text) else "" for text in texts]
        kept = [
            (text, each)
            for n, (text, each) in enumerate(zip(texts, hypotheses))
            if not (distinct and text in texts[:n])
        ]
        translations = [Translation(text, each.score, each.log_probability) for text, each in kept]
        return translations, [each.tokens for _, each in kept]

    def align(
        self, lines: Sequence[str], sources: Mapping[int, Sequence[int]], written: Mapping[int, list[list[int]]],
        results: Sequence[list[Translation]],
    ) -> None:  # fmt: skip
        """Add alignments to the translations of lines, in place.

        sources, written: index of a line -> its ids with end-of-sentence, and the tokens of each of its results.
        """
        pairs = [(row, index, tokens) for row, outputs in written.items() for index, tokens in enumerate(outputs)]
        attention = cross_attention(
            self.model, [sources[row] for row, _, _ in pairs], [tokens for _, _, tokens in pairs], self.config
        )
        for (row, index, tokens), weights in zip(pairs, attention):
            source_spans, target_spans = (
                self.source_tokenizer.spans(lines[row]),
                self.target_tokenizer.decoded_spans(tokens),
            )
            links = word_links(weights[:, :-1], lines[row], source_spans, results[row][index].text, target_spans)
            results[row][index] = replace(results[row][index], alignment=links)

    def translate_stream(
        self, lines: Iterable[str], prefixes: Iterable[str] | None = None
    ) -> Iterator[list[Translation]]:
        """Yield translate_nbest() line by line; reads config.buffer_size lines ahead.

        If reading fails, the lines before the error are translated first.
        """
        first = 0
        for buffer in _buffers(_paired(lines, prefixes), self.config.buffer_size):
            some, beginnings = zip(*buffer)
            yield from self.translate_nbest(some, beginnings, range(first, first + len(buffer)))
            first += len(buffer)

    def stream(self, line: str, prefix: str = "", *, number: int = 1) -> Iterator[str]:
        """Yield the translation of one line in pieces while the search runs; joined, they equal translate().

        Needs greedy search (beam 1) or sampling with nbest 1. Raises ValueError for a config with several hypotheses
        and for terminology. number: of the line in the input, for the sampling seed.
        """
        if self.terminology is not None:
            raise ValueError("a translation with terminology cannot be streamed: its search keeps several hypotheses")
        begun = self.beginning(prefix)
        sources = self.encode_lines([line], [number - 1])
        source = sources.get(0, [EOS])
        allowed = None if self.shortlist is None else self.shortlist.tokens(source)
        ids = stream_ids(
            self.model, source, self.config, prefix=begun, number=number - 1, banned=self.banned, allowed=allowed
        )
        return stream_text(ids if sources else (), self.target_tokenizer)

    def score(self, sources: Sequence[str], targets: Sequence[str]) -> list[float]:
        """Natural log of the probability of each target, end-of-sentence included, given its source."""
        return score_ids(
            self.model,
            [self._source(source) or [EOS] for source in sources],
            [[*self.target_tokenizer.prefix, *self.target_tokenizer.encode(target)] for target in targets],
            max_tokens=self.config.batch_tokens,
        )

    def beginning(self, prefix: str) -> list[int]:
        """Ids that an output starts with: the tokenizer's prefix and the caller's ("": none). Raises UserError if the
        latter is longer than a source may be."""
        ids = self.target_tokenizer.encode(prefix)
        if len(ids) > (most := self.config.max_source_length):
            raise UserError(f"the prefix {shown(prefix)} has {len(ids):,} tokens: {most:,} at most are taken")
        return [*self.target_tokenizer.prefix, *ids]

    def encode_lines(self, lines: Sequence[str], numbers: Sequence[int]) -> dict[int, list[int]]:
        """Model inputs by line index, for the lines with any text; long ones are truncated. Updates the counters.

        numbers: of each line in the whole input, from 0.
        """
        longest = self.config.max_source_length
        sources = {}
        for row, (line, number) in enumerate(zip(lines, numbers, strict=True)):
            ids = [*self.source_tokenizer.prefix, *self.source_tokenizer.encode(line)] if has_text(line) else []
            if not is_composed(line) and self.source_tokenizer.encode(line) != self.source_tokenizer.encode(
                composed(line)
            ):
                self.decomposed.add(number + 1)
            if self.trained_length is not None and len(ids) > 2 * self.trained_length:
                self.long.add(number + 1)
            if len(ids) > longest:
                self.cut.add(number + 1)
                ids = ids[:longest]
            if ids:
                sources[row] = [*ids, *self.source_tokenizer.source_end]
        return sources

    def _source(self, line: str) -> list[int]:
        """Ids of a line without truncation."""
        tokenizer = self.source_tokenizer
        return [*tokenizer.prefix, *tokenizer.encode(line), *tokenizer.source_end]


def one_line(text: str) -> str:
    """text with every kind of line break (U+2028, form feed, ...) replaced by a space."""
    return " ".join(text.splitlines())


def _paired(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    """Yield lines with their prefixes ("" without any). Raises UserError if one of the two ends before the other."""
    if prefixes is None:
        yield from ((line, "") for line in lines)
        return
    for number, (line, prefix) in enumerate(itertools.zip_longest(lines, prefixes), start=1):
        if prefix is None:
            raise UserError(
                f"there are fewer prefixes than lines of the input (line {number:,} has none), {_PREFIX_RULE}"
            )
        if line is None:
            raise UserError(f"there are more prefixes than lines of the input ({number - 1:,}), {_PREFIX_RULE}")
        yield line, prefix


def _buffers(pairs: Iterator[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    """Yield lists of `size` pairs; a read error is raised after the pairs read before it."""
    buffer: list[tuple[str, str]] = []
    try:
        for pair in pairs:
            buffer.append(pair)
            if len(buffer) == size:
                yield buffer
                buffer = []
    except (UserError, OSError):
        if buffer:
            yield buffer
        raise
    if buffer:
        yield buffer


def _check_same_tokenizers(path: Path, other: Path) -> None:
    """Raise UserError if two model directories differ in their tokenizer files."""
    for name in VOCABULARY_FILES:
        ours, theirs = (folder / name for folder in (path, other))
        if ours.exists() != theirs.exists() or (ours.exists() and ours.read_bytes() != theirs.read_bytes()):
            raise UserError(
                f"{other}: its {name} is not that of {path}: an ensemble needs models of one tokenizer: prepare the "
                "text of one with the other's"
            )


def _trained_length(path: Path, values: Values) -> int | None:
    """Source tokens of the longest line in a model's training data, if its data.yaml says."""
    if not (path / DATA_FILE).is_file():
        return None
    train = read_plain_yaml(path / DATA_FILE).get("train")
    longest = train.get("longest_source") if isinstance(train, dict) else None
    return min(longest, values["data"].get("max_sentence_tokens", longest)) if isinstance(longest, int) else None


def _tokenizers(path: Path, values: Values) -> tuple[Tokenizer, Tokenizer]:
    """Source and target tokenizer of a model directory (one object if shared). values: of its config.yaml.

    Raises UserError if their sizes differ from config.yaml's.
    """
    sizes = values["model"]
    if "vocab_size" not in sizes:
        raise UserError(f"{path / 'config.yaml'}: is truncated: it has no model.vocab_size; copy it back")
    return load_tokenizers(path, sizes=(sizes.get("source_vocab_size") or sizes["vocab_size"], sizes["vocab_size"]))
