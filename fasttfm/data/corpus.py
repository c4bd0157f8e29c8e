"""Parallel text: UTF-8 files, plain or compressed, aligned line by line.

Only "\\n" or "\\r\\n" ends a line. U+2028, U+0085 and form feeds occur inside sentences; str.splitlines and the text
mode of some tools split there, which would shift one side against the other. A leading byte order mark is dropped; all
other text is returned unchanged. Compression (gzip, bzip2, xz, and zstandard where Python supports it) is detected from
the first bytes.
"""

import bz2
import gzip
import hashlib
import io
import itertools
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from fasttfm.data.unicode_forms import has_invisible, is_composed
from fasttfm.errors import UserError
from fasttfm.system.wording import Tally, counted


class Pair(NamedTuple):
    """A pair of lines and its position."""

    source: str
    target: str
    file: Path
    """The source file."""
    line: int
    """Line number, from 1."""


def decode_lines(
    stream: BinaryIO, name: str, replaced: list[int] | None = None, hint: str = "correct that line"
) -> Iterator[str]:
    """The lines of a binary stream, without line ends. `name` is the stream's name in error messages.

    replaced: if given, invalid UTF-8 becomes U+FFFD and the line number is appended to this list; otherwise it is an
    error, with `hint` as the remedy. Raises UserError for invalid UTF-8, UTF-16, XML and compressed text.
    """
    other_than_ascii = False
    for number, raw in enumerate(stream, start=1):
        if number == 1:
            if packed := kind_of(raw):
                raise UserError(f"{name}: is {packed.name} data: decompress it first, with {packed.tool}")
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # "Unicode" on Windows
                raise UserError(f"{name}: is UTF-16: convert it first, with iconv -f utf-16 -t utf-8")
            raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw:  # a byte order mark is all there is
                return
            if raw.startswith((b"<?xml ", b"<tmx ", b"<xliff ")):
                raise UserError(f"{name}: is XML, such as TMX or XLIFF: extract its sentences first, one per line")
        if number <= 2 and raw.count(0) * 3 >= len(raw):
            raise UserError(
                f"{name}: every second byte of line {number} is 0, as in UTF-16: convert it first, with iconv -f "
                "utf-16le -t utf-8 (or utf-16be)"
            )
        if raw.endswith(b"\n"):
            raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if replaced is None:
                before = raw[: error.start].decode("utf-8")
                mostly = other_than_ascii or not before.isascii()
                remedy = "" if mostly else ", or convert the file with iconv if all of it is in another encoding"
                raise UserError(
                    f"{name}: line {number:,} is not valid UTF-8 at column {len(before) + 1:,} (byte "
                    f"0x{raw[error.start]:02x}): {hint}{remedy}"
                ) from None
            replaced.append(number)
            line = raw.decode("utf-8", errors="replace")
        other_than_ascii = other_than_ascii or not raw.isascii()
        yield line


class TextFile:
    """A file that is read once, line by line; plain or compressed by content, whatever its name."""

    def __init__(self, path: Path | str, replace_invalid: bool = False, hint: str = "correct that line") -> None:
        """replace_invalid: read invalid UTF-8 as U+FFFD; otherwise it is an error, with `hint` as the remedy."""
        self.path = Path(path)
        self.replaced: list[int] = []
        """Line numbers with replaced bytes."""
        self.sha256 = ""
        """Digest of the file's bytes, set after the last line."""
        self.decomposed, self.invisible = Tally(), Tally()
        """Lines not in Unicode's normal form C, and lines with invisible characters."""
        self._replace_invalid, self._hint = replace_invalid, hint

    def __iter__(self) -> Iterator[str]:
        """Raises UserError for a file that is missing, a directory, not UTF-8, truncated, or without line ends."""
        path, line, text, compression = self.path, 0, "", ""
        try:
            with Hashed(path.open("rb", buffering=0)) as file:
                content, compression = decompressed(file, path)
                lines = decode_lines(content, str(path), self.replaced if self._replace_invalid else None, self._hint)
                for line, text in enumerate(lines, start=1):
                    if not text.isascii():
                        if not is_composed(text):
                            self.decomposed.add(line)
                        if has_invisible(text):
                            self.invisible.add(line)
                    yield text
                self.sha256 = file.finish()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise UserError(f"{path}: is a directory, not a text file") from None
        except PermissionError:
            raise UserError(f"{path}: permission denied") from None
        except Exception as error:
            if not (compression and is_damage(error)):
                raise
            raise UserError(
                f"{path}: the {compression} data is truncated or damaged after line {line:,} ({error}): copy or "
                "download it again"
            ) from None
        if line == 1 and "\r" in text.rstrip("\r"):
            raise UserError(
                f"{path}: has {text.count(chr(13)):,} carriage returns and no line ends: convert it first, with "
                "tr '\\r' '\\n'"
            )


def read_lines(path: Path | str) -> Iterator[str]:
    """The lines of one file; see TextFile."""
    return iter(TextFile(path))


def is_cut(path: Path | str) -> bool:
    """Whether a plain file ends in the middle of a line, as a truncated one does."""
    if Path(path).is_file():  # a pipe can be read only once; a missing file is reported by its reader
        with suppress(OSError), Path(path).open("rb") as file:
            packed, end = kind_of(file.read(16)), file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            return bool(end) and not packed and file.read() != b"\n"
    return False


FilePair = tuple[TextFile, TextFile]
"""Aligned files: source and target."""


def file_pairs(sources: Sequence[Path | str], targets: Sequence[Path | str], *options: Any) -> list[FilePair]:
    """The pairs (sources[i], targets[i]); options: of TextFile. Raises UserError for unequal numbers of files."""
    if len(sources) != len(targets):
        raise UserError(
            f"{counted(len(sources), 'source file')} but {counted(len(targets), 'target file')}: give one target "
            "file for each source file, in the same order"
        )
    return [(TextFile(source, *options), TextFile(target, *options)) for source, target in zip(sources, targets)]


class StoredText:
    """A copy of parallel text, written in a single read: the text that is hashed is the text that is used."""

    def __init__(
        self, files: Sequence[FilePair], folder: Path, name: str, most: int | None = None, tags: Sequence[str] = ()
    ) -> None:
        """Copies the files, or the first `most` pairs of each, into two files in `folder`.

        tags: a word per file pair, put before its source lines with a space; empty for none.

        Raises UserError for empty files and for text that cannot be read.
        """
        self._paths = [folder / f".{name}.{side}" for side in ("source", "target")]
        self.parts: list[tuple[Path, int]] = []
        """Source files and their numbers of pairs."""
        with self._paths[0].open("wb") as source_copy, self._paths[1].open("wb") as target_copy:
            for (source, target), tag in zip(files, tags or [""] * len(files)):
                begin = f"{tag} " if tag else ""
                count = 0
                for count, pair in enumerate(itertools.islice(_aligned(source, target), most), start=1):  # noqa: B007
                    source_copy.write((begin + pair.source).encode() + b"\n")
                    target_copy.write(pair.target.encode() + b"\n")
                if count == 0:
                    raise UserError(f"{source.path} and {target.path} are empty: at least one line of text is needed")
                self.parts.append((source.path, count))
        if most is None:
            self.sha256 = [file.sha256 for side in zip(*files) for file in side]
        else:
            self.sha256 = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self._paths]
        """SHA-256 of each file, sources then targets; with `most`, of the two copies."""

    def __len__(self) -> int:
        return sum(count for _, count in self.parts)

    def __iter__(self) -> Iterator[Pair]:
        with self._paths[0].open("rb") as sources, self._paths[1].open("rb") as targets:
            for path, count in self.parts:
                for line in range(1, count + 1):
                    yield Pair(sources.readline()[:-1].decode(), targets.readline()[:-1].decode(), path, line)

    def delete(self) -> None:
        """Remove the copy."""
        for path in self._paths:
            path.unlink()


def _aligned(source: TextFile, target: TextFile) -> Iterator[Pair]:
    source_lines, target_lines = iter(source), iter(target)
    for line, (source_text, target_text) in enumerate(itertools.zip_longest(source_lines, target_lines), start=1):
        if source_text is None or target_text is None:
            # count the longer side to its end: the difference shows what went wrong
            sides = (source, target, target_lines) if source_text is None else (target, source, source_lines)
            short, long, rest = sides
            longer = line + sum(1 for _ in rest)
            raise UserError(
                f"{short.path} has {counted(line - 1, 'line')} but {long.path} has {longer:,}: both must align line by "
                f"line (first difference in count after line {line - 1:,})"
            )
        yield Pair(source_text, target_text, source.path, line)


@dataclass(frozen=True, slots=True)
class Compression:
    """A compressed file format."""

    name: str
    magic: bytes
    """First bytes, as a regular expression."""
    tool: str
    """Command that decompresses it."""
    open: Callable[[BinaryIO], BinaryIO] | None
    """Opens the content as a stream; None for unsupported formats."""


def _open_zstandard(file: BinaryIO) -> BinaryIO:
    for module in ("compression.zstd", "backports.zstd"):  # Python 3.14, and its backport
        try:
            return import_module(module).ZstdFile(file)
        except ImportError:
            continue
    raise UserError("is zstandard data, which this Python cannot read: decompress it first, with zstd -d")


_COMPRESSIONS = (
    Compression("gzip", rb"\x1f\x8b", "gunzip or zcat", lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file))),
    Compression("xz", rb"\xfd7zXZ\0", "xz -d or xzcat", lambda file: cast(BinaryIO, lzma.LZMAFile(file))),  # noqa: SIM115
    # with the header of the first block, because text may start with "BZh"
    Compression("bzip2", rb"BZh.1AY&SY", "bunzip2 or bzcat", lambda file: cast(BinaryIO, bz2.BZ2File(file))),
    Compression("zstandard", rb"\x28\xb5\x2f\xfd", "zstd -d or zstdcat", _open_zstandard),
    Compression("zip", rb"PK\x03\x04", "unzip", None),
    Compression("Parquet", rb"PAR1", "pandas, for example, which writes a column as text", None),
)
_HEAD = 10
"""Bytes that identify the format."""


def kind_of(head: bytes) -> Compression | None:
    """The compression of a stream that starts with these bytes; None for plain text."""
    return next((each for each in _COMPRESSIONS if re.match(each.magic, head, re.DOTALL)), None)


class Hashed(io.RawIOBase):
    """A file that is hashed while it is read once in order; it may be a pipe."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.buffered = io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer) or 0
        self._digest.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def finish(self) -> str:
        """Read the rest and return the SHA-256 of the whole file."""
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest()


def decompressed(file: Hashed, path: Path) -> tuple[BinaryIO, str]:
    """The content of a file, and the name of its compression ("" for none). UserError for unsupported formats."""
    buffered = cast(BinaryIO, file.buffered)
    compression = kind_of(file.buffered.peek(_HEAD)[:_HEAD])  # peek instead of seek: it may be a pipe
    if compression is None:
        return buffered, ""
    if compression.open is None:
        raise UserError(f"{path}: is a {compression.name} file: decompress it first, with {compression.tool}")
    try:
        return compression.open(buffered), compression.name
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def is_damage(error: Exception) -> bool:
    """Whether an error from a decompressor means truncated or damaged data rather than a disk error."""
    if isinstance(error, (EOFError, zlib.error, lzma.LZMAError)) or type(error).__name__ == "ZstdError":
        return True
    return isinstance(error, OSError) and error.errno is None  # from gzip or bz2
