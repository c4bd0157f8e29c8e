"""From parallel text to the prepared directory: check, train SentencePiece, split, filter, write.

The text is read once: what is hashed is also what is used, though a file may change meanwhile, and it may be a pipe. A
copy beside the result is then streamed for vocabulary and ids, so that memory holds ids and never the whole text.
"""

import hashlib
import itertools
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
from fasttfm.data.corpus import ParallelText, StoredText
from fasttfm.data.filters import RULES, Dropped, Filter, check_script, repeated_pairs
from fasttfm.data.tokenizer import ModelType, Normalization, Tokenizer, coverage_for, train_tokenizer
from fasttfm.data.tokenizer_files import load_tokenizers, save_tokenizers
from fasttfm.errors import UserError
from fasttfm.system.folders import replacing
from fasttfm.system.parsing import characters
from fasttfm.system.wording import counted

Progress = Callable[[int, int], None]
"""Told what is done, and of how many."""
_CHUNK = 20_000  # pairs split at a time
_LARGEST_WEIGHT = 1000
_SPECIAL = re.compile(r"<(pad|unk|s|/s|0x[0-9A-Fa-f]{2})>|\u2581+")
"""Pieces with a meaning of their own: the first four, bytes, and the space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options that decide the content of a prepared directory, besides the text."""

    vocab_size: Annotated[int, Range(5, (1 << 31) - 1)] = 8000
    """Size of the vocabulary, the four special tokens included; of each side with separate_vocab."""
    separate_vocab: bool = False
    """Train one vocabulary for each side in place of a joint one."""
    model_type: ModelType = "bpe"
    """SentencePiece's algorithm."""
    character_coverage: Annotated[float, Range(0.98, 1)] | None = None
    """Share of character occurrences that the vocabulary covers, from 0.98 to 1. None: 1.0, or 0.9995 for scripts with
    many characters."""
    byte_fallback: bool = True
    """Write rare characters as bytes, so that none is unknown; this takes 256 tokens of the vocabulary."""
    normalization: Normalization = "identity"
    """SentencePiece's rule for normalizing text. identity changes nothing, which scores against raw references need;
    nfc makes one character of a letter and its accents, which text from macOS spells apart."""
    max_length: Count = 256
    """Leave out pairs with more subwords than this on either side."""
    vocab_pairs: Count = 200_000
    """Train the vocabulary on at most this many pairs, taken evenly from the whole corpus. They are held in memory:
    about 1 kB for a pair of 25 words a side."""
    subset: Count | None = None
    """Take only the first N pairs of each training file, for a trial run."""
    max_ratio: Annotated[float, Range(1)] | None = None
    """Leave out training pairs where one side has more than X times the subwords of the other."""
    drop_duplicates: bool = False
    """Leave out training pairs that are repeated."""
    drop_identical: bool = False
    """Leave out training pairs with the same text on both sides."""
    source_script: str | None = None
    """Leave pairs whose source is mostly in another script (filters.SCRIPTS) out of training; None takes any."""
    target_script: str | None = None
    """Likewise for the target."""
    weights: tuple[float, ...] = ()
    """How often an epoch has the pairs of each training file: 2 twice, 0.5 every second one; none: once."""
    source_tags: tuple[str, ...] = ()
    """Subword before each source line, by training file (the target's language), or none."""
    valid_source_tags: tuple[str, ...] = ()
    """Likewise of each validation file."""
    replace_invalid: bool = False
    """Read bytes that are not UTF-8 as U+FFFD and count such lines; otherwise the text is refused."""

    def __post_init__(self) -> None:
        check_flags(self)
        if any(not 0 < weight <= _LARGEST_WEIGHT for weight in self.weights):
            raise UserError(f"--weight: above 0 and at most {_LARGEST_WEIGHT} is allowed")
        for tag in (*self.source_tags, *self.valid_source_tags):
            if not tag or any(character.isspace() for character in tag):
                raise UserError(f"--source-tag {tag!r}: give one word such as <2de>")
            if _SPECIAL.fullmatch(characters(tag)):
                raise UserError(
                    f"--source-tag {tag!r}: is a special piece of every vocabulary: give another such as <2de>"
                )
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
    """Write the prepared directory `out`; `say` gets what was done and warnings, a line each.

    progress: of a split's noun, makes the function that is told the pairs done and the pairs in all.
    models: SentencePiece models to take, one for both sides or the source's and the target's, or the model or data
    directory that holds them; none: they are trained.
    Does nothing when `out` already holds just this. Raises UserError for text or options that cannot be used, and for
    an `out` that holds anything else; `out` then stays as it was.
    """
    _check_numbers(options, len(sources), len(valid_sources), len(models))
    files = [*sources, *targets, *valid_sources, *valid_targets]
    for path in files:
        if path.resolve().parent == out.resolve():
            raise UserError(f"{path}: stands in the directory that --out replaces: choose another --out")
    invalid = (options.replace_invalid, "correct it, or give --replace-invalid to read such bytes as U+FFFD")
    texts = {
        "train": ParallelText(sources, targets, *invalid),
        "valid": ParallelText(valid_sources, valid_targets, *invalid),
    }
    with replacing(out, "preparing data into it", "prepared pairs") as fresh:
        most = {"train": options.subset, "valid": None}
        tags = {"train": options.source_tags, "valid": options.valid_source_tags}
        stored = {name: StoredText(text, fresh.path, name, most[name], tags[name]) for name, text in texts.items()}
        say(", ".join(counted(len(stored[name]), f"{noun} pair") for name, noun in _NOUNS.items()))
        for name in texts:
            _warn_of_text(name, texts[name], stored[name], options.normalization, say)
        given = _vocabularies(models)
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(options).items()}
        fingerprint: dict[str, Any] = {"options": plain}
        fingerprint |= {f"{name}_sha256": stored[name].sha256 for name in texts}
        numbered = [(each.model, b"" if each.vocabulary is None else repr(each.vocabulary).encode()) for each in given]
        fingerprint["models_sha256"] = [hashlib.sha256(b"".join(parts)).hexdigest() for parts in numbered]
        if prepared.PreparedData.holds(out, fingerprint):
            fresh.wanted = False
            say(f"{out} already holds this data, nothing to do")
            return
        _fill(fresh.path, stored["train"], stored["valid"], options, given, threads, say, files, fingerprint, progress)
        for text in stored.values():
            text.delete()
    say(f"{out} is ready: fasttfm train --data {out} …")


_NOUNS = {"train": "training", "valid": "validation"}


def _vocabularies(models: Sequence[Path]) -> list[Tokenizer]:
    """The vocabulary of both sides, or the source's and the target's; none where no models are given."""
    if len(models) == 1 and models[0].is_dir():
        given = list(dict.fromkeys(load_tokenizers(models[0])))
    else:
        given = [Tokenizer.load(model) for model in models]
    if given and not given[0].source_end:
        raise UserError(f"{models[0]}: is of a model whose sources have no end (OpenNMT), which is not trained here")
    return given


def _warn_of_text(
    name: str, text: ParallelText, stored: StoredText, normalization: str, say: Callable[[str], None]
) -> None:
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
        if file.decomposed.count and normalization == "identity":
            say(
                f"warning: {file.path}: not in Unicode's normal form C: {file.decomposed}: give --normalization nfc, "
                "or letters with accents are spelt in two ways"
            )
        if file.invisible.count:
            say(f"warning: {file.path}: invisible characters, such as U+200B or U+FEFF: {file.invisible}")


def _fill(
    directory: Path,
    train_text: StoredText,
    valid_text: StoredText,
    options: PrepareOptions,
    given: Sequence[Tokenizer],
    threads: int,
    say: Callable[[str], None],
    files: Sequence[Path],
    fingerprint: dict[str, Any],
    progress: Callable[[str], Progress],
) -> None:
    """Write everything but the manifest into an empty directory."""
    tokenizers = (given[0], given[-1]) if given else _train_vocabulary(train_text, options)
    source_tokenizer, target_tokenizer = tokenizers
    save_tokenizers(directory, source_tokenizer, target_tokenizer)
    kind = "joint vocabulary" if source_tokenizer is target_tokenizer else "separate vocabularies"
    say(f"{kind} of {len(source_tokenizer):,} {'given' if given else options.model_type} pieces")
    for tag in {*options.source_tags, *options.valid_source_tags}:
        if len(source_tokenizer.encode(tag)) > 1:
            say(f"warning: {tag} is not one piece of the source's SentencePiece model, which was not trained with it")
    rules = Filter(options.max_length)
    valid_counts, held_out = _write_split(directory, "valid", valid_text, tokenizers, rules, threads)
    for line in rules.report():
        say(f"warning: valid: {line}")
    rules = Filter(
        options.max_length,
        options.max_ratio,
        options.drop_identical,
        (options.source_script, options.target_script),
        repeated_pairs(train_text, len(train_text)) if options.drop_duplicates else None,
    )
    train_counts, seen = _write_split(
        directory, "train", train_text, tokenizers, rules, threads, held_out, options.weights, progress("training text")
    )
    for line in rules.report():
        say(f"warning: train: {line}")
    if seen:
        verb = "is" if len(held_out) == 1 else "are"
        of_all = f"{len(seen):,} of {counted(len(held_out), 'different pair')}"
        say(f"warning: valid: {of_all} {verb} in train too; its scores flatter")
    prepared.save_description(
        directory,
        prepared.FORMAT,
        {
            "vocabulary": "joint" if source_tokenizer is target_tokenizer else "separate",
            "source_vocab_size": len(source_tokenizer),
            "target_vocab_size": len(target_tokenizer),
            "train": train_counts,
            "valid": valid_counts,
            "files": [str(path) for path in files],
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
            raise UserError(f"{flag}: {len(given)} were given for {counted(needed, 'source file')}: give one for each")
    if bool(options.source_tags) != bool(options.valid_source_tags):
        raise UserError("--source-tag and --valid-source-tag go together: what is validated must look like training")
    if models == 1 and options.separate_vocab:
        raise UserError(
            "--separate-vocab and one --spm do not go together: give --spm twice, the source's and target's"
        )
    if models > 2:
        raise UserError(f"--spm: {models} were given: give one model for both sides, or the source's and the target's")


def _copies(number: int, weight: float) -> int:
    """Return how often the number-th kept pair of its file, from 1, is written: evenly over the file."""
    return int(number * weight + 1e-9) - int((number - 1) * weight + 1e-9)


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
    """Write the ids of one split, and its text where it is held out, a chunk at a time: memory does not grow with it.

    held_out: keys of pairs that are looked for; None makes the split's own keys, and keeps its text. Returns the counts
    of the split, and its own keys or those of held_out that it met.
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
            source_ids = tokenizers[0].encode_lines([pair.source for pair in chunk], threads)
            target_ids = tokenizers[1].encode_lines([pair.target for pair in chunk], threads)
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
        why = "; ".join(rules.report()) or "its --weight takes none"
        raise UserError(f"{text.parts[0][0]}: no usable pair is left for {name}: {why}")
    counts = {"pairs": writers[0].sentences, "source_tokens": writers[0].tokens, "target_tokens": writers[1].tokens}
    counts |= {"longest_source": writers[0].longest, "longest_target": writers[1].longest}
    counts |= {f"dropped_{rule.replace(' ', '_')}": rules.dropped.get(rule, Dropped()).count for rule in RULES}
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
            raise UserError(f"{text.parts[0][0]}: all lines are empty, there is nothing to train a vocabulary on")
        coverage = options.character_coverage
        return train_tokenizer(
            itertools.chain.from_iterable(map(lines, sides)),
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            byte_fallback=options.byte_fallback,
            normalization=options.normalization,
            # with what marks the start of a word, which else is a piece before each tag
            symbols=sorted({f"\u2581{tag}" for tag in (*options.source_tags, *options.valid_source_tags)})
            if 0 in sides
            else (),
            character_coverage=coverage_for(len(characters), options.vocab_size) if coverage is None else coverage,
        )

    if options.separate_vocab:
        return train((0,)), train((1,))
    joint = train((0, 1))
    return joint, joint
