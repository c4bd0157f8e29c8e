"""Preparation of documents from text files: checks, vocabulary training, held-out part, output.

The text is read once, into a copy beside the result: it may be a pipe, and the hash is that of the bytes used. The copy
is then streamed, so memory holds a few thousand lines whatever the size of the text.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.corpus import TextFile
from fasttfm.data.prepared import IdsWriter, id_dtype, save_description
from fasttfm.errors import UserError
from fasttfm.system.folders import replacing
from fasttfm.system.wording import counted, plain_text
from fasttfm_pretraining.config.data import DocumentOptions
from fasttfm_pretraining.data.documents import FORMAT, PreparedDocuments
from fasttfm_pretraining.data.text_tokenizer import (
    ByteTokenizer,
    TextTokenizer,
    load_pieces,
    load_tokenizer_file,
    train_text_tokenizer,
)

_VOCABULARY_LINES = 1_000_000
_CHUNK = 20_000  # lines cut into tokens at a time


def prepare_documents(
    texts: Sequence[Path],
    out: Path,
    options: DocumentOptions,
    *,
    valid_texts: Sequence[Path] = (),
    model: Path | None = None,
    threads: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Write the prepared directory `out`. `say` receives lines of progress.

    texts: plain or compressed UTF-8 files. valid_texts: the held-out texts; none: the end of each text. model: an
    existing SentencePiece model or tokenizer.json; None: one is trained.
    Does nothing if `out` already holds this result. Raises UserError for unusable text or options, and for an `out`
    with other content, which is left unchanged.
    """
    for path in [*texts, *valid_texts]:
        if os.path.dirname(os.path.realpath(path)) == os.path.realpath(out):
            raise UserError(f"{path}: stands in the directory that --out replaces: choose another --out")
    with replacing(out, "preparing documents into it", "prepared documents") as fresh:
        train, valid = _copied(texts, valid_texts, fresh.path, options)
        given = None if model is None else _given(model)
        fingerprint: dict[str, Any] = {
            "options": asdict(options),
            "text_sha256": [part.sha256 for part in train],
            "valid_sha256": [part.sha256 for part in valid] if valid_texts else [],
            "model_sha256": None if model is None else hashlib.sha256(model.read_bytes()).hexdigest(),
        }
        if PreparedDocuments.holds(out, fingerprint):
            fresh.commit = False
            say(f"{out} already holds this data, nothing to do")
            return
        tokenizer = given or _trained(train, options)
        counts = {
            name: _write_split(fresh.path, name, parts, tokenizer, options.document_separator, threads)
            for name, parts in (("train", train), ("valid", valid))
        }
        tokenizer.save(fresh.path)
        for part in {part.copy for part in [*train, *valid]}:
            part.unlink()
        content = {"vocab_size": len(tokenizer), **counts}
        content |= {"files": [plain_text(path) for path in [*texts, *valid_texts]], "fingerprint": fingerprint}
        save_description(fresh.path, FORMAT, content)
    for name, noun in (("train", "training"), ("valid", "validation")):
        numbers = counts[name]
        documents, size = counted(numbers["documents"], "document"), numbers["bytes"]
        ratio = size / numbers["tokens"]
        say(f"{noun}: {documents}, {numbers['tokens']:,} tokens of {ratio:.2f} bytes, {size:,} bytes of text")
    say(f"vocabulary of {len(tokenizer):,} tokens; {out} is ready for fasttfm lm train and fasttfm mlm train")


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of lines in the copy of a file."""

    copy: Path
    begin: int
    """Byte."""
    end: int
    sha256: str
    """Of the whole file."""

    def lines(self) -> Iterator[str]:
        with self.copy.open("rb") as file:
            file.seek(self.begin)
            offset = self.begin
            while offset < self.end:
                line = file.readline()
                offset += len(line)
                yield line[:-1].decode()


def _copied(
    texts: Sequence[Path], valid_texts: Sequence[Path], folder: Path, options: DocumentOptions
) -> tuple[list[_Part], list[_Part]]:
    """The parts for training and for validation."""
    parts: tuple[list[_Part], list[_Part]] = ([], [])
    for number, path in enumerate([*texts, *valid_texts]):
        copy, text, has_text = folder / f".text-{number}", TextFile(path), False
        with copy.open("wb") as file:
            for line in text:
                if "\0" in line:
                    raise UserError(f"{path}: holds bytes of value 0, so it is not text: give plain text in UTF-8")
                has_text = has_text or not (line == options.document_separator or line.isspace() or not line)
                file.write(line.encode() + b"\n")
            size = file.tell()
        if not has_text:
            raise UserError(f"{path}: is empty: at least one line of text is needed")
        cut = size
        if not valid_texts:
            cut = _line_after(copy, int(size * (1 - options.valid_share)))
            if cut == size:
                raise UserError(
                    f"{path}: has too few lines to hold out the last {options.valid_share:.0%} of them: give --valid, "
                    "or a text of more lines"
                )
            parts[1].append(_Part(copy, cut, size, text.sha256))
        parts[number >= len(texts)].append(_Part(copy, 0, cut, text.sha256))
    return parts


def _line_after(copy: Path, offset: int) -> int:
    """Offset of the first line that begins after a byte, or the end of the file."""
    with copy.open("rb") as file:
        file.seek(offset)
        file.readline()
        return file.tell()


def _given(model: Path) -> TextTokenizer:
    if not model.is_file():
        raise UserError(f"{model}: no such file: give a SentencePiece model or a tokenizer.json")
    return load_tokenizer_file(model) if model.suffix == ".json" else load_pieces(model)


def _trained(parts: Sequence[_Part], options: DocumentOptions) -> TextTokenizer:
    if options.vocabulary == "bytes":
        return ByteTokenizer()
    lines = sum(1 for part in parts for _ in part.lines())
    step = -(-lines // _VOCABULARY_LINES)
    sample = itertools.islice(itertools.chain.from_iterable(part.lines() for part in parts), 0, None, step)
    return train_text_tokenizer((line for line in sample if line != options.document_separator), options.vocab_size)


def _write_split(
    folder: Path, name: str, parts: Sequence[_Part], tokenizer: TextTokenizer, separator: str | None, threads: int
) -> dict[str, int]:
    """Write the tokens and offsets of one split. Returns its numbers of documents, tokens and bytes of text."""
    writer, begin, text_bytes = IdsWriter(folder, name, id_dtype(len(tokenizer))), 0, 0
    for part in parts:
        for chunk, is_last in _chunks(part.lines(), separator):
            for ids in tokenizer.encode_lines(chunk, threads):
                writer.write(ids, ends=False)
            text_bytes += sum(len(line.encode()) + 1 for line in chunk)
            if is_last and writer.tokens > begin:
                writer.write([tokenizer.end])
                begin = writer.tokens
    writer.close()
    if not writer.tokens:
        raise UserError(f"no text is left for {name} data: give --valid, or a text of more lines")
    return {"documents": writer.sentences, "tokens": writer.tokens, "bytes": text_bytes}


def _chunks(lines: Iterator[str], separator: str | None) -> Iterator[tuple[list[str], bool]]:
    """Yields chunks of a document's lines, without separators, and whether the document ends with the chunk."""
    chunk: list[str] = []
    for line in lines:
        if separator is not None and line == separator:
            yield chunk, True
            chunk = []
            continue
        chunk.append(line)
        if len(chunk) == _CHUNK:
            yield chunk, False
            chunk = []
    yield chunk, True
