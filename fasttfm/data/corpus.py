"""Reads parallel text: plain or gzip files in UTF-8, line n of one beside line n of the other.

Only "\\n" (or "\\r\\n") ends a line: U+2028, U+0085 and form feeds occur inside sentences and must not shift one side
against the other, which is what str.splitlines and text-mode reading of some tools do. A byte order mark at the start
of a file is dropped. Everything else reaches the caller as it stands in the file.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from fasttfm.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"


class Pair(NamedTuple):
    """One line pair and where it stands."""

    source: str
    target: str
    file: Path
    """The source file it came from."""
    line: int
    """Its line number, from 1."""


def decode_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a binary stream, without their ends. `name` stands for the stream in error messages."""
    for number, raw in enumerate(stream, start=1):
        if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
            raw = raw[3:]
        if raw.endswith(b"\n"):
            raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if number == 1 and raw.startswith(_GZIP_MAGIC):
                raise UserError(f"{name}: is gzip data: unpack it first, with gunzip or zcat") from None
            # Windows calls UTF-16 "Unicode" and begins such a file with FF FE
            likely = "utf-16" if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
            raise UserError(
                f"{name}: line {number:,} is not valid UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1} "
                f"of the line): convert the file first, for example with iconv -f {likely} -t utf-8"
            ) from None


def read_lines(path: Path | str) -> Iterator[str]:
    """The lines of one file, plain or gzip (told by its content, not its name).

    Raises UserError for a file that is missing, a directory, not valid UTF-8 (with its line) or a cut-off gzip.
    """
    path = Path(path)
    line = 0
    try:
        with path.open("rb") as file:
            compressed = file.peek(2)[:2] == _GZIP_MAGIC  # not read and sought back: the file may be a pipe
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if compressed else file
            for line, text in enumerate(decode_lines(stream, str(path)), start=1):  # noqa: B007
                yield text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: the gzip data is cut off or damaged after line {line:,} ({error}): copy or download it again"
        ) from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a directory, a text file was expected") from None
    except PermissionError:
        raise UserError(f"{path}: may not be read (permission denied)") from None


class ParallelText:
    """One or more pairs of files that align line by line, read as one corpus.

    sources and targets are equally many paths; pair i is (sources[i], targets[i]).
    """

    def __init__(self, sources: Sequence[Path | str], targets: Sequence[Path | str]):
        if len(sources) != len(targets):
            raise UserError(
                f"{len(sources)} source files but {len(targets)} target files: give one target file for each source "
                f"file, in the same order"
            )
        self.sources = [Path(path) for path in sources]
        self.targets = [Path(path) for path in targets]

    def __iter__(self) -> Iterator[Pair]:
        """All pairs, one file pair after the other. Raises UserError where the two sides differ in their line count."""
        for source, target in zip(self.sources, self.targets, strict=True):
            yield from _aligned(source, target)

    def check(self) -> int:
        """Read everything once and return the number of pairs; any error of the files is raised here.

        Raises UserError for a pipe as well, since whoever checks reads again.
        """
        for path in (*self.sources, *self.targets):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise UserError(f"{path}: is a pipe or device, but it is read more than once: write it to a file first")
        total = 0
        for source, target in zip(self.sources, self.targets, strict=True):
            count = sum(1 for _ in _aligned(source, target))
            if count == 0:
                raise UserError(f"{source} and {target} are empty: at least one line of text is needed")
            total += count
        return total

    def sha256(self) -> list[str]:
        """The SHA-256 of every file's bytes as they stand on disk, sources then targets."""
        return [_sha256(path) for path in (*self.sources, *self.targets)]


def _aligned(source: Path, target: Path) -> Iterator[Pair]:
    source_lines, target_lines = read_lines(source), read_lines(target)
    line = 0
    while True:
        source_text, target_text = next(source_lines, None), next(target_lines, None)
        if source_text is None or target_text is None:
            break
        line += 1
        yield Pair(source_text, target_text, source, line)
    if source_text is None and target_text is None:
        return
    # One side has ended. The other is counted to its end, since the difference tells what went wrong.
    if source_text is None:
        short, long, rest = source, target, target_lines
    else:
        short, long, rest = target, source, source_lines
    longer = line + 1 + sum(1 for _ in rest)
    raise UserError(
        f"{short} has {line:,} lines but {long} has {longer:,}: both must align line by line "
        f"(first difference in count after line {line:,})"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
