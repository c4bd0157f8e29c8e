"""Published corpora by name: where their files lie, what is in them, and the plain text that comes out.

    DATA_DIR/downloads/FILE           as published, checked
    DATA_DIR/NAME/train.1.en …        plain text, one sentence a line, a file a corpus and side
                  valid.en, test.en   held-out text
                  sha256sums          of these files

The paper's training data are those of wmt14-en-de and wmt14-en-fr (section 5.1). Digests come from the publishers or
from those who have recorded them; where none is known, the command says what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fasttfm.data.archives import read_pairs
from fasttfm.data.download import RemoteFile, download
from fasttfm.errors import UserError
from fasttfm.folders import MANIFEST, read_manifest, replacing
from fasttfm.wording import counted


@dataclass(frozen=True, slots=True)
class Part:
    """A corpus inside a published file, or in a file for each side."""

    files: tuple[RemoteFile, ...]
    """One archive or TMX file, or a file a side."""
    member: str = ""
    """What a side is called in an archive; {language} stands for its code."""
    other: str = ""
    """What the second side is called where that differs by more than the code: SGML references."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A translation task."""

    languages: tuple[str, str]
    train: tuple[Part, ...]
    valid: Part
    tests: dict[str, Part]


@dataclass(frozen=True, slots=True)
class Texts:
    """Plain text files of a dataset; sources and targets align."""

    train: tuple[list[Path], list[Path]]
    valid: tuple[list[Path], list[Path]]
    tests: dict[str, tuple[Path, Path]]


_STATMT = "https://www.statmt.org"


def _archive(url: str, digest: str | None = None) -> tuple[RemoteFile]:
    return (RemoteFile(url.rpartition("/")[2], (url,), digest),)


_EUROPARL = _archive(
    f"{_STATMT}/wmt13/training-parallel-europarl-v7.tgz",
    "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
)
_COMMON_CRAWL = _archive(
    f"{_STATMT}/wmt13/training-parallel-commoncrawl.tgz",
    "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
)
_NEWS_9 = _archive(
    f"{_STATMT}/wmt14/training-parallel-nc-v9.tgz",
    "sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
)
_NEWS_12 = _archive(
    "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
    "sha256:2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
)
_RAPID = _archive(
    "https://data.statmt.org/wmt18/translation-task/rapid2016.tgz",
    "sha256:41557dd5d8f0ed3a6d98bce3b798b1a9d3b68361eb99d902329ddbb943a6b55a",
)
_UN = _archive(f"{_STATMT}/wmt13/training-parallel-un.tgz")
_GIGA = _archive(f"{_STATMT}/wmt10/training-giga-fren.tar")
_DEV = _archive(
    "https://data.statmt.org/wmt19/translation-task/dev.tgz",
    "sha256:7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
)
_TED = _archive("https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz")
_MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"


def _wmt(foreign: str, train: tuple[Part, ...], test_years: tuple[int, ...]) -> Dataset:
    def test(year: int) -> Part:
        pair = f"{foreign}en" if year == 2014 else f"en{foreign}"
        other = f"dev/newstest{year}-{pair}-ref.{foreign}.sgm"
        return Part(_DEV, f"dev/newstest{year}-{pair}-src.en.sgm", other)

    return Dataset(
        ("en", foreign),
        train,
        Part(_DEV, "dev/newstest2013.{language}"),
        {f"newstest{year}": test(year) for year in test_years},
    )


def _multi30k(split: str) -> Part:
    names = [f"{split}.{language}.gz" for language in ("en", "de")]
    return Part(tuple(RemoteFile(f"multi30k-{name}", (f"{_MULTI30K}/{name}",)) for name in names))


_GERMAN = (
    Part(_EUROPARL, "training/europarl-v7.de-en.{language}"),
    Part(_COMMON_CRAWL, "commoncrawl.de-en.{language}"),
)

DATASETS = {
    "wmt14-en-de": _wmt("de", (*_GERMAN, Part(_NEWS_9, "training/news-commentary-v9.de-en.{language}")), (2014,)),
    "wmt14-en-fr": _wmt(
        "fr",
        (
            Part(_EUROPARL, "training/europarl-v7.fr-en.{language}"),
            Part(_COMMON_CRAWL, "commoncrawl.fr-en.{language}"),
            Part(_UN, "un/undoc.2000.fr-en.{language}"),
            Part(_NEWS_9, "training/news-commentary-v9.fr-en.{language}"),
            Part(_GIGA, "giga-fren.release2.fixed.{language}.gz"),
        ),
        (2014,),
    ),
    "wmt17-en-de": _wmt(
        "de",
        (
            *_GERMAN,
            Part(_NEWS_12, "training/news-commentary-v12.de-en.{language}"),
            Part(_RAPID, "rapid2016.de-en.{language}"),
        ),
        (2014, 2016, 2017),
    ),
    "iwslt14-de-en": Dataset(
        ("de", "en"),
        (Part(_TED, "de-en/train.tags.de-en.{language}"),),
        Part(_TED, "de-en/IWSLT14.TED.dev2010.de-en.{language}.xml"),
        {
            name: Part(_TED, f"de-en/IWSLT14.TED.{name}.de-en.{{language}}.xml")
            for name in ("tst2010", "tst2011", "tst2012")
        },
    ),
    "multi30k": Dataset(
        ("en", "de"), (_multi30k("train"),), _multi30k("val"), {"flickr2016": _multi30k("test_2016_flickr")}
    ),
}
"""The datasets that `fasttfm prepare --dataset` knows."""


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
    if name not in known:
        raise UserError(f"--dataset {name}: one of {', '.join(known)} is allowed")
    dataset = known[name]
    folder, downloads = data_dir / name, data_dir / "downloads"
    texts = _texts(dataset, folder)
    paths = [path for side in (*texts.train, *texts.valid) for path in side]
    paths += [path for pair in texts.tests.values() for path in pair]
    if (folder / MANIFEST).exists() and {path.name for path in paths} <= set(read_manifest(folder)):
        say(f"{folder} holds the text of {name}")
        return texts
    parts = [*dataset.train, dataset.valid, *dataset.tests.values()]
    for file in dict.fromkeys(file for part in parts for file in part.files):
        say(f"{file.name} from {file.urls[0]}" if not (downloads / file.name).exists() else f"{file.name} is there")
        path = download(file, downloads, mirrors=mirrors, say=say, progress=progress(file.name))
        if file.digest is None:
            say(f"warning: {path}: no digest of it is known, so that only its length was checked")
    with replacing(folder, "writing a dataset into it") as fresh:
        sides = [*zip(*texts.train, strict=True), *zip(*texts.valid, strict=True), *texts.tests.values()]
        for part, (source, target) in zip(parts, sides, strict=True):
            count = _write(part, dataset.languages, downloads, fresh.path / source.name, fresh.path / target.name)
            say(f"{source.name}, {target.name}: {counted(count, 'pair')}")
    return texts


def write_pairs(pairs: Iterable[tuple[str, str]], source: Path, target: Path) -> int:
    """Write both sides, a line a sentence; the number of pairs."""
    count = 0
    with source.open("wb") as source_file, target.open("wb") as target_file:
        for count, (source_line, target_line) in enumerate(pairs, start=1):  # noqa: B007
            source_file.write(source_line.encode() + b"\n")
            target_file.write(target_line.encode() + b"\n")
    return count


def _texts(dataset: Dataset, folder: Path) -> Texts:
    def pair(stem: str) -> tuple[Path, Path]:
        source, target = (folder / f"{stem}.{language}" for language in dataset.languages)
        return source, target

    train = [pair(f"train.{number}") for number in range(1, len(dataset.train) + 1)]
    source, target = pair("valid")
    tests = {name: pair(f"test.{name}") for name in dataset.tests}
    return Texts(([s for s, _ in train], [t for _, t in train]), ([source], [target]), tests)


def _write(part: Part, languages: tuple[str, str], downloads: Path, source: Path, target: Path) -> int:
    """Write the two sides of a part; the number of pairs."""
    paths = (downloads / part.files[0].name, downloads / part.files[-1].name)
    first, second = (part.member.format(language=language) for language in languages)
    members = (first, part.other or second)
    count = write_pairs(read_pairs(paths, members, languages), source, target)
    if not count:
        raise UserError(f"{downloads / part.files[0].name}: holds no pair of sentences: it is not what was expected")
    return count
