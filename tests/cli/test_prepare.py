"""Command lines of `fasttfm prepare`."""

import gzip
import os
import unicodedata
from pathlib import Path

import pytest
from model_dirs import contents

from fasttfm.cli.main import main
from fasttfm.data.demo import demo_pairs
from fasttfm.data.prepared import PreparedData


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Arguments for gzipped training and plain validation text."""
    pairs = demo_pairs()
    arguments = []
    for split, size, prefix in (("train", 200, ""), ("valid", 10, "valid-")):
        chosen = [next(pairs) for _ in range(size)]
        for flag, side in (("src", 0), ("tgt", 1)):
            content = "".join(f"{pair[side]}\n" for pair in chosen).encode()
            path = tmp_path / f"{split}.{flag}{'.gz' if split == 'train' else ''}"
            path.write_bytes(gzip.compress(content) if split == "train" else content)
            arguments += [f"--{prefix}{flag}", str(path)]
    return arguments


def test_the_documented_command_line_works(text: list[str], tmp_path: Path, capsys):
    out = tmp_path / "a name with spaces" / "DATA"
    assert main(["prepare", *text, "--vocab-size", "450", "--out", str(out)]) == 0
    data = PreparedData.open(out)
    assert (len(data.train), len(data.valid), len(data.source_tokenizer), data.joint) == (200, 10, 450, True)
    said = capsys.readouterr()
    assert "200 training pairs, 10 validation pairs" in said.out
    assert said.err == ""


def test_every_option_reaches_the_data(text: list[str], tmp_path: Path):
    options = "--vocab-size 300 --model-type unigram --separate-vocab --no-byte-fallback --max-length 12 --threads 2"
    options += " --character-coverage 0.999 --normalization nmt_nfkc --max-ratio 2.5 --drop-duplicates --drop-identical"
    options += " --src-script latin --tgt-script latin --subset 150 --vocab-pairs 149"
    options += " --weight 2 --source-tag <2de> --valid-source-tag <2de>"
    assert main(["prepare", *text, *options.split(), "--out", str(tmp_path / "DATA")]) == 0
    data = PreparedData.open(tmp_path / "DATA")
    assert data.description["fingerprint"]["options"] == {
        "vocab_size": 300,
        "separate_vocab": True,
        "model_type": "unigram",
        "character_coverage": 0.999,
        "byte_fallback": False,
        "normalization": "nmt_nfkc",
        "max_length": 12,
        "vocab_pairs": 149,
        "subset": 150,
        "max_ratio": 2.5,
        "drop_duplicates": True,
        "drop_identical": True,
        "source_script": "latin",
        "target_script": "latin",
        "weights": [2.0],
        "source_tags": ["<2de>"],
        "valid_source_tags": ["<2de>"],
        "replace_invalid": False,
    }
    assert 0 < len(data.train) < 200
    assert data.train.source_lengths.max() <= 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--vocab-size", "9000"], "--vocab-size 9,000: the training text is too small for so many pieces: at most"),
        (
            ["--threads", "99999999999999999999"],
            "argument --threads: '99999999999999999999' was given, it must be from 1 to 1,024",
        ),
        (["--valid-src", os.devnull], f"{os.devnull} has 0 lines but "),
        (["--character-coverage", "0.97"], "--character-coverage 0.97 must be a finite number of at least 0.98"),
        (["--vocab-pairs", "0"], "--vocab-pairs 0 must be an integer of at least 1"),
        (["--src", "nowhere.en"], "nowhere.en: no such file"),
        (["--valid-src", "."], ".: is a directory"),
    ],
)
def test_bad_input_is_refused_in_one_line(text, tmp_path: Path, refusal_of, change: list[str], message: str):
    out = tmp_path / "DATA"
    if change[0] in text:
        text[text.index(change[0]) + 1] = change[1]
        change = []
    line = refusal_of(["prepare", *text, "--vocab-size", "450", "--out", out, *change])
    assert line.startswith(f"fasttfm prepare: {message}")
    assert not out.exists()


def test_a_split_without_a_usable_pair_says_which_rule_left_them_out(text, tmp_path: Path, capsys):
    out = tmp_path / "DATA"
    assert main(["prepare", *text, "--vocab-size", "450", "--out", str(out), "--max-length", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no usable pairs left for valid" in error
    assert "a side that is too long (more than 1 subwords, see --max-length); first" in error
    assert not out.exists()


def test_several_files_and_repeated_flags_are_one_corpus_in_their_order(text: list[str], tmp_path: Path):
    src, tgt, valid = text[1], text[3], text[4:]
    options = [*valid, "--vocab-size", "450"]
    twice = ["--src", src, "--src", valid[1], "--tgt", tgt, "--tgt", valid[3], *options]
    together = ["--src", src, valid[1], "--tgt", tgt, valid[3], *options]
    for name, arguments in (("A", twice), ("B", together)):
        assert main(["prepare", *arguments, "--out", str(tmp_path / name)]) == 0
    assert contents(tmp_path / "A") == contents(tmp_path / "B")
    data = PreparedData.open(tmp_path / "A")
    assert len(data.train) == 210
    assert data.target_tokenizer.decode(data.train.target(200)) == Path(valid[3]).read_text().split("\n")[0]
    assert main(["prepare", "--src", src, valid[1], "--tgt", tgt, *options, "--out", str(tmp_path / "C")]) == 2


def test_decomposed_letters_and_invisible_characters_are_reported(text: list[str], tmp_path: Path, capsys):
    valid = Path(text[text.index("--valid-tgt") + 1])
    lines = valid.read_text(encoding="utf-8").splitlines()
    lines[1], lines[2] = unicodedata.normalize("NFD", "Über die Straße."), "\u200b"
    valid.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = ["prepare", *text, "--vocab-size", "450"]
    assert main([*command, "--out", str(tmp_path / "A")]) == 0
    told = capsys.readouterr()
    told = told.out + told.err
    assert f"{valid.name}: not in Unicode's normal form C: 1 line (first: line 2): use --normalization nfc" in told
    assert f"{valid.name}: invisible characters, such as U+200B or U+FEFF: 1 line (first: line 3)" in told
    assert "skipped 1 pair with an empty side" in told
    assert main([*command, "--normalization", "nfc", "--out", str(tmp_path / "B")]) == 0
    assert "normal form" not in capsys.readouterr().out


def test_the_working_directory_can_be_the_output(text: list[str], tmp_path: Path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for size in ("450", "440"):
        assert main(["prepare", *text, "--vocab-size", size, "--out", "."]) == 0
        assert len(PreparedData.open(Path(".")).source_tokenizer) == int(size)


def test_replace_invalid_replaces_and_counts_invalid_bytes(text: list[str], tmp_path, capsys, refusal_of):
    path = Path(text[5])
    path.write_bytes(b"sch\xc3\xb6n\n" * 3 + b"sch\xf6n\n" + path.read_bytes().split(b"\n", 4)[-1])
    command = ["prepare", *text, "--vocab-size", "450", "--out", str(tmp_path / "DATA")]
    assert refusal_of(command) == (
        f"fasttfm prepare: {path}: line 4 is not valid UTF-8 at column 4 (byte 0xf6): correct it, or use "
        "--replace-invalid to read such bytes as U+FFFD"
    )
    assert main([*command, "--replace-invalid"]) == 0
    warning = f"warning: {path}: 1 line with invalid UTF-8, read as U+FFFD; the first is line 4"
    assert warning in capsys.readouterr().out
    assert PreparedData.open(tmp_path / "DATA").valid_source_text[3] == "sch\ufffdn"


def test_one_text_as_source_and_target_is_pointed_out(text: list[str], tmp_path: Path, capsys):
    source = text[1]
    swapped = ["--src", source, "--tgt", source, *text[4:]]
    assert main(["prepare", *swapped, "--vocab-size", "400", "--out", str(tmp_path / "DATA")]) == 0
    said = capsys.readouterr().out
    assert f"warning: train: source and target are the same text ({source} and {source})" in said
    assert "warning: valid: source and target" not in said


HOSTILE = {
    "crlf": lambda line: f"{line}\r",
    "separators": lambda line: line.replace(" ", "\u2028", 1).replace(" ", "\x85", 1).replace(" ", "\x0c", 1),
    "nul and tab": lambda line: line.replace(" ", "\0", 1).replace(" ", "\t", 1),
    "emoji": lambda line: f"{line} 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈",
    "right to left": lambda line: f"\u202b{line} שלום עולם مرحبا\u200f",
    "pieces": lambda line: f"<s> {line} </s> <unk> <0x41> \u2581x\u2581",
    "long": lambda line: f"{'w' * 20_000}",
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_strange_text_is_prepared_line_by_line(tmp_path: Path, kind: str, model_type: str):
    """The number of pairs is that of `wc -l`, and validation text is unchanged."""
    pairs, arguments = demo_pairs(), []
    chosen = [next(pairs) for _ in range(120)]
    for split, prefix, part in (("train", "", chosen[:100]), ("valid", "valid-", chosen[100:])):
        for flag, side in (("src", 0), ("tgt", 1)):
            strange = [HOSTILE[kind](pair[side]) if i % 3 == 0 else pair[side] for i, pair in enumerate(part)]
            path = tmp_path / f"{split}.{flag}"
            path.write_bytes("".join(f"{line}\n" for line in strange).encode())
            arguments += [f"--{prefix}{flag}", str(path)]
    out = tmp_path / "DATA"
    options = ["--vocab-size", "420", "--model-type", model_type, "--max-length", "100000"]
    assert main(["prepare", *arguments, *options, "--out", str(out)]) == 0
    data = PreparedData.open(out)
    assert (len(data.train), len(data.valid)) == (100, 20)
    written = (tmp_path / "valid.tgt").read_bytes().replace(b"\r\n", b"\n").decode().split("\n")[:-1]
    assert data.valid_target_text == written
    decoded = [data.target_tokenizer.decode(data.valid.target(i)) for i in range(20)]
    assert decoded == [line.strip(" ") for line in written]


@pytest.mark.parametrize(("pair", "target"), [("multi30k", "de"), ("tatoeba_enja", "ja")])
def test_real_corpora_are_prepared_whole(corpora: Path, tmp_path: Path, pair: str, target: str):
    files = {"src": "train.en", "tgt": f"train.{target}", "valid-src": "valid.en", "valid-tgt": f"valid.{target}"}
    arguments = [f"--{flag}={corpora / pair / name}.gz" for flag, name in files.items()]
    assert main(["prepare", *arguments, "--vocab-size", "8000", "--out", str(tmp_path / "DATA")]) == 0
    data = PreparedData.open(tmp_path / "DATA")
    assert len(data.source_tokenizer) == 8000
    # decoding the ids gives the text back: a perfect model reaches the reference
    for i, line in enumerate(data.valid_target_text[:300]):
        assert data.target_tokenizer.decode(data.valid.target(i)).split() == line.split()
