"""Reads parallel text: plain or packed files in UTF-8, line n of one beside line n of the other.

Only "\\n" (or "\\r\\n") ends a line: U+2028, U+0085 and form feeds occur inside sentences and must not shift one side
against the other, which is what str.splitlines and text-mode reading of some tools do. A byte order mark at the start
of a file is dropped. Everything else reaches the caller as it stands in the file. Its first bytes tell how a file is
packed: gzip, bzip2, xz and, where Python can read it, zstandard.
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
from typing import BinaryIO, NamedTuple, cast

from fasttfm.data.unicode_forms import has_invisible, is_composed
from fasttfm.errors import UserError
from fasttfm.system.wording import Tally, counted


class Pair(NamedTuple):
    """One line pair and where it stands."""

    source: str
    target: str
    file: Path
    """The source file it came from."""
    line: int
    """Its line number, from 1."""


def decode_lines(
    stream: BinaryIO, name: str, replaced: list[int] | None = None, hint: str = "correct that line"
) -> Iterator[str]:
    """The lines of a binary stream, without their ends. `name` stands for the stream in error messages.

    replaced: where it is given, a byte that is not UTF-8 becomes U+FFFD and its line's number is added to the list;
    else it is an error, with `hint` as the remedy. Raises UserError for it, and for packed text and UTF-16.
    """
    other_than_ascii = False
    for number, raw in enumerate(stream, start=1):
        if number == 1:
            if packed := kind_of(raw):
                raise UserError(f"{name}: is {packed.name} data: unpack it first, with {packed.tool}")
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # what Windows calls "Unicode"
                raise UserError(f"{name}: is UTF-16: convert it first, with iconv -f utf-16 -t utf-8")
            raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.startswith((b"<?xml ", b"<tmx ", b"<xliff ")):
                raise UserError(f"{name}: is XML, such as TMX or XLIFF: write its sentences out first, one a line")
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
    """One file that is read once, line by line; plain, or packed as its content tells, whatever its name."""

    def __init__(self, path: Path | str, replace_invalid: bool = False, hint: str = "correct that line") -> None:
        """replace_invalid: bytes that are not UTF-8 become U+FFFD. hint: the remedy for one where they do not."""
        self.path = Path(path)
        self.replaced: list[int] = []
        """Numbers of the lines in which bytes were replaced."""
        self.sha256 = ""
        """Of the file's bytes as they were read; known when all lines were."""
        self.decomposed, self.invisible = Tally(), Tally()
        """Lines that are not in Unicode's normal form C, and those with characters that nobody sees."""
        self._replace_invalid, self._hint = replace_invalid, hint

    def __iter__(self) -> Iterator[str]:
        """Raises UserError for a file that is missing, a directory, not UTF-8, cut off, or without line ends."""
        path, line, text, packing = self.path, 0, "", ""
        try:
            with Hashed(path.open("rb", buffering=0)) as file:
                content, packing = unpacked(file, path)
                lines = decode_lines(content, str(path), self.replaced if self._replace_invalid else None, self._hint)
                for line, text in enumerate(lines, start=1):
                    if not text.isascii():
                        self._look_at(text, line)
                    yield text
                self.sha256 = file.finish()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise UserError(f"{path}: this is a directory, a text file was expected") from None
        except PermissionError:
            raise UserError(f"{path}: may not be read (permission denied)") from None
        except Exception as error:
            if not (packing and is_damage(error)):
                raise
            raise UserError(
                f"{path}: the {packing} data is cut off or damaged after line {line:,} ({error}): copy or download it "
                "again"
            ) from None
        if line == 1 and "\r" in text.rstrip("\r"):
            raise UserError(
                f"{path}: has {text.count(chr(13)):,} carriage returns and no line ends: convert it first, with "
                "tr '\\r' '\\n'"
            )

    def _look_at(self, text: str, line: int) -> None:
        if not is_composed(text):
            self.decomposed.add(line)
        if has_invisible(text):
            self.invisible.add(line)


def read_lines(path: Path | str) -> Iterator[str]:
    """The lines of one file; see TextFile."""
    return iter(TextFile(path))


def is_cut(path: Path | str) -> bool:
    """Return whether a plain file ends in the middle of a line, as one that was cut off does."""
    if Path(path).is_file():  # else told by who reads it, or a pipe, which is read once
        with suppress(OSError), Path(path).open("rb") as file:
            packed, end = kind_of(file.read(16)), file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            return bool(end) and not packed and file.read() != b"\n"
    return False


class ParallelText:
    """One or more pairs of files that align line by line, read as one corpus.

    sources and targets are equally many paths; pair i is (sources[i], targets[i]).
    """

    def __init__(
        self,
        sources: Sequence[Path | str],
        targets: Sequence[Path | str],
        replace_invalid: bool = False,
        hint: str = "correct that line",
    ) -> None:
        """replace_invalid and hint: see TextFile."""
        if len(sources) != len(targets):
            raise UserError(
                f"{counted(len(sources), 'source file')} but {counted(len(targets), 'target file')}: give one target "
                "file for each source file, in the same order"
            )
        self.files = [
            tuple(TextFile(path, replace_invalid, hint) for path in pair) for pair in zip(sources, targets, strict=True)
        ]

    def __iter__(self) -> Iterator[Pair]:
        """All pairs, one file pair after the other. Raises UserError where the two sides differ in their line count."""
        for source, target in self.files:
            yield from _aligned(source, target)


class StoredText:
    """A copy of parallel text, made while it is read the only time: what is hashed is what is used."""

    def __init__(
        self, text: ParallelText, folder: Path, name: str, most: int | None = None, tags: Sequence[str] = ()
    ) -> None:
        """Reads all of text, or `most` pairs of each file, into two files of `folder`.

        tags: what is written before each source line of each pair of files, a space between; none: nothing.

        Raises UserError as reading it does, and for empty files.
        """
        self._paths = [folder / f".{name}.{side}" for side in ("source", "target")]
        self.parts: list[tuple[Path, int]] = []
        """Each source file and its number of pairs."""
        with self._paths[0].open("wb") as source_copy, self._paths[1].open("wb") as target_copy:
            for (source, target), tag in zip(text.files, tags or [""] * len(text.files)):
                begin = f"{tag} " if tag else ""
                count = 0
                for count, pair in enumerate(itertools.islice(_aligned(source, target), most), start=1):  # noqa: B007
                    source_copy.write((begin + pair.source).encode() + b"\n")
                    target_copy.write(pair.target.encode() + b"\n")
                if count == 0:
                    raise UserError(f"{source.path} and {target.path} are empty: at least one line of text is needed")
                self.parts.append((source.path, count))
        if most is None:
            self.sha256 = [file.sha256 for side in zip(*text.files) for file in side]
        else:
            self.sha256 = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self._paths]
        """The SHA-256 of every file's bytes, sources then targets; of a part of them, that of the copy."""

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
            # One side has ended. The other is counted to its end, since the difference tells what went wrong.
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
    """A format of compressed files."""

    name: str
    begins: bytes
    """The first bytes of such a file, as a regular expression."""
    tool: str
    """Command that unpacks it."""
    open: Callable[[BinaryIO], BinaryIO] | None
    """Makes a stream of the content; None where nothing here reads it."""


def _open_zstandard(file: BinaryIO) -> BinaryIO:
    for module in ("compression.zstd", "backports.zstd"):  # Python 3.14, and the package that brings it to older ones
        try:
            return import_module(module).ZstdFile(file)
        except ImportError:
            continue
    raise UserError("is zstandard data, which this Python cannot read: unpack it first, with zstd -d")


_PACKINGS = (
    Compression("gzip", rb"\x1f\x8b", "gunzip or zcat", lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file))),
    Compression("xz", rb"\xfd7zXZ\0", "xz -d or xzcat", lambda file: cast(BinaryIO, lzma.LZMAFile(file))),  # noqa: SIM115
    # the head of a first block, because "BZh" alone may begin a text
    Compression("bzip2", rb"BZh.1AY&SY", "bunzip2 or bzcat", lambda file: cast(BinaryIO, bz2.BZ2File(file))),
    Compression("zstandard", rb"\x28\xb5\x2f\xfd", "zstd -d or zstdcat", _open_zstandard),
    Compression("zip", rb"PK\x03\x04", "unzip", None),
    Compression("Parquet", rb"PAR1", "pandas, say, which writes a column as text", None),
)
_HEAD = 10
"""As many bytes tell the packing."""


def kind_of(head: bytes) -> Compression | None:
    """Tell how a stream that begins with these bytes is packed; None for plain text."""
    return next((each for each in _PACKINGS if re.match(each.begins, head, re.DOTALL)), None)


class Hashed(io.RawIOBase):
    """A file whose bytes are hashed as they are read, once and in order: it may be a pipe."""

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
        """Read what is left, and give the SHA-256 of all."""
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest()


def unpacked(file: Hashed, path: Path) -> tuple[BinaryIO, str]:
    """The content of a file and the name of its packing, "" for none. UserError for a packing that cannot be read."""
    buffered = cast(BinaryIO, file.buffered)
    packing = kind_of(file.buffered.peek(_HEAD)[:_HEAD])  # not read and sought back: it may be a pipe
    if packing is None:
        return buffered, ""
    if packing.open is None:
        raise UserError(f"{path}: is a {packing.name} file: unpack it first, with {packing.tool}")
    try:
        return packing.open(buffered), packing.name
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def is_damage(error: Exception) -> bool:
    """Return whether reading packed data raised this because they are cut off or wrong, not because of the disk."""
    if isinstance(error, (EOFError, zlib.error, lzma.LZMAError)) or type(error).__name__ == "ZstdError":
        return True
    return isinstance(error, OSError) and error.errno is None  # of gzip or bz2
