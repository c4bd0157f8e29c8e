"""Published corpora: downloads files and extracts aligned plain text.

    DATA_DIR/downloads/FILE           as published, verified
    DATA_DIR/NAME/train.1.en …        plain text, one sentence per line, one file per corpus and side
                  valid.en, test.en   held-out text
                  sha256sums          of these files

The paper trained on wmt14-en-de and wmt14-en-fr (section 5.1). datasets.yaml lists the corpora; a missing digest is
reported. Archive members are read by name and never extracted, so no name in an archive decides where a file is
written.
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
    """A parallel corpus in one archive, or in one file per side."""

    files: tuple[RemoteFile, ...]
    member: str = ""
    """Archive member of a side; {language} stands for its code."""
    other: str = ""
    """Archive member of the second side if more than the code differs (SGML references)."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A translation task."""

    languages: tuple[str, str]
    parts: dict[str, CorpusPart]
    """By the stem of its text files: train.1, train.2, ..., valid, and test.NAME for each test set."""

    def paths(self, folder: Path) -> dict[str, list[Path]]:
        """The text files of each part: source and target."""
        return {stem: [folder / f"{stem}.{language}" for language in self.languages] for stem in self.parts}

    def texts(self, folder: Path) -> "Texts":
        """The text files in a folder."""
        paths = self.paths(folder)
        sources, targets = zip(*(sides for stem, sides in paths.items() if stem.startswith("train.")))
        tests = {stem[5:]: (source, target) for stem, (source, target) in paths.items() if stem.startswith("test.")}
        return Texts(([*sources], [*targets]), ([paths["valid"][0]], [paths["valid"][1]]), tests)


@dataclass(frozen=True, slots=True)
class Texts:
    """Plain text files of a dataset; sources and targets align."""

    train: tuple[list[Path], list[Path]]
    valid: tuple[list[Path], list[Path]]
    tests: dict[str, tuple[Path, Path]]


_TABLE = parse_yaml((Path(__file__).parent / "datasets.yaml").read_bytes())


def _part(archive: str, member: str, other: str = "") -> CorpusPart:
    """The part for an entry of datasets.yaml."""
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
        {f"train.{number}": _part(*part) for number, part in enumerate(table["train"], start=1)}
        | {"valid": _part(*table["valid"])}
        | {f"test.{test}": _part(*part) for test, part in table["tests"].items()},
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
) -> Texts:
    """Download missing files and write a dataset's text, unless all of it exists.

    progress(file name) returns the progress callback of download(). Raises UserError for an unknown name, and if a file
    cannot be downloaded or read.
    """
    if name == DEMO:
        return demo_texts(data_dir / name)
    if name not in DATASETS:
        raise UserError(f"--dataset {name}: one of {', '.join([*DATASETS, DEMO])} is allowed")
    dataset = DATASETS[name]
    folder, downloads = data_dir / name, data_dir / "downloads"
    if (existing := existing_texts(name, data_dir)) is not None:
        say(f"{folder} already contains {name}")
        return existing
    for file in dict.fromkeys(file for part in dataset.parts.values() for file in part.files):
        exists = (downloads / file.name).exists()
        say(f"{file.name} exists" if exists else f"{file.name} from {file.urls[0]}")
        path = download(file, downloads, mirrors=mirrors, say=say, progress=progress(file.name))
        if file.digest is None:
            say(f"warning: {path}: no known digest; only its length was checked")
    with replacing(folder, "writing a dataset into it", "text of a dataset") as fresh:
        for part, (source, target) in zip(dataset.parts.values(), dataset.paths(fresh.path).values()):
            try:
                count = _write(part, dataset.languages, downloads, source, target)
            except UserError as error:
                moved = _move_away(part, downloads)
                raise UserError(f"{error}{moved and f'; moved to {moved}: run the same command again'}") from None
            say(f"{source.name}, {target.name}: {counted(count, 'pair')}")
    return dataset.texts(folder)


def demo_texts(folder: Path, test: str = DEMO) -> Texts:
    """Write the built-in corpus (fasttfm.data.demo). test: name of its test set."""
    write_demo_corpus(folder)
    train, valid, held_out = ((folder / f"{split}.en", folder / f"{split}.de") for split in ("train", "valid", "test"))
    return Texts(([train[0]], [train[1]]), ([valid[0]], [valid[1]]), {test: held_out})


def existing_texts(name: str, data_dir: Path) -> Texts | None:
    """The text of a dataset if it is complete; None if it must be downloaded."""
    folder, dataset = data_dir / name, DATASETS[name]
    settled(folder)
    names = {path.name for sides in dataset.paths(folder).values() for path in sides}
    if not (folder / MANIFEST).exists() or not names <= set(read_manifest(folder)):
        return None
    compare(folder)
    return dataset.texts(folder)


def _move_away(part: CorpusPart, downloads: Path) -> str:
    """Rename files without a known digest, so that they are downloaded again; returns the new names."""
    unchecked = [downloads / file.name for file in part.files if file.digest is None]
    for path in unchecked:
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    return " and ".join(f"{path}.damaged" for path in unchecked)


def _write(part: CorpusPart, languages: tuple[str, str], downloads: Path, source: Path, target: Path) -> int:
    """Write both sides of a part; returns the number of pairs."""
    paths = (downloads / part.files[0].name, downloads / part.files[-1].name)
    first, second = (part.member.format(language=language) for language in languages)
    members = (first, part.other or second)
    count = 0
    with source.open("wb") as source_file, target.open("wb") as target_file:
        for count, (source_line, target_line) in enumerate(read_pairs(paths, members), start=1):  # noqa: B007
            source_file.write(source_line.encode() + b"\n")
            target_file.write(target_line.encode() + b"\n")
    if not count:
        raise UserError(f"{downloads / part.files[0].name}: contains no sentence pairs: not the expected file")
    return count


_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


def read_member(path: Path, member: str) -> Iterator[str]:
    """The stripped lines of one side of a corpus.

    path: a published file. member: file in the tar archive `path`, '' if it is not an archive. The name selects the
    format: plain text, gzip (.gz), segments of SGML or XML (.sgm, .xml), or TED's tagged text (train.tags.*). Raises
    UserError for missing, truncated or damaged files.
    """
    name = (member or path.name).removesuffix(".gz")
    try:
        with _opened(path, member) as stream:
            is_packed = name != (member or path.name)
            yield from _lines(cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if is_packed else stream, name)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is truncated or damaged ({error}): move it away and download it again") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {name} is not UTF-8 ({error.reason})") from None


def read_pairs(paths: tuple[Path, Path], members: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Both sides of a corpus, line by line; `paths` are the same if one file contains both.

    Raises UserError if the numbers of lines differ, and as read_member() does.
    """
    sides = [read_member(path, member) for path, member in zip(paths, members)]
    for count, (source, target) in enumerate(itertools.zip_longest(*sides)):
        if source is None or target is None:
            names = " and ".join(member or path.name for path, member in zip(paths, members))
            raise UserError(f"{paths[0]}: {names} differ in length after line {count:,}")
        yield source, target


@contextmanager
def _opened(path: Path, member: str) -> Iterator[BinaryIO]:
    if not member:
        with path.open("rb") as stream:
            yield stream
        return
    with tarfile.open(path) as archive:
        for entry in archive:  # some archives use ./name
            if entry.isfile() and entry.name.removeprefix("./") == member:
                yield cast(BinaryIO, archive.extractfile(entry))
                return
    raise UserError(f"{path}: contains no file {member}: not the expected archive")


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
        # only "\n" ends a line: corpora contain U+2028 and lone carriage returns inside sentences
        yield " ".join(line.strip().split("\r"))
