"""Command lines of `fasttfm prepare`; what it writes is in tests/data."""

import gzip
import os
import unicodedata
from dataclasses import asdict
from pathlib import Path

import pytest
from model_dirs import contents

from fasttfm.cli.main import main
from fasttfm.data.demo import demo_pairs
from fasttfm.data.prepare import PrepareOptions
from fasttfm.data.prepared import PreparedData


def write_text(folder: Path, change=lambda line: line) -> list[str]:
    """Write 200 gzipped training pairs and 10 plain validation pairs; returns their arguments, --src first."""
    pairs, arguments = demo_pairs(), []
    for split, size, prefix in (("train", 200, ""), ("valid", 10, "valid-")):
        chosen = [next(pairs) for _ in range(size)]
        for flag, side in (("src", 0), ("tgt", 1)):
            content = "".join(f"{change(pair[side])}\n" for pair in chosen).encode()
            path = folder / f"{split}.{flag}{'.gz' if split == 'train' else ''}"
            path.write_bytes(gzip.compress(content) if split == "train" else content)
            arguments += [f"--{prefix}{flag}", str(path)]
    return arguments


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    return write_text(tmp_path)


def prepare(text: list[str], out: Path, *options: str) -> PreparedData:
    assert main(["prepare", *text, "--vocab-size", "450", "--out", str(out), *options]) == 0
    return PreparedData.open(out)


def test_the_documented_command_line_works(text: list[str], tmp_path: Path, capsys):
    text[5] = str(Path(text[5]).rename(tmp_path / os.fsdecode(b"caf\xe9")))  # a name that is not UTF-8
    data = prepare(text, tmp_path / "a name with spaces" / "DATA")
    assert (len(data.train), len(data.valid), len(data.source_tokenizer), data.joint) == (200, 10, 450, True)
    said = capsys.readouterr()
    assert "200 training pairs, 10 validation pairs" in said.out
    assert said.err == ""


def test_every_option_reaches_the_data(text: list[str], tmp_path: Path):
    options = "--vocab-size 300 --model-type unigram --separate-vocab --no-byte-fallback --max-length 12 --threads 2"
    options += " --character-coverage 0.999 --normalization nmt_nfkc --max-ratio 2.5 --drop-duplicates --drop-identical"
    options += " --src-script latin --tgt-script latin --subset 150 --vocab-pairs 149"
    options += " --weight 2 --source-tag <2de> --valid-source-tag <2de> --replace-invalid"
    path = Path(text[5])
    path.write_bytes(b"sch\xf6n\n" + path.read_bytes())
    Path(text[7]).write_text("ja\n" + Path(text[7]).read_text())
    data = prepare(text, tmp_path / "DATA", *options.split())
    found, default = data.description["fingerprint"]["options"], asdict(PrepareOptions())
    assert found.keys() == default.keys()
    assert [name for name in default if found[name] == default[name]] == []
    assert data.valid_source_text[0].endswith("sch\ufffdn")
    numbers = ("vocab_size", "max_length", "vocab_pairs", "subset", "max_ratio", "character_coverage")
    assert [found[name] for name in numbers] == [300, 12, 149, 150, 2.5, 0.999]
    assert 0 < len(data.train) < 200
    assert data.train.source_lengths.max() <= 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--vocab-size 9000", "--vocab-size 9,000: the training text is too small for so many pieces: at most"),
        ("--threads 99999999999999999999", "argument --threads: '99999999999999999999' was given, it must be"),
        ("--character-coverage 0.97", "--character-coverage 0.97 must be a finite number of at least 0.98"),
        ("--vocab-pairs 0", "--vocab-pairs 0 must be an integer of at least 1"),
        (f"--valid-src {os.devnull}", f"{os.devnull} has 0 lines but "),
        ("--src nowhere.en", "nowhere.en: no such file"),
        ("--valid-src .", ".: is a directory"),
        ("--vocab-size=450 --max-length=1", "no usable pairs left for valid"),
    ],
)
def test_bad_input_is_refused_in_one_line(text, tmp_path: Path, refusal_of, change: str, message: str):
    flag, value = change.split()
    if flag in text:
        text[text.index(flag) + 1] = value
    else:
        text += [flag, value]
    told = refusal_of(["prepare", *text, "--out", tmp_path / "DATA"])
    assert told.startswith("fasttfm prepare: ")
    assert message in told
    assert not (tmp_path / "DATA").exists()


def test_several_files_and_repeated_flags_are_one_corpus_in_their_order(text: list[str], tmp_path: Path):
    src, tgt, valid_src, valid_tgt = text[1::2]
    twice = ["--src", src, "--src", valid_src, "--tgt", tgt, "--tgt", valid_tgt, *text[4:]]
    together = ["--src", src, valid_src, "--tgt", tgt, valid_tgt, *text[4:]]
    data, _ = prepare(twice, tmp_path / "A"), prepare(together, tmp_path / "B")
    assert contents(tmp_path / "A") == contents(tmp_path / "B")
    assert len(data.train) == 210
    assert data.target_tokenizer.decode(data.train.target(200)) == Path(valid_tgt).read_text().split("\n")[0]
    unequal = ["--src", src, valid_src, "--tgt", tgt, *text[4:]]
    assert main(["prepare", *unequal, "--vocab-size", "450", "--out", str(tmp_path / "C")]) == 2


def test_decomposed_letters_invisible_characters_and_one_text_on_both_sides_are_reported(text, tmp_path, capsys):
    valid = Path(text[7])
    lines = valid.read_text(encoding="utf-8").splitlines()
    lines[1], lines[2] = unicodedata.normalize("NFD", "Über die Straße."), "\u200b"
    valid.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    text[3] = text[1]
    prepare(text, tmp_path / "A")
    told = capsys.readouterr().out
    for each in ("normal form C: 1 line", "invisible characters", "1 pair with an empty side", "train: source and"):
        assert each in told


HOSTILE = (
    lambda line: line,
    lambda line: f"{line}\r",
    lambda line: line.replace(" ", "\u2028", 1).replace(" ", "\x85", 1).replace(" ", "\x0c", 1),
    lambda line: line.replace(" ", "\0", 1).replace(" ", "\t", 1),
    lambda line: f"{line} 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈",
    lambda line: f"\u202b{line} שלום עולם مرحبا\u200f",
    lambda line: f"<s> {line} </s> <unk> <0x41> \u2581x\u2581",
    lambda line: f"{'w' * 20_000}{line}",
)
"""Line ends, separators, controls, emoji, right to left, reserved pieces, length."""


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_strange_text_is_prepared_line_by_line(tmp_path: Path, model_type: str):
    """The number of pairs is that of `wc -l`, and validation text is unchanged."""
    turn = iter(HOSTILE * 60)
    text = write_text(tmp_path, lambda line: next(turn)(line))
    data = prepare(text, tmp_path / "DATA", "--model-type", model_type, "--max-length", "100000")
    assert (len(data.train), len(data.valid)) == (200, 10)
    written = (tmp_path / "valid.tgt").read_bytes().replace(b"\r\n", b"\n").decode().split("\n")[:-1]
    assert data.valid_target_text == written
    decoded = [data.target_tokenizer.decode(data.valid.target(i)) for i in range(10)]
    assert decoded == [line.strip(" ") for line in written]
