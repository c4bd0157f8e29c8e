"""Published corpora by name: where their files lie, what is in them, and the plain text that comes out.

    DATA_DIR/downloads/FILE           as published, checked
    DATA_DIR/NAME/train.1.en …        plain text, one sentence a line, a file a corpus and side
                  valid.en, test.en   held-out text
                  sha256sums          of these files

The paper's training data are those of wmt14-en-de and wmt14-en-fr (section 5.1). datasets.yaml has the corpora; where
it knows no digest, the command says what it found. Nothing of an archive is unpacked into a folder: a member is read by
its name, so that no name in an archive decides where anything is written.
"""

import gzip
import html
import io
import itertools
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from fasttfm.data.demo import write_demo_corpus
from fasttfm.data.download import RemoteFile, download
from fasttfm.errors import UserError
from fasttfm.system.folders import MANIFEST, compare, read_manifest, replacing, settled
from fasttfm.system.parsing import parse_yaml
from fasttfm.system.wording import counted


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """A corpus inside a published file, or in a file for each side."""

    files: tuple[RemoteFile, ...]
    """One archive, or a file a side."""
    member: str = ""
    """Name of a side in an archive; {language} stands for its code."""
    other: str = ""
    """Name of the second side if it differs by more than the code: SGML references."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A translation task."""

    languages: tuple[str, str]
    train: tuple[CorpusPart, ...]
    valid: CorpusPart
    tests: dict[str, CorpusPart]


@dataclass(frozen=True, slots=True)
class Texts:
    """Plain text files of a dataset; sources and targets align."""

    train: tuple[list[Path], list[Path]]
    valid: tuple[list[Path], list[Path]]
    tests: dict[str, tuple[Path, Path]]


_TABLE = parse_yaml((Path(__file__).parent / "datasets.yaml").read_bytes())


def _part(archive: str, member: str, other: str = "") -> CorpusPart:
    """One that the table names."""
    if archive == "multi30k":
        table, names = _TABLE[archive], [f"{member}.{language}" for language in ("en", "de")]
        return CorpusPart(
            tuple(RemoteFile(f"multi30k-{n}.gz", (f"{table['url']}/{n}.gz",), f"text-sha256:{table[n]}") for n in names)
        )
    url = _TABLE["archives"][archive]["url"]
    file = RemoteFile(url.rpartition("/")[2], (url,), _TABLE["archives"][archive].get("digest"))
    return CorpusPart((file,), member, other)


DATASETS = {
    name: Dataset(
        tuple(table["languages"]),
        tuple(_part(*part) for part in table["train"]),
        _part(*table["valid"]),
        {test: _part(*part) for test, part in table["tests"].items()},
    )
    for name, table in _TABLE["datasets"].items()
}
"""The datasets that `fasttfm prepare --dataset` downloads."""
DEMO = "demo"
"""Name of the built-in corpus."""


def fetch_dataset(
    name: str,
    data_dir: Path,
    *,
    mirrors: Sequence[str] = (),
    say: Callable[[str], None] = print,
    progress: Callable[[str], Callable[[int, int | None], None]] = lambda name: lambda done, total: None,
    known: dict[str, Dataset] = DATASETS,
) -> Texts:
    """Download what is missing and write a dataset's text; nothing is done where all of it is there.

    progress: makes, for a file's name, what download() calls. Raises UserError for a name that is not known and for
    whatever cannot be downloaded or read.
    """
    if name == DEMO:
        return demo_texts(data_dir / name)
    if name not in known:
        raise UserError(f"--dataset {name}: one of {', '.join([*known, DEMO])} is allowed")
    dataset = known[name]
    folder, downloads = data_dir / name, data_dir / "downloads"
    if (held := held_texts(name, data_dir, known=known)) is not None:
        say(f"{folder} holds the text of {name}")
        return held
    texts = _texts(dataset, folder)
    parts = [*dataset.train, dataset.valid, *dataset.tests.values()]
    for file in dict.fromkeys(file for part in parts for file in part.files):
        say(f"{file.name} from {file.urls[0]}" if not (downloads / file.name).exists() else f"{file.name} is there")
        path = download(file, downloads, mirrors=mirrors, say=say, progress=progress(file.name))
        if file.digest is None:
            say(f"warning: {path}: no digest of it is known, so that only its length was checked")
    with replacing(folder, "writing a dataset into it", "text of a dataset") as fresh:
        sides = [*zip(*texts.train, strict=True), *zip(*texts.valid, strict=True), *texts.tests.values()]
        for part, (source, target) in zip(parts, sides, strict=True):
            try:
                count = _write(part, dataset.languages, downloads, fresh.path / source.name, fresh.path / target.name)
            except UserError as error:
                moved = _move_away(part, downloads)
                raise UserError(f"{error}{moved and f'; moved to {moved}: run the same command again'}") from None
            say(f"{source.name}, {target.name}: {counted(count, 'pair')}")
    return texts


def demo_texts(folder: Path, test: str = DEMO) -> Texts:
    """Write the built-in corpus (fasttfm.data.demo); test: the name of its test set."""
    write_demo_corpus(folder)
    train, valid, held_out = ((folder / f"{split}.en", folder / f"{split}.de") for split in ("train", "valid", "test"))
    return Texts(([train[0]], [train[1]]), ([valid[0]], [valid[1]]), {test: held_out})


def held_texts(name: str, data_dir: Path, *, known: dict[str, Dataset] = DATASETS) -> Texts | None:
    """The text of a dataset where all of it is there; None where some would have to be downloaded."""
    folder = data_dir / name
    texts = _texts(known[name], folder)
    paths = [path for side in (*texts.train, *texts.valid) for path in side]
    paths += [path for pair in texts.tests.values() for path in pair]
    settled(folder)
    if not (folder / MANIFEST).exists() or not {path.name for path in paths} <= set(read_manifest(folder)):
        return None
    compare(folder)
    return texts


def _move_away(part: CorpusPart, downloads: Path) -> str:
    """Take their names from files of no known digest, so that they are fetched anew; where they are then."""
    unchecked = [downloads / file.name for file in part.files if file.digest is None]
    for path in unchecked:
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    return " and ".join(f"{path}.damaged" for path in unchecked)


def _texts(dataset: Dataset, folder: Path) -> Texts:
    def pair(stem: str) -> tuple[Path, Path]:
        source, target = (folder / f"{stem}.{language}" for language in dataset.languages)
        return source, target

    train = [pair(f"train.{number}") for number in range(1, len(dataset.train) + 1)]
    source, target = pair("valid")
    tests = {name: pair(f"test.{name}") for name in dataset.tests}
    return Texts(([s for s, _ in train], [t for _, t in train]), ([source], [target]), tests)


def _write(part: CorpusPart, languages: tuple[str, str], downloads: Path, source: Path, target: Path) -> int:
    """Write the two sides of a part; the number of pairs."""
    paths = (downloads / part.files[0].name, downloads / part.files[-1].name)
    first, second = (part.member.format(language=language) for language in languages)
    members = (first, part.other or second)
    count = 0
    with source.open("wb") as source_file, target.open("wb") as target_file:
        for count, (source_line, target_line) in enumerate(read_pairs(paths, members), start=1):  # noqa: B007
            source_file.write(source_line.encode() + b"\n")
            target_file.write(target_line.encode() + b"\n")
    if not count:
        raise UserError(f"{downloads / part.files[0].name}: holds no pair of sentences: it is not what was expected")
    return count


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
