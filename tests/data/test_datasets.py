"""Published corpora become plain text: archive formats, digests, damaged files, the command line."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from fasttfm.cli.main import main
from fasttfm.data.datasets import DATASETS, CorpusPart, Dataset, Texts, fetch_dataset, read_member, read_pairs
from fasttfm.data.download import RemoteFile
from fasttfm.errors import UserError

SGML = """<refset setid="newstest2013" srclang="any"><doc docid="1">
<seg id="1"> Tom &amp; Anna  sagen: &quot;Ja&quot;. </seg>
<seg id="2">Zwei
Zeilen</seg></doc></refset>"""


def archive(path: Path, members: dict[str, str | bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as out:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))
    return path


def test_members_of_an_archive_are_read_by_name(tmp_path: Path):
    path = archive(
        tmp_path / "x.tgz",
        {
            "./training/a.de": "eins \r\nzwei\u2028drei\n",
            "dev/b.sgm": SGML,
            "de-en/train.tags.de-en.de": "<url>x</url>\n Gut .\n<title>y</title>\nSo\n",
            "c.de.gz": gzip.compress(b"\xef\xbb\xbfvier\n"),
        },
    )
    assert list(read_member(path, "training/a.de")) == ["eins", "zwei\u2028drei"]
    assert list(read_member(path, "dev/b.sgm")) == ['Tom & Anna sagen: "Ja".', "Zwei Zeilen"]
    assert list(read_member(path, "de-en/train.tags.de-en.de")) == ["Gut .", "So"]
    assert list(read_member(path, "c.de.gz")) == ["vier"]
    with pytest.raises(UserError, match=r"contains no file training/b\.de"):
        list(read_member(path, "training/b.de"))


@pytest.mark.parametrize("name", ["x.tgz", "x.tar"])
def test_a_truncated_archive_and_sides_of_unequal_length_are_refused(tmp_path: Path, name: str):
    path = archive(tmp_path / name, {"a.en": "".join(f"line {n * n}\n" for n in range(40_000)), "a.de": "1\n"})
    with pytest.raises(UserError, match=r"a\.en and a\.de differ in length after line 1"):
        list(read_pairs((path, path), ("a.en", "a.de")))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"is truncated or damaged .* download it again"):
        list(read_pairs((path, path), ("a.en", "a.de")))


FILE = (RemoteFile("x.tgz", ("http://127.0.0.1:9/x.tgz",)),)
TRAIN, VALID = CorpusPart(FILE, "t.{language}"), CorpusPart(FILE, "v.{language}")
SMALL = Dataset(("en", "de"), {"train.1": TRAIN, "valid": VALID, "test.held-out": VALID})
"""Its archive must already be in the folder of downloads."""


def fetch(data_dir: Path, dataset: Dataset = SMALL) -> Texts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "small", dataset)
        return fetch_dataset("small", data_dir, say=lambda line: None)


def write_archive(data_dir: Path) -> Path:
    (data_dir / "downloads").mkdir(parents=True, exist_ok=True)
    members = {
        f"{split}.{side}": "".join(f"{side} sentence number {n} {split}\n" for n in range(count))
        for split, count in (("t", 300), ("v", 20))
        for side in SMALL.languages
    }
    return archive(data_dir / "downloads" / "x.tgz", members)


def test_a_damaged_file_without_a_digest_is_renamed(tmp_path: Path):
    write_archive(tmp_path).write_bytes(b"<html>Not today</html>")
    with pytest.raises(UserError, match=r"moved to .*x\.tgz\.damaged: run the same command again"):
        fetch(tmp_path)
    assert [path.name for path in (tmp_path / "downloads").glob("x*")] == ["x.tgz.damaged"]


def test_a_dataset_is_prepared_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setitem(DATASETS, "small", SMALL)
    write_archive(tmp_path / "data")
    command = ["prepare", "--dataset", "small", "--data-dir", str(tmp_path / "data")]
    command += ["--vocab-size", "300", "--out", str(tmp_path / "DATA")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "train.1.en, train.1.de: 300 pairs" in said
    test_set = tmp_path / "data" / "small" / "test.held-out.de"
    assert f"test set held-out: {test_set.with_suffix('.en')} and {test_set}" in said
    assert test_set.read_text().splitlines()[4] == "de sentence number 4 v"
    assert (tmp_path / "DATA" / "train.src.npy").exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "already contains small" in said
    assert "nothing to do" in said
    for wrong in (["--src", "x"], ["--dataset", "wmt14"]):
        assert main([*command, *wrong]) == 2


def test_existing_files_are_used_if_they_are_intact(tmp_path: Path):
    write_archive(tmp_path)
    texts = fetch(tmp_path)
    assert texts.train[1][0].read_text().startswith("de sentence number 0 t\n")
    (tmp_path / "downloads" / "x.tgz").unlink()
    assert fetch(tmp_path) == texts
    for sides in texts.train:  # half a corpus, with sides of equal length
        whole = sides[0].read_bytes()
        sides[0].write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=rf"{sides[0].name}: is damaged or was changed, its SHA-256"):
            fetch(tmp_path)
        sides[0].write_bytes(whole)
    write_archive(tmp_path)
    with pytest.raises(UserError, match=r"contains no file t\.fr"):
        fetch(tmp_path, Dataset(("en", "fr"), {"train.1": TRAIN, "valid": VALID}))
    assert texts.train[1][0].exists()
