"""`fasttfm prepare` as it is typed."""

import gzip
from pathlib import Path

import pytest

from fasttfm.cli.main import main
from fasttfm.data.demo import demo_pairs
from fasttfm.data.prepared import PreparedData


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """The arguments that name gzip training and plain validation text."""
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
    options += " --character-coverage 0.999 --normalization nmt_nfkc"
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
    }
    assert 0 < len(data.train) < 200
    assert data.train.source_lengths.max() <= 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--vocab-size", "9000"], "--vocab-size 9,000: the training text is too small for so many pieces: at most"),
        (["--threads", "0"], "--threads 0: at least 1 is needed"),
        (["--src", "nowhere.en"], "nowhere.en: no such file"),
        (["--valid-src", "."], ".: this is a directory"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(text, tmp_path: Path, capsys, change: list[str], message: str):
    out = tmp_path / "DATA"
    assert main(["prepare", *text, "--vocab-size", "450", "--out", str(out), *change]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fasttfm prepare: {message}")
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(("pair", "target"), [("multi30k", "de"), ("tatoeba_enja", "ja")])
def test_real_corpora_are_prepared_whole(corpora: Path, tmp_path: Path, pair: str, target: str):
    folder = corpora / pair
    files = [
        (flag, str(folder / f"{split}.{language}.gz"))
        for flag, split, language in (
            ("--src", "train", "en"),
            ("--tgt", "train", target),
            ("--valid-src", "valid", "en"),
            ("--valid-tgt", "valid", target),
        )
    ]
    arguments = [word for flag in files for word in flag]
    assert main(["prepare", *arguments, "--vocab-size", "8000", "--out", str(tmp_path / "DATA")]) == 0
    data = PreparedData.open(tmp_path / "DATA")
    assert len(data.source_tokenizer) == 8000
    # Nothing is lost on the way to ids: what a perfect model would write is the reference.
    for i, line in enumerate(data.valid_target_text[:300]):
        assert data.target_tokenizer.decode(data.valid.target(i)).split() == line.split()
