"""Lines of text out of what corpora are published in: tar archives, gzip, SGML test sets, TED talks.

Nothing of an archive is unpacked into a folder: a member is read by its name, so that no name in an archive decides
where anything is written.
"""

import gzip
import html
import io
import itertools
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from fasttfm.errors import UserError

_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


def read_member(path: Path, member: str) -> Iterator[str]:
    """The lines of one side of a corpus, without their ends and without blanks around them.

    path: a published file. member: its name inside a tar archive, '' where path is not an archive. By its name a member
    is plain text, gzip (.gz), the segments of SGML or XML (.sgm, .xml), or TED's tagged text (train.tags.*). Raises
    UserError for what is missing, cut off or damaged.
    """
    name = (member or path.name).removesuffix(".gz")
    try:
        with _opened(path, member) as stream:
            is_packed = name != (member or path.name)
            yield from _lines(cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if is_packed else stream, name)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is cut off or damaged ({error}): move it away and download it again") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {name} is not UTF-8 ({error.reason})") from None


def read_pairs(paths: tuple[Path, Path], members: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Both sides of a corpus, line by line; paths are the same where one file holds both.

    Raises UserError where they differ in their number of lines, and as read_member().
    """
    sides = [read_member(path, member) for path, member in zip(paths, members)]
    for count, (source, target) in enumerate(itertools.zip_longest(*sides)):
        if source is None or target is None:
            names = " and ".join(member or path.name for path, member in zip(paths, members))
            raise UserError(f"{paths[0]}: {names} differ in length after line {count:,}")
        yield source, target


@contextmanager
def _opened(path: Path, member: str) -> Iterator[BinaryIO]:
    if not member or path.suffix not in (".tgz", ".tar", ".gz") or path.name == member:
        with path.open("rb") as stream:
            yield stream
        return
    with tarfile.open(path) as archive:
        for entry in archive:  # some archives name a member ./name
            if entry.isfile() and entry.name.removeprefix("./") == member:
                yield cast(BinaryIO, archive.extractfile(entry))
                return
    raise UserError(f"{path}: holds no file {member}: it is not the archive that was expected")


def _lines(stream: BinaryIO, name: str) -> Iterator[str]:
    if name.endswith((".sgm", ".xml")):
        text = stream.read().decode("utf-8-sig")
        yield from (" ".join(html.unescape(segment).split()) for segment in _SEGMENT.findall(text))
    elif Path(name).name.startswith("train.tags."):
        yield from (line for line in _plain(stream) if not line.startswith("<"))
    else:
        yield from _plain(stream)


def _plain(stream: BinaryIO) -> Iterator[str]:
    for line in io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n"):
        # a line ends at "\n" alone: corpora hold U+2028 and lone carriage returns inside sentences
        yield " ".join(line.strip().split("\r"))
