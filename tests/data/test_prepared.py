"""The prepared directory: content, skipped pairs, damaged files, repeated runs."""

import copy
import gc
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_dirs import contents

from fasttfm.data.demo import demo_pairs
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.data.prepared import PreparedData
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
        (shutil.rmtree, "DATA: not a prepared data directory .*: run fasttfm prepare"),
        (lambda d: (d / "data.yaml").unlink(), "data.yaml: is missing: prepare the data again"),
        (rewritten("data.yaml", lambda content: b"a: [1"), "not a prepared data directory"),
        (rewritten("valid.tgt.txt", lambda content: b"one line\n"), "valid.tgt.txt: has 1 line for 20 pairs"),
        (resaved(lambda a: np.concatenate([a[:1], a[-1:], a[2:]])), "does not match its offsets"),
        (resaved(lambda a: a.astype(np.float64)), "truncated or damaged .1 dimensions of float64"),
        (rewritten("spm.model", lambda content: b"x"), "spm.model: not a SentencePiece model"),
        (rewritten("train.src.npy", lambda content: content[:500]), "truncated or damaged"),
        (lambda d: shutil.copy(d / "train.src.npy", d / "train.tgt.npy"), "does not match its offsets"),
        (with_token(500), r"train\.tgt\.npy: contains token 500, but the vocabulary has 500"),
    ],
)
def test_a_damaged_file_is_named(data: Path, damage, message: str):
    damage(data)
    with pytest.raises(UserError, match=message):
        _ = PreparedData.open(data).valid_target_text


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
