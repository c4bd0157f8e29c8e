"""The prepared directory: what is in it, what is refused, and that no kill leaves half of one."""

import itertools
import os
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


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Path]:
    """Small aligned files: train.en, train.de, valid.en, valid.de."""
    pairs = demo_pairs()
    files = {}
    for split, size in (("train", 300), ("valid", 20)):
        chosen = [next(pairs) for _ in range(size)]
        for language, side in (("en", 0), ("de", 1)):
            path = files[f"{split}.{language}"] = tmp_path / f"{split}.{language}"
            path.write_text("".join(f"{pair[side]}\n" for pair in chosen), encoding="utf-8")
    return files


@pytest.fixture
def undigested(monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest is compared before the files are looked into."""
    monkeypatch.setattr(folders, "_fault", lambda path, digest: "" if path.exists() else f"{path}: is missing")


def run(text: dict[str, Path], out: Path, options: PrepareOptions = SMALL, **more) -> list[str]:
    said: list[str] = []
    sides = ([text[f"{split}.{language}"]] for split in ("train", "valid") for language in ("en", "de"))
    prepare(*sides, out, options, **{"say": said.append, **more})
    return said


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


def test_unusable_pairs_are_left_out_of_both_sides_with_a_counted_warning(text, tmp_path: Path):
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
    assert f"warning: train: 2 pairs have a side that is empty, left out; the first is {position}:7" in said
    long = f"is too long (more than 256 subwords, see --max-length), left out; the first is {position}:11"
    assert f"warning: train: 1 pair has a side that {long}" in said
    assert any(line.startswith("warning: valid: 1 pair has a side that is empty") for line in said)
    data = PreparedData.open(tmp_path / "DATA")
    assert len(data.train) == 297
    assert len(data.valid) == len(data.valid_source_text) == len(data.valid_target_text) == 19
    assert data.target_tokenizer.decode(data.valid.target(3)) == data.valid_target_text[3] == valid[4]


def test_pairs_that_are_also_in_training_are_pointed_out(text, tmp_path: Path):
    for language in ("en", "de"):
        text[f"valid.{language}"].write_text("".join(text[f"train.{language}"].read_text().splitlines(True)[:4]))
    said = run(text, tmp_path / "DATA")
    assert "warning: valid: 4 of 4 different pairs are in train too; its scores flatter" in said


def test_again_is_nothing_to_do_the_same_bytes_elsewhere_and_new_data_for_new_options(text, tmp_path: Path):
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


def test_a_failure_leaves_the_old_data_as_it_was(text, tmp_path: Path):
    run(text, tmp_path / "DATA")
    before = contents(tmp_path / "DATA")
    with pytest.raises(UserError, match="at most"):
        run(text, tmp_path / "DATA", PrepareOptions(vocab_size=60_000))
    assert contents(tmp_path / "DATA") == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_one_line_and_loses_nothing(text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fasttfm.data import prepared

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run(text, tmp_path / "DATA")
    before = contents(tmp_path / "DATA")
    monkeypatch.setattr(prepared.IdsWriter, "write", full)
    with pytest.raises(UserError, match=r"DATA: No space left on device: .* is as it was before"):
        run(text, tmp_path / "DATA", PrepareOptions(vocab_size=450))
    assert contents(tmp_path / "DATA") == before


@pytest.mark.usefixtures("undigested")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "sha256sums").unlink(), "sha256sums: is missing"),
        (lambda d: (d / "sha256sums").write_bytes(b""), "sha256sums: is empty"),
        (lambda d: (d / "sha256sums").write_bytes((d / "sha256sums").read_bytes()[:200]), "sha256sums: is damaged"),
        (lambda d: (d / "data.yaml").unlink(), "data.yaml: is missing: prepare the data again"),
        (lambda d: (d / "data.yaml").write_text("a: [1"), "not a prepared data directory"),
        (lambda d: (d / "spm.model").write_bytes(b"x"), "spm.model: not a SentencePiece model"),
        (lambda d: (d / "train.src.npy").write_bytes((d / "train.src.npy").read_bytes()[:500]), "cut off or damaged"),
        (lambda d: (d / "valid.tgt.offsets.npy").unlink(), "offsets.npy: is missing: prepare the data"),
        (lambda d: (d / "train.tgt.npy").write_bytes((d / "train.src.npy").read_bytes()), "does not match its offsets"),
    ],
)
def test_a_damaged_directory_is_refused_by_the_file_that_is_damaged(text, tmp_path: Path, damage, message: str):
    run(text, tmp_path / "DATA")
    damage(tmp_path / "DATA")
    with pytest.raises(UserError, match=message):
        PreparedData.open(tmp_path / "DATA")


def test_a_missing_directory_says_what_makes_one(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere: not a prepared data directory .*: run fasttfm prepare"):
        PreparedData.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 3},
        {"max_length": 0},
        {"character_coverage": 0.97},
        {"model_type": "words"},
        {"normalization": "x"},
    ],
)
def test_wrong_options_name_their_flag(wrong):
    flag = "--" + next(iter(wrong)).replace("_", "-")
    with pytest.raises(UserError, match=flag):
        PrepareOptions(**wrong)


def test_pairs_in_memory_must_align():
    with pytest.raises(ValueError, match="1 source but 2 target"):
        ParallelTokens.from_lists([[1]], [[1], [2]])


@pytest.mark.parametrize("file", ["train.src.npy", "valid.tgt.txt", "spm.model"])
def test_preparing_again_repairs_a_directory_that_is_not_whole(text, tmp_path: Path, file: str):
    run(text, tmp_path / "DATA")
    before = contents(tmp_path / "DATA")
    (tmp_path / "DATA" / file).unlink()
    run(text, tmp_path / "DATA")
    assert contents(tmp_path / "DATA") == before


def test_a_reader_of_the_progress_that_leaves_is_no_failed_disk(text, tmp_path: Path):
    def say(line: str) -> None:
        if "vocabulary" in line:
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        run(text, tmp_path / "DATA", say=say)


@pytest.mark.usefixtures("undigested")
@pytest.mark.parametrize("token", [499, 500, 65535])
def test_a_token_outside_of_the_vocabulary_is_named_before_training(text, tmp_path: Path, token: int):
    run(text, tmp_path / "DATA")
    ids = np.load(tmp_path / "DATA" / "train.tgt.npy")
    ids[7] = token
    np.save(tmp_path / "DATA" / "train.tgt.npy", ids)
    if token < SMALL.vocab_size:
        assert PreparedData.open(tmp_path / "DATA").train.target(0)[7] == token
        return
    with pytest.raises(UserError, match=rf"train\.tgt\.npy: holds the token {token}, but the vocabulary has 500"):
        PreparedData.open(tmp_path / "DATA")


def test_a_file_that_is_cut_off_under_training_is_one_line_and_no_crash(text, tmp_path: Path):
    run(text, tmp_path / "DATA")
    data = PreparedData.open(tmp_path / "DATA")
    first = data.train.source(0).tolist()
    os.truncate(tmp_path / "DATA" / "train.src.npy", 400)
    assert data.train.source(0).tolist() == first
    with pytest.raises(UserError, match=r"train\.src\.npy: was cut off while it was read"):
        data.train.source(len(data.train) - 1)


@pytest.mark.parametrize("file", ["train.src.npy", "train.tgt.offsets.npy", "valid.src.txt", "spm.model", "data.yaml"])
def test_a_flipped_bit_anywhere_is_noticed_and_named(text, tmp_path: Path, file: str):
    run(text, tmp_path / "DATA")
    PreparedData.open(tmp_path / "DATA")
    path = tmp_path / "DATA" / file
    broken = bytearray(path.read_bytes())
    broken[-7] ^= 1
    path.write_bytes(bytes(broken))
    with pytest.raises(UserError, match=rf"{file}: is damaged or changed, its SHA-256"):
        PreparedData.open(tmp_path / "DATA")
    with pytest.raises(UserError, match=rf"{file}: was changed since it was written, and is not replaced"):
        run(text, tmp_path / "DATA")


def test_text_that_grows_while_it_is_prepared_is_stored_as_it_was_read(text, tmp_path: Path):
    def say(line: str) -> None:
        if "training pairs" in line:  # everything has been read
            for language in ("en", "de"):
                with text[f"train.{language}"].open("a") as file:
                    file.write("a line that came late\n")

    run(text, tmp_path / "DATA", say=say)
    assert len(PreparedData.open(tmp_path / "DATA").train) == 300
    assert "nothing to do" not in run(text, tmp_path / "DATA")[-1]
    assert len(PreparedData.open(tmp_path / "DATA").train) == 301


@pytest.mark.usefixtures("undigested")
def test_offsets_that_go_back_and_arrays_of_another_kind_are_refused(text, tmp_path: Path):
    run(text, tmp_path / "DATA")
    file = tmp_path / "DATA" / "valid.src.offsets.npy"
    offsets = np.load(file)
    for broken, complaint in (
        (np.concatenate([offsets[:1], offsets[-1:], offsets[2:]]), "does not match its offsets"),
        (offsets.astype(np.float64), "cut off or damaged .1 dimensions of float64"),
        (offsets.reshape(1, -1), "cut off or damaged .2 dimensions of int64"),
    ):
        np.save(file, broken)
        with pytest.raises(UserError, match=complaint):
            PreparedData.open(tmp_path / "DATA")


def test_every_flipped_bit_of_a_header_is_one_line_or_harmless(text, tmp_path: Path):
    run(text, tmp_path / "DATA")
    refused = 0
    for name in ("train.src.npy", "data.yaml"):
        file = tmp_path / "DATA" / name
        whole = file.read_bytes()
        for position in range(128):
            broken = bytearray(whole)
            broken[position] ^= 1 << position % 8
            file.write_bytes(bytes(broken))
            try:
                PreparedData.open(tmp_path / "DATA")
            except UserError as error:
                refused += "prepare" in str(error)
        file.write_bytes(whole)
    assert refused > 50


@pytest.mark.usefixtures("undigested")
@pytest.mark.parametrize("broken", [b"one line\n", b"\xff\n" * 20])
def test_damaged_validation_text_is_named(text, tmp_path: Path, broken: bytes):
    run(text, tmp_path / "DATA")
    (tmp_path / "DATA" / "valid.tgt.txt").write_bytes(broken)
    with pytest.raises(UserError, match=r"valid\.tgt\.txt: (has 1 line for 20 pairs|damaged)"):
        _ = PreparedData.open(tmp_path / "DATA").valid_target_text


def test_the_vocabulary_is_of_a_sample_taken_evenly_from_all_pairs(tmp_path, monkeypatch):
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
