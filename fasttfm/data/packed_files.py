"""Opens text that may be packed: gzip, bzip2, xz and, where Python can read it, zstandard; told by its first bytes."""

import bz2
import gzip
import hashlib
import io
import lzma
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, cast

from fasttfm.errors import UserError


@dataclass(frozen=True, slots=True)
class Compression:
    """A format of compressed files."""

    name: str
    begins: bytes
    """The first bytes of such a file, as a regular expression."""
    tool: str
    """What unpacks it at the command line."""
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
