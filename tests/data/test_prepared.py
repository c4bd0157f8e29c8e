"""The prepared directory: content, skipped pairs, damaged files, repeated runs."""

import copy
import gc
import itertools
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_dirs import contents

from fasttfm.data import prepare as prepare_module
from fasttfm.data.demo import demo_pairs
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.data.prepared import ParallelTokens, PreparedData
from fasttfm.errors import UserError
from fasttfm.system import folders

SMALL = PrepareOptions(vocab_size=500)
Text = dict[str, Path]


def write_text(folder: Path) -> Text:
    """Small aligned files: train.en, train.de, valid.en, valid.de."""
    pairs = demo_pairs()
    files = {}
    for split, size in (("train", 300), ("valid", 20)):
        chosen = [next(pairs) for _ in range(size)]
        for language, side in (("en", 0), ("de", 1)):
            path = files[f"{split}.{language}"] = folder / f"{split}.{language}"
            path.write_text("".join(f"{pair[side]}\n" for pair in chosen), encoding="utf-8")
    return files


def run(text: Text, out: Path, options: PrepareOptions = SMALL, **more) -> list[str]:
    said: list[str] = []
    sides = ([text[f"{split}.{language}"]] for split in ("train", "valid") for language in ("en", "de"))
    prepare(*sides, out, options, **{"say": said.append, **more})
    return said


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return write_text(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    run(write_text(folder), folder / "DATA")
    return folder / "DATA"


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy of prepared data."""
    return shutil.copytree(made, tmp_path / "DATA")


@pytest.fixture
def undigested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the comparison of digests, so that files are opened."""
    monkeypatch.setattr(folders, "_fault", lambda path, digest: "" if path.exists() else f"{path}: is missing")


@pytest.mark.parametrize("separate", [False, True])
def test_ids_are_the_text_and_validation_text_is_raw(text, tmp_path: Path, separate: bool):
    raw = ["Ein  Haus\u2028am See … „gut“ ", "\tÜber\x85 Ｆｕｌｌ"]
    text["valid.de"].write_text("".join(f"{line}\n" for line in raw), encoding="utf-8", newline="")
    text["valid.en"].write_text("A house\nFull\n")
    run(text, tmp_path / "DATA", PrepareOptions(vocab_size=450, separate_vocab=separate))
    data = PreparedData.open(tmp_path / "DATA")
    assert data.joint is not separate
    assert [path.name for path in data.model_files] == (
        ["spm.src.model", "spm.tgt.model"] if separate else ["spm.model"]
    )
    assert data.valid_target_text == raw
    assert data.valid_source_text == ["A house", "Full"]
    lines = text["train.en"].read_text().split("\n")[:-1]
    assert len(data.train) == len(lines) == data.description["train"]["pairs"]
    assert [data.source_tokenizer.decode(data.train.source(i)) for i in range(len(lines))] == lines
    assert data.train.source(0).dtype == np.uint16
    assert int(data.train.target_lengths.sum()) == data.description["train"]["target_tokens"]


def test_unusable_pairs_are_skipped_on_both_sides_with_a_warning(text, tmp_path: Path):
    source = text["train.en"].read_text().split("\n")[:-1]
    source[6] = ""
    source[8] = " \u2028 "
    source[10] = "word " * 10_000
    text["train.en"].write_text("".join(f"{line}\n" for line in source))
    valid = text["valid.de"].read_text().split("\n")[:-1]
    valid[3] = ""
    text["valid.de"].write_text("".join(f"{line}\n" for line in valid))
    said = run(text, tmp_path / "DATA")
    position = text["train.en"]
    assert f"warning: train: skipped 2 pairs with an empty side; first: {position}:7" in said
    long = f"a side that is too long (more than 256 subwords, see --max-length); first: {position}:11"
    assert f"warning: train: skipped 1 pair with {long}" in said
    assert any(line.startswith("warning: valid: skipped 1 pair with an empty side") for line in said)
    data = PreparedData.open(tmp_path / "DATA")
    assert len(data.train) == 297
    assert len(data.valid) == len(data.valid_source_text) == len(data.valid_target_text) == 19
    assert data.target_tokenizer.decode(data.valid.target(3)) == data.valid_target_text[3] == valid[4]


def test_validation_pairs_in_the_training_data_are_reported(text, tmp_path: Path):
    for language in ("en", "de"):
        text[f"valid.{language}"].write_text("".join(text[f"train.{language}"].read_text().splitlines(True)[:4]))
    said = run(text, tmp_path / "DATA")
    assert "warning: valid: 4 of 4 distinct pairs also in train; validation scores will be too high" in said


def test_the_same_data_are_not_prepared_twice_and_are_the_same_bytes_elsewhere(text, tmp_path: Path):
    run(text, tmp_path / "A")
    before = contents(tmp_path / "A")
    stamp = (tmp_path / "A" / "data.yaml").stat().st_mtime_ns
    assert "nothing to do" in run(text, tmp_path / "A")[-1]
    assert (tmp_path / "A" / "data.yaml").stat().st_mtime_ns == stamp
    run(text, tmp_path / "B", threads=3)
    assert contents(tmp_path / "B") == before
    run(text, tmp_path / "A", PrepareOptions(vocab_size=450))
    assert len(PreparedData.open(tmp_path / "A").source_tokenizer) == 450
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def resaved(change: Callable[[np.ndarray], np.ndarray], file: str = "valid.src.offsets.npy") -> Callable[[Path], None]:
    """Damage to a prepared directory: changes an array."""
    return lambda folder: np.save(folder / file, change(np.load(folder / file)))


def with_token(token: int) -> Callable[[Path], None]:
    return resaved(lambda ids: np.concatenate([ids[:7], [token], ids[8:]]).astype(ids.dtype), "train.tgt.npy")


def rewritten(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], int]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


@pytest.mark.usefixtures("undigested")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "sha256sums").unlink(), "sha256sums: is missing"),
        (rewritten("sha256sums", lambda content: b""), "sha256sums: is empty"),
        (rewritten("sha256sums", lambda content: content[:200]), "sha256sums: is damaged"),
        (shutil.rmtree, "DATA: not a prepared data directory .*: run fasttfm prepare"),
        (lambda d: (d / "data.yaml").unlink(), "data.yaml: is missing: prepare the data again"),
        (rewritten("data.yaml", lambda content: b"a: [1"), "not a prepared data directory"),
        (rewritten("valid.tgt.txt", lambda content: b"one line\n"), "valid.tgt.txt: has 1 line for 20 pairs"),
        (rewritten("valid.tgt.txt", lambda content: b"\xff\n" * 20), "valid.tgt.txt: damaged"),
        (resaved(lambda a: np.concatenate([a[:1], a[-1:], a[2:]])), "does not match its offsets"),
        (resaved(lambda a: a.astype(np.float64)), "truncated or damaged .1 dimensions of float64"),
        (resaved(lambda a: a.reshape(1, -1)), "truncated or damaged .2 dimensions of int64"),
        (rewritten("spm.model", lambda content: b"x"), "spm.model: not a SentencePiece model"),
        (rewritten("train.src.npy", lambda content: content[:500]), "truncated or damaged"),
        (lambda d: (d / "valid.tgt.offsets.npy").unlink(), "offsets.npy: is missing: prepare the data"),
        (lambda d: shutil.copy(d / "train.src.npy", d / "train.tgt.npy"), "does not match its offsets"),
        (with_token(500), r"train\.tgt\.npy: contains token 500, but the vocabulary has 500"),
        (with_token(65535), r"train\.tgt\.npy: contains token 65535, but the vocabulary has 500"),
    ],
)
def test_a_damaged_file_is_named(data: Path, damage, message: str):
    damage(data)
    with pytest.raises(UserError, match=message):
        _ = PreparedData.open(data).valid_target_text


def test_pairs_in_memory_must_align():
    with pytest.raises(ValueError, match="1 source but 2 target"):
        ParallelTokens.from_lists([[1]], [[1], [2]])


@pytest.mark.parametrize("file", ["train.src.npy", "valid.tgt.txt", "spm.model"])
def test_preparing_again_repairs_an_incomplete_directory(made: Path, data: Path, file: str):
    before = contents(data)
    (data / file).unlink()
    run({path.name: path for path in made.parent.glob("*.*")}, data)
    assert contents(data) == before


def test_a_broken_pipe_of_the_output_is_not_a_disk_error(text, tmp_path: Path):
    def say(line: str) -> None:
        if "vocabulary" in line:
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        run(text, tmp_path / "DATA", say=say)


def test_a_file_truncated_during_training_is_an_error_and_not_a_crash_and_copies_outlive_the_pairs(data: Path):
    opened = PreparedData.open(data)
    first = opened.train.source(0).tolist()
    copied = copy.deepcopy(opened.train), pickle.loads(pickle.dumps(opened.train))
    os.truncate(data / "train.src.npy", 400)
    assert opened.train.source(0).tolist() == first
    with pytest.raises(UserError, match=r"train\.src\.npy: was truncated while it was read"):
        opened.train.source(len(opened.train) - 1)
    del opened
    gc.collect()
    assert [each.source(0).tolist() for each in copied] == [first, first]


def test_the_vocabulary_is_trained_on_an_even_sample_of_all_pairs(tmp_path, monkeypatch):
    for side in ("a", "b"):
        (tmp_path / side).write_text("".join(f"{side}{n}\n" for n in range(100)))
    given: list[str] = []

    def train(lines, **_):
        given.extend(lines)
        raise UserError("enough")

    monkeypatch.setattr(prepare_module, "train_tokenizer", train)
    files = [tmp_path / "a"], [tmp_path / "b"]
    with pytest.raises(UserError, match="enough"):
        prepare(*files, *files, tmp_path / "DATA", PrepareOptions(vocab_pairs=60))
    assert len(given) == 120
    assert [name[0] for name in given] == ["a"] * 60 + ["b"] * 60
    numbers = [int(name[1:]) for name in given[:60]]
    assert {b - a for a, b in itertools.pairwise(numbers)} == {1, 2}
    assert numbers[-1] == 99
