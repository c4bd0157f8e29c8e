"""Prepares parallel text for training: checks it, trains SentencePiece, segments, filters, writes ids.

Input is read once, so it may be a pipe, and the hashed text is the text used even if a file changes meanwhile. A copy
beside the output is then streamed for the vocabulary and the ids; the whole text is never in memory.
"""

import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fasttfm.config.checks import Count, Range, check_flags
from fasttfm.data import prepared
from fasttfm.data.corpus import FilePair, StoredText, file_pairs
from fasttfm.data.filters import RULES, Filter, check_script, repeated_pairs
from fasttfm.data.tokenizer import ModelType, Normalization, Tokenizer, coverage_for, train_tokenizer
from fasttfm.data.tokenizer_files import load_tokenizers, save_tokenizers
from fasttfm.errors import UserError
from fasttfm.system.folders import replacing
from fasttfm.system.parsing import characters
from fasttfm.system.wording import counted, plain_text

Progress = Callable[[int, int], None]
"""Callback: number done, total."""
_CHUNK = 20_000  # pairs segmented at a time
_LARGEST_WEIGHT = 1000
_SPECIAL = re.compile(r"<(pad|unk|s|/s|0x[0-9A-Fa-f]{2})>|\u2581+")
"""Reserved pieces: the four special ones, bytes, and the space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options of prepare(); with the text they determine the content of the prepared directory."""

    vocab_size: Annotated[int, Range(5, (1 << 31) - 1)] = 8000
    """Size of the vocabulary, special tokens included; per side with separate_vocab."""
    separate_vocab: bool = False
    """Train a vocabulary per side instead of a joint one."""
    model_type: ModelType = "bpe"
    """SentencePiece's algorithm."""
    character_coverage: Annotated[float, Range(0.98, 1)] | None = None
    """Share of character occurrences that the vocabulary covers, from 0.98 to 1. None: 1.0, or 0.9995 for scripts with
    many characters."""
    byte_fallback: bool = True
    """Encode rare characters as bytes, so that none is unknown; takes 256 tokens of the vocabulary."""
    normalization: Normalization = "identity"
    """SentencePiece's normalization rule. identity changes nothing, as scores against raw references require; nfc
    composes letters with their accents, which text from macOS separates."""
    max_length: Count = 256
    """Skip pairs with more subwords than this on either side."""
    vocab_pairs: Count = 200_000
    """Train the vocabulary on at most this many pairs, spread evenly over the corpus. They are held in memory: about
    1 kB for a pair of 25 words per side."""
    subset: Count | None = None
    """Use only the first N pairs of each training file, for a trial run."""
    max_ratio: Annotated[float, Range(1)] | None = None
    """Skip training pairs where one side has more than X times the subwords of the other."""
    drop_duplicates: bool = False
    """Skip repeated training pairs."""
    drop_identical: bool = False
    """Skip training pairs with the same text on both sides."""
    source_script: str | None = None
    """Skip training pairs whose source is mostly in another script (filters.SCRIPTS); None accepts any."""
    target_script: str | None = None
    """The same for the target."""
    weights: tuple[float, ...] = ()
    """Copies of the pairs of each training file in an epoch: 2 is twice, 0.5 every second pair; empty: once."""
    source_tags: tuple[str, ...] = ()
    """Subword before each source line, per training file (such as the target language), or empty."""
    valid_source_tags: tuple[str, ...] = ()
    """The same for the validation files."""
    replace_invalid: bool = False
    """Read invalid UTF-8 as U+FFFD and count such lines; otherwise it is an error."""

    def __post_init__(self) -> None:
        check_flags(self)
        if any(not 0 < weight <= _LARGEST_WEIGHT for weight in self.weights):
            raise UserError(f"--weight: must be above 0 and at most {_LARGEST_WEIGHT}")
        for tag in (*self.source_tags, *self.valid_source_tags):
            if not tag or any(character.isspace() for character in tag):
                raise UserError(f"--source-tag {tag!r}: give one word such as <2de>")
            if _SPECIAL.fullmatch(characters(tag)):
                raise UserError(f"--source-tag {tag!r}: is a reserved piece: give another word such as <2de>")
        check_script("--src-script", self.source_script)
        check_script("--tgt-script", self.target_script)


def prepare(
    sources: Sequence[Path],
    targets: Sequence[Path],
    valid_sources: Sequence[Path],
    valid_targets: Sequence[Path],
    out: Path,
    options: PrepareOptions,
    *,
    models: Sequence[Path] = (),
    threads: int = 1,
    say: Callable[[str], None] = print,
    progress: Callable[[str], Progress] = lambda noun: lambda done, total: None,
) -> None:
    """Write the prepared directory `out`, unless it already contains exactly this data.

    models: existing SentencePiece models, one for both sides or source and target, or a model or data directory; empty
    to train them. say: called with a line per step and per warning. progress(what) returns the Progress callback of a
    split. Raises UserError for invalid text or options, and if `out` contains anything else; `out` is then unchanged.
    """
    _check_numbers(options, len(sources), len(valid_sources), len(models))
    files = [*sources, *targets, *valid_sources, *valid_targets]
    for path in files:
        if os.path.dirname(os.path.realpath(path)) == os.path.realpath(out):
            raise UserError(f"{path}: is in the directory that --out replaces: choose another --out")
    invalid = (options.replace_invalid, "correct it, or use --replace-invalid to read such bytes as U+FFFD")
    texts = {
        "train": file_pairs(sources, targets, *invalid),
        "valid": file_pairs(valid_sources, valid_targets, *invalid),
    }
    with replacing(out, "preparing data into it", "prepared pairs") as fresh:
        most = {"train": options.subset, "valid": None}
        tags = {"train": options.source_tags, "valid": options.valid_source_tags}
        stored = {name: StoredText(text, fresh.path, name, most[name], tags[name]) for name, text in texts.items()}
        say(f"{counted(len(stored['train']), 'training pair')}, {counted(len(stored['valid']), 'validation pair')}")
        for name in texts:
            _warn_of_text(name, texts[name], stored[name], options.normalization, say)
        tokenizers = _load_models(models)
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(options).items()}
        fingerprint: dict[str, Any] = {"options": plain}
        fingerprint |= {f"{name}_sha256": stored[name].sha256 for name in texts}
        contents = [
            each.model + (b"" if each.vocabulary is None else repr(each.vocabulary).encode()) for each in tokenizers
        ]
        fingerprint["models_sha256"] = [hashlib.sha256(content).hexdigest() for content in contents]
        if prepared.PreparedData.holds(out, fingerprint):
            fresh.commit = False
            say(f"{out} already contains this data, nothing to do")
            return
        _fill(fresh.path, stored, options, tokenizers, threads, say, files, fingerprint, progress)
        for text in stored.values():
            text.delete()
    say(f"{out} is ready: fasttfm train --data {out} …")


def _load_models(models: Sequence[Path]) -> list[Tokenizer]:
    """The given tokenizers: a joint one, source and target, or none."""
    if len(models) == 1 and models[0].is_dir():
        tokenizers = list(dict.fromkeys(load_tokenizers(models[0])))
    else:
        tokenizers = [Tokenizer.load(model) for model in models]
    if tokenizers and not tokenizers[0].source_end:
        raise UserError(f"{models[0]}: its sources have no end-of-sentence token (OpenNMT); training needs one")
    return tokenizers


def _warn_of_text(
    name: str, text: Sequence[FilePair], stored: StoredText, normalization: str, say: Callable[[str], None]
) -> None:
    half = len(stored.sha256) // 2
    if stored.sha256[:half] == stored.sha256[half:]:
        source, target = text[0]
        say(f"warning: {name}: source and target are the same text ({source.path} and {target.path})")
    for file in itertools.chain.from_iterable(text):
        if file.replaced:
            say(
                f"warning: {file.path}: {counted(len(file.replaced), 'line')} with invalid UTF-8, read as U+FFFD; the "
                f"first is line {file.replaced[0]:,}"
            )
        if file.decomposed.count and normalization == "identity":
            say(
                f"warning: {file.path}: not in Unicode's normal form C: {file.decomposed}: use --normalization nfc, "
                "or accented letters have two spellings"
            )
        if file.invisible.count:
            say(f"warning: {file.path}: invisible characters, such as U+200B or U+FEFF: {file.invisible}")


def _fill(
    directory: Path,
    texts: dict[str, StoredText],
    options: PrepareOptions,
    models: Sequence[Tokenizer],
    threads: int,
    say: Callable[[str], None],
    files: Sequence[Path],
    fingerprint: dict[str, Any],
    progress: Callable[[str], Progress],
) -> None:
    """Write everything but the manifest into an empty directory."""
    tokenizers = (models[0], models[-1]) if models else _train_vocabulary(texts["train"], options)
    source_tokenizer, target_tokenizer = tokenizers
    save_tokenizers(directory, source_tokenizer, target_tokenizer)
    kind = "joint vocabulary" if source_tokenizer is target_tokenizer else "separate vocabularies"
    say(f"{kind} of {len(source_tokenizer):,} {'existing' if models else options.model_type} pieces")
    for tag in {*options.source_tags, *options.valid_source_tags}:
        if len(source_tokenizer.encode(tag)) > 1:
            say(f"warning: {tag} is several pieces: the source's SentencePiece model was trained without it")
    rules = Filter(options.max_length)
    valid_counts, held_out = _write_split(directory, "valid", texts["valid"], tokenizers, rules, threads)
    for line in rules.report():
        say(f"warning: valid: {line}")
    train = texts["train"]
    rules = Filter(
        options.max_length,
        options.max_ratio,
        options.drop_identical,
        (options.source_script, options.target_script),
        repeated_pairs(train, len(train)) if options.drop_duplicates else None,
    )
    train_counts, seen = _write_split(
        directory, "train", train, tokenizers, rules, threads, held_out, options.weights, progress("training text")
    )
    for line in rules.report():
        say(f"warning: train: {line}")
    if seen:
        overlap = f"{len(seen):,} of {counted(len(held_out), 'distinct pair')}"
        say(f"warning: valid: {overlap} also in train; validation scores will be too high")
    prepared.save_description(
        directory,
        prepared.FORMAT,
        {
            "vocabulary": "joint" if source_tokenizer is target_tokenizer else "separate",
            "source_vocab_size": len(source_tokenizer),
            "target_vocab_size": len(target_tokenizer),
            "train": train_counts,
            "valid": valid_counts,
            "files": [plain_text(path) for path in files],
            "fingerprint": fingerprint,
        },
    )


def _check_numbers(options: PrepareOptions, files: int, valid_files: int, models: int) -> None:
    for flag, given, needed in (
        ("--weight", options.weights, files),
        ("--source-tag", options.source_tags, files),
        ("--valid-source-tag", options.valid_source_tags, valid_files),
    ):
        if given and len(given) != needed:
            raise UserError(f"{flag}: {len(given)} given for {counted(needed, 'source file')}: give one for each")
    if bool(options.source_tags) != bool(options.valid_source_tags):
        raise UserError("--source-tag needs --valid-source-tag and vice versa: validation must look like training")
    if models == 1 and options.separate_vocab:
        raise UserError("--separate-vocab needs two models: give --spm twice, for source and target")
    if models > 2:
        raise UserError(f"--spm: {models} given: give one model for both sides, or one for source and one for target")


def _copies(number: int, weight: float) -> int:
    """Copies of the number-th (from 1) kept pair of a file, so that fractional weights spread evenly."""
    return int(number * weight + 1e-9) - int((number - 1) * weight + 1e-9)


def _encoded(tokenizer: Tokenizer, lines: Sequence[str], threads: int) -> list[list[int]]:
    """The ids of lines; those with any begin with the codes that a translation forces, such as a language."""
    ids = tokenizer.encode_lines(lines, threads)
    return [[*tokenizer.prefix, *each] if each else each for each in ids] if tokenizer.prefix else ids


def _write_split(
    directory: Path,
    name: str,
    text: StoredText,
    tokenizers: tuple[Tokenizer, Tokenizer],
    rules: Filter,
    threads: int,
    held_out: set[bytes] | None = None,
    weights: Sequence[float] = (),
    progress: Progress = lambda done, total: None,
) -> tuple[dict[str, int], set[bytes]]:
    """Write the ids of a split, chunk by chunk, so that memory does not grow with it.

    held_out: keys of pairs to look for; None for a held-out split, whose text is written too. Returns the counts of the
    split, and the keys found in held_out (of a held-out split, all of its keys).
    """
    dtypes = [prepared.id_dtype(len(tokenizer)) for tokenizer in tokenizers]
    writers = [prepared.IdsWriter(directory, f"{name}.{side}", dtype) for side, dtype in zip(("src", "tgt"), dtypes)]
    keys: set[bytes] = set()
    pairs, done = iter(text), 0
    parts = itertools.chain.from_iterable(itertools.repeat(n, count) for n, (_, count) in enumerate(text.parts))
    weights, kept = list(weights) or [1.0] * len(text.parts), [0] * len(text.parts)
    with ExitStack() as files:
        copies = [
            files.enter_context((directory / f"{name}.{side}.txt").open("wb"))
            for side in ("src", "tgt")
            if held_out is None
        ]
        while chunk := list(itertools.islice(pairs, _CHUNK)):
            source_ids = _encoded(tokenizers[0], [pair.source for pair in chunk], threads)
            target_ids = _encoded(tokenizers[1], [pair.target for pair in chunk], threads)
            numbers = itertools.islice(parts, len(chunk))
            for part, pair, source, target in zip(numbers, chunk, source_ids, target_ids, strict=True):
                if not rules.keeps(pair, source, target):
                    continue
                kept[part] += 1
                for _ in range(_copies(kept[part], weights[part])):
                    writers[0].write(source)
                    writers[1].write(target)
                key = np.array([*source, -1, *target], np.int32).tobytes()
                if held_out is None or key in held_out:
                    keys.add(key)
                for copy, line in zip(copies, (pair.source, pair.target)):
                    copy.write(line.encode() + b"\n")
            done += len(chunk)
            progress(done, len(text))
    for writer in writers:
        writer.close()
    if not writers[0].sentences:
        why = "; ".join(rules.report()) or "its --weight selects none"
        raise UserError(f"{text.parts[0][0]}: no usable pairs left for {name}: {why}")
    counts = {"pairs": writers[0].sentences, "source_tokens": writers[0].tokens, "target_tokens": writers[1].tokens}
    counts |= {"longest_source": writers[0].longest, "longest_target": writers[1].longest}
    counts |= {f"dropped_{rule.replace(' ', '_')}": rules.counts[rule] for rule in RULES}
    return counts, keys


def _train_vocabulary(text: StoredText, options: PrepareOptions) -> tuple[Tokenizer, Tokenizer]:
    count, most = len(text), min(options.vocab_pairs, len(text))

    def lines(side: int) -> Iterator[str]:
        for i, pair in enumerate(text):
            line = pair.target if side else pair.source
            if i * most // count < (i + 1) * most // count and line.strip():
                yield line

    def train(sides: Sequence[int]) -> Tokenizer:
        characters: Counter[str] = Counter()
        for line in itertools.chain.from_iterable(map(lines, sides)):
            characters.update(line)
        if not characters:
            raise UserError(f"{text.parts[0][0]}: all lines are empty, cannot train a vocabulary")
        coverage = options.character_coverage
        return train_tokenizer(
            itertools.chain.from_iterable(map(lines, sides)),
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            byte_fallback=options.byte_fallback,
            normalization=options.normalization,
            # including the word-start mark, which would otherwise be a separate piece before each tag
            symbols=sorted({f"\u2581{tag}" for tag in (*options.source_tags, *options.valid_source_tags)})
            if 0 in sides
            else (),
            character_coverage=coverage_for(len(characters), options.vocab_size) if coverage is None else coverage,
        )

    if options.separate_vocab:
        return train((0,)), train((1,))
    joint = train((0, 1))
    return joint, joint
