"""From parallel text to the prepared directory: check, train SentencePiece, split, filter, write.

The text is read once: what is hashed is also what is used, though a file may change meanwhile, and it may be a pipe. A
copy beside the result is then streamed for vocabulary and ids, so that memory holds ids and never the whole text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttfm.data import prepared
from fasttfm.data.corpus import ParallelText, StoredText
from fasttfm.data.filters import RULES, Dropped, Filter, check_script, repeated_pairs, report
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

VOCABULARY_PAIRS = 1_000_000
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
    subset: int | None = None
    """Take only so many pairs of each training file, the first ones: a trial run."""
    max_ratio: float | None = None
    """Pairs with a side of more than this times the other's subwords are left out of training; None keeps them."""
    drop_duplicates: bool = False
    """Leave pairs that came before out of training."""
    drop_identical: bool = False
    """Leave pairs with the same text on both sides out of training."""
    source_script: str | None = None
    """Leave pairs whose source is mostly in another script (filters.SCRIPTS) out of training; None takes any."""
    target_script: str | None = None
    """Likewise for the target."""
    replace_invalid: bool = False
    """Read bytes that are not UTF-8 as U+FFFD; False refuses them."""

    def __post_init__(self) -> None:
        if self.vocab_size < 5:
            raise UserError(f"--vocab-size {self.vocab_size}: at least 5 are needed, four pieces are special")
        if self.vocab_size >= 1 << 31:
            raise UserError(f"--vocab-size {self.vocab_size}: less than {1 << 31:,} is allowed")
        if self.max_length < 1:
            raise UserError(f"--max-length {self.max_length}: at least 1 subword must be allowed")
        if self.subset is not None and self.subset < 1:
            raise UserError(f"--subset {self.subset}: at least 1 pair is needed")
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise UserError(f"--max-ratio {self.max_ratio}: at least 1 is needed, sides of equal length have 1")
        check_script("--src-script", self.source_script)
        check_script("--tgt-script", self.target_script)
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
            most = {"train": options.subset, "valid": None}
            stored = {name: StoredText(text, fresh.path, name, most[name]) for name, text in texts.items()}
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
    rules = Filter(options.max_length)
    valid = _write_split(directory, "valid", valid_text, tokenizers, rules, threads)
    report("valid", rules.dropped, options.max_length, say)
    rules = Filter(
        options.max_length,
        options.max_ratio,
        options.drop_identical,
        (options.source_script, options.target_script),
        repeated_pairs(train_text, len(train_text)) if options.drop_duplicates else None,
    )
    train = _write_split(directory, "train", train_text, tokenizers, rules, threads, valid.keys)
    report("train", rules.dropped, options.max_length, say)
    _warn_of_overlap(valid.keys, train.keys, say)
    prepared.save_description(
        directory,
        {
            "vocabulary": "separate" if options.separate_vocab else "joint",
            "source_vocab_size": len(source_tokenizer),
            "target_vocab_size": len(target_tokenizer),
            "train": train.counts,
            "valid": valid.counts,
            "files": [str(path) for path in files],
            "fingerprint": fingerprint,
        },
    )


@dataclass(slots=True)
class _Split:
    """What became of one split."""

    counts: dict[str, int]
    keys: set[bytes]
    """Of its pairs where they are held out; else the held-out keys that it met."""


def _write_split(
    directory: Path,
    name: str,
    text: StoredText,
    tokenizers: tuple[Tokenizer, Tokenizer],
    rules: Filter,
    threads: int,
    held_out: set[bytes] | None = None,
) -> _Split:
    """Write the ids of one split, and its text where it is held out, a chunk at a time: memory does not grow with it.

    held_out: keys of pairs that are looked for; None makes the split's own keys, and keeps its text.
    """
    dtypes = [prepared.id_dtype(len(tokenizer)) for tokenizer in tokenizers]
    writers = [prepared.SideWriter(directory, name, side, dtype) for side, dtype in zip(("src", "tgt"), dtypes)]
    keys: set[bytes] = set()
    pairs = iter(text)
    with ExitStack() as files:
        copies = [
            files.enter_context((directory / f"{name}.{side}.txt").open("wb"))
            for side in ("src", "tgt")
            if held_out is None
        ]
        while chunk := list(itertools.islice(pairs, _CHUNK)):
            source_ids = tokenizers[0].encode_lines([pair.source for pair in chunk], threads)
            target_ids = tokenizers[1].encode_lines([pair.target for pair in chunk], threads)
            for pair, source, target in zip(chunk, source_ids, target_ids, strict=True):
                if not rules.keeps(pair, source, target):
                    continue
                writers[0].write(source)
                writers[1].write(target)
                key = np.array([*source, -1, *target], np.int32).tobytes()
                if held_out is None or key in held_out:
                    keys.add(key)
                for copy, line in zip(copies, (pair.source, pair.target)):
                    copy.write(line.encode() + b"\n")
    for writer in writers:
        writer.close()
    if not writers[0].sentences:
        raise UserError(f"{text.parts[0][0]}: no usable pair is left for {name}: all were left out")
    counts = {"pairs": writers[0].sentences, "source_tokens": writers[0].tokens, "target_tokens": writers[1].tokens}
    counts |= {f"dropped_{rule.replace(' ', '_')}": rules.dropped.get(rule, Dropped()).count for rule in RULES}
    return _Split(counts, keys)


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


def _warn_of_overlap(held_out: set[bytes], seen: set[bytes], say: Callable[[str], None]) -> None:
    if seen:
        say(
            f"warning: valid: {len(seen):,} of {counted(len(held_out), 'different pair')} "
            f"{'is' if len(held_out) == 1 else 'are'} in train too; its scores flatter"
        )
