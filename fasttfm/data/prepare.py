"""From parallel text to the prepared directory: check, train SentencePiece, split, filter, write.

The text is read once: what is hashed is also what is used, though a file may change meanwhile, and it may be a pipe. A
copy beside the result is then streamed for vocabulary and ids, so that memory holds ids and never the whole text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttfm.data import prepared
from fasttfm.data.corpus import Pair, ParallelText, StoredText
from fasttfm.data.tokenizer import (
    MODEL_TYPES,
    NORMALIZATIONS,
    ModelType,
    Tokenizer,
    coverage_for,
    train_tokenizer,
)
from fasttfm.errors import UserError
from fasttfm.folders import replacing
from fasttfm.wording import counted

VOCABULARY_PAIRS = 2_000_000
"""The vocabulary is trained on at most this many pairs, taken evenly from the whole corpus."""
_CHUNK = 20_000  # pairs split at a time
_MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """What decides the content of a prepared directory, besides the text."""

    vocab_size: int = 8000
    """Pieces, special ones included; of each side when separate."""
    separate_vocab: bool = False
    """One vocabulary for each side in place of a joint one."""
    model_type: ModelType = "bpe"
    """SentencePiece's algorithm, bpe or unigram."""
    character_coverage: float | None = None
    """Share of character occurrences with a piece of their own; None chooses by the size of the script."""
    byte_fallback: bool = True
    """Write other characters as bytes."""
    normalization: str = "identity"
    """SentencePiece's normalisation rule."""
    max_length: int = 256
    """Pairs with more subwords on a side are left out."""
    replace_invalid: bool = False
    """Read bytes that are not UTF-8 as U+FFFD; False refuses them."""

    def __post_init__(self) -> None:
        if self.vocab_size < 5:
            raise UserError(f"--vocab-size {self.vocab_size}: at least 5 are needed, four pieces are special")
        if self.vocab_size >= 1 << 31:
            raise UserError(f"--vocab-size {self.vocab_size}: less than {1 << 31:,} is allowed")
        if self.max_length < 1:
            raise UserError(f"--max-length {self.max_length}: at least 1 subword must be allowed")
        if self.character_coverage is not None and not 0.98 <= self.character_coverage <= 1.0:
            raise UserError(f"--character-coverage {self.character_coverage}: between 0.98 and 1.0 is allowed")
        if self.model_type not in MODEL_TYPES:
            raise UserError(f"--model-type {self.model_type}: one of {', '.join(MODEL_TYPES)} is allowed")
        if self.normalization not in NORMALIZATIONS:
            raise UserError(f"--normalization {self.normalization}: one of {', '.join(NORMALIZATIONS)} is allowed")


def prepare(
    sources: Sequence[Path],
    targets: Sequence[Path],
    valid_sources: Sequence[Path],
    valid_targets: Sequence[Path],
    out: Path,
    options: PrepareOptions,
    *,
    threads: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Write the prepared directory `out`; `say` gets progress and warnings, a line each.

    Does nothing when `out` already holds just this. Raises UserError for text or options that cannot be used, and for
    an `out` that holds anything else; `out` then stays as it was.
    """
    if not 1 <= threads <= _MOST_THREADS:
        raise UserError(f"--threads {threads}: between 1 and {_MOST_THREADS:,} is allowed")
    files = [*sources, *targets, *valid_sources, *valid_targets]
    for path in files:
        if path.resolve().parent == out.resolve():
            raise UserError(f"{path}: stands in the directory that --out replaces: choose another --out")
    invalid = (options.replace_invalid, "correct it, or give --replace-invalid to read such bytes as U+FFFD")
    texts = {
        "train": ParallelText(sources, targets, *invalid),
        "valid": ParallelText(valid_sources, valid_targets, *invalid),
    }
    try:
        with replacing(out, "preparing data into it") as fresh:
            stored = {name: StoredText(text, fresh.path, name) for name, text in texts.items()}
            say(", ".join(counted(len(stored[name]), f"{noun} pair") for name, noun in _NOUNS.items()))
            for name in texts:
                _warn_of_text(name, texts[name], stored[name], say)
            fingerprint = {"options": asdict(options)} | {f"{name}_sha256": stored[name].sha256 for name in texts}
            if prepared.is_prepared(out, fingerprint):
                fresh.wanted = False
                say(f"{out} already holds this data, nothing to do")
                return
            _fill(fresh.path, stored["train"], stored["valid"], options, threads, say, files, fingerprint)
            for text in stored.values():
                text.delete()
    except BrokenPipeError:
        raise  # of what `say` writes to, not of a file here
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(
            f"{error.filename or out}: {error.strerror}: {out} was not written and is as it was before"
        ) from None
    say(f"{out} is ready: fasttfm train --data {out} …")


_NOUNS = {"train": "training", "valid": "validation"}


def _warn_of_text(name: str, text: ParallelText, stored: StoredText, say: Callable[[str], None]) -> None:
    half = len(stored.sha256) // 2
    if stored.sha256[:half] == stored.sha256[half:]:
        source, target = text.files[0]
        say(f"warning: {name}: source and target are the same text ({source.path} and {target.path})")
    for file in itertools.chain.from_iterable(text.files):
        if file.replaced:
            say(
                f"warning: {file.path}: {counted(len(file.replaced), 'line')} held bytes that are not UTF-8, read as "
                f"U+FFFD; the first is line {file.replaced[0]:,}"
            )


def _fill(
    directory: Path,
    train_text: StoredText,
    valid_text: StoredText,
    options: PrepareOptions,
    threads: int,
    say: Callable[[str], None],
    files: Sequence[Path],
    fingerprint: dict[str, Any],
) -> None:
    """Write everything but the manifest into an empty directory."""
    tokenizers = _train_vocabulary(train_text, options)
    source_tokenizer, target_tokenizer = tokenizers
    if options.separate_vocab:
        source_tokenizer.save(directory / "spm.src.model")
        target_tokenizer.save(directory / "spm.tgt.model")
    else:
        source_tokenizer.save(directory / "spm.model")
    kind = "separate vocabularies" if options.separate_vocab else "joint vocabulary"
    say(f"{kind} of {len(source_tokenizer):,} {options.model_type} pieces")
    train = _split(train_text, "train", tokenizers, options, threads, say, keep_text=False)
    valid = _split(valid_text, "valid", tokenizers, options, threads, say, keep_text=True)
    _warn_of_overlap(train, valid, say)
    _write(directory, "train", train, tokenizers)
    _write(directory, "valid", valid, tokenizers)
    prepared.save_description(
        directory,
        {
            "vocabulary": "separate" if options.separate_vocab else "joint",
            "source_vocab_size": len(source_tokenizer),
            "target_vocab_size": len(target_tokenizer),
            "train": train.counts(),
            "valid": valid.counts(),
            "files": [str(path) for path in files],
            "fingerprint": fingerprint,
        },
    )


class _Split:
    """The pairs that a split keeps, and what it left out."""

    def __init__(self) -> None:
        self.source: list[np.ndarray] = []
        self.target: list[np.ndarray] = []
        self.source_text: list[str] = []
        self.target_text: list[str] = []
        self.dropped: dict[str, list[str]] = {"empty": [], "too long": []}

    def counts(self) -> dict[str, Any]:
        return {
            "pairs": len(self.source),
            "source_tokens": sum(map(len, self.source)),
            "target_tokens": sum(map(len, self.target)),
            "dropped_empty": len(self.dropped["empty"]),
            "dropped_too_long": len(self.dropped["too long"]),
        }


def _train_vocabulary(text: StoredText, options: PrepareOptions) -> tuple[Tokenizer, Tokenizer]:
    step = -(-len(text) // VOCABULARY_PAIRS)

    def lines(side: int) -> Iterator[str]:
        for pair in itertools.islice(text, 0, None, step):
            line = pair.target if side else pair.source
            if line.strip():
                yield line

    def train(sides: Sequence[int]) -> Tokenizer:
        characters: Counter[str] = Counter()
        for line in itertools.chain.from_iterable(map(lines, sides)):
            characters.update(line)
        if not characters:
            raise UserError(f"{text.parts[0][0]}: all lines are empty, there is nothing to train a vocabulary on")
        coverage = options.character_coverage
        return train_tokenizer(
            itertools.chain.from_iterable(map(lines, sides)),
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            byte_fallback=options.byte_fallback,
            normalization=options.normalization,
            character_coverage=coverage_for(len(characters), options.vocab_size) if coverage is None else coverage,
        )

    if options.separate_vocab:
        return train((0,)), train((1,))
    joint = train((0, 1))
    return joint, joint


def _split(
    text: StoredText,
    name: str,
    tokenizers: tuple[Tokenizer, Tokenizer],
    options: PrepareOptions,
    threads: int,
    say: Callable[[str], None],
    keep_text: bool,
) -> _Split:
    split = _Split()
    dtypes = [prepared.id_dtype(len(tokenizer)) for tokenizer in tokenizers]
    pairs = iter(text)
    while chunk := list(itertools.islice(pairs, _CHUNK)):
        source_ids = tokenizers[0].encode_lines([pair.source for pair in chunk], threads)
        target_ids = tokenizers[1].encode_lines([pair.target for pair in chunk], threads)
        for pair, source, target in zip(chunk, source_ids, target_ids, strict=True):
            reason = _unusable(pair, source, target, options.max_length)
            if reason:
                split.dropped[reason].append(f"{pair.file}:{pair.line}")
                continue
            split.source.append(np.array(source, dtype=dtypes[0]))
            split.target.append(np.array(target, dtype=dtypes[1]))
            if keep_text:
                split.source_text.append(pair.source)
                split.target_text.append(pair.target)
    for reason, places in split.dropped.items():
        if places:
            limit = f" (more than {options.max_length} subwords, see --max-length)" if reason == "too long" else ""
            noun = "pair has a side that is" if len(places) == 1 else "pairs have a side that is"
            say(f"warning: {name}: {len(places):,} {noun} {reason}{limit}, left out; the first is {places[0]}")
    if not split.source:
        raise UserError(f"{text.parts[0][0]}: no usable pair is left for {name}, all are empty or too long")
    return split


def _unusable(pair: Pair, source: list[int], target: list[int], max_length: int) -> str | None:
    if not source or not target or not pair.source.strip() or not pair.target.strip():
        return "empty"
    if max(len(source), len(target)) > max_length:
        return "too long"
    return None


def _warn_of_overlap(train: _Split, valid: _Split, say: Callable[[str], None]) -> None:
    held_out = {source.tobytes() + b"|" + target.tobytes() for source, target in zip(valid.source, valid.target)}
    seen = {
        key
        for source, target in zip(train.source, train.target)
        if (key := source.tobytes() + b"|" + target.tobytes()) in held_out
    }
    if seen:
        say(
            f"warning: valid: {len(seen):,} of {counted(len(held_out), 'different pair')} "
            f"{'is' if len(held_out) == 1 else 'are'} in train too; its scores flatter"
        )


def _write(directory: Path, name: str, split: _Split, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    prepared.save_side(directory, name, "src", split.source, prepared.id_dtype(len(tokenizers[0])))
    prepared.save_side(directory, name, "tgt", split.target, prepared.id_dtype(len(tokenizers[1])))
    if split.source_text:
        prepared.save_text(directory / f"{name}.src.txt", split.source_text)
        prepared.save_text(directory / f"{name}.tgt.txt", split.target_text)
