"""Command lines of `fasttfm score`."""

import gzip
import io
import json
import sys
import types
from pathlib import Path

import pytest

from fasttfm.cli.main import main

REFERENCES = "Der alte Mann kauft ein Haus.\nDie SPD-Politikerin schläft heute nicht.\n"


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(hypotheses: bytes, *options: str, references: bytes = REFERENCES.encode()) -> int:
        path = tmp_path / "ref.de.gz"
        path.write_bytes(gzip.compress(references))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(hypotheses)))
        return main(["score", "--ref", str(path), *options])

    return run


def test_it_prints_each_number_with_its_signature(score, capsys):
    assert score(REFERENCES.lower().encode(), "--compound-split") == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row[:22].strip() for row in rows] == ["BLEU", "BLEU, lower-cased", "chrF", "BLEU, compounds split"]
    assert rows[1].split()[2] == "100.00"
    assert "BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in rows[0]
    assert float(rows[0].split()[1]) < 100


def test_json_has_the_same_numbers(score, capsys):
    assert score(REFERENCES.encode(), "--json", "--tokenize", "char") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["lines"], record["bleu"], record["chrf"]) == (2, 100.0, 100.0)
    assert "tok:char" in record["bleu_signature"]


@pytest.mark.parametrize(
    ("hypotheses", "options", "message"),
    [
        (b"one\n", (), "standard input has 1 line but "),
        (b"", (), "standard input has 0 lines but "),
        (b"gut\nsch\xf6n\n", (), "standard input: line 2 is not valid UTF-8"),
        (b"a\nb\n", ("--tokenize", "moses"), "--tokenize moses: one of auto, 13a, intl, char"),
        (b"0 ||| a ||| -0.5\n1 ||| b ||| -1\n", (), "standard input is an n-best list"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(score, capsys, hypotheses: bytes, options, message: str):
    assert score(hypotheses, *options) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"fasttfm score: {message}")
    assert said.err.count("\n") == 1


def test_several_references_count_together(score, tmp_path, capsys):
    (tmp_path / "other").write_text("ein Haus\nnicht\n", encoding="utf-8")
    assert score(b"ein Haus\nnicht\n", "--ref", str(tmp_path / "other"), "--ter") == 0
    assert capsys.readouterr().out.count("nrefs:2") == 4
    assert score(b"ein Haus\nnicht\n") == 0
    (tmp_path / "other").write_text("ein Haus\n", encoding="utf-8")
    assert score(b"ein Haus\nnicht\n", "--ref", str(tmp_path / "other")) == 2
    assert "other has 1 line but" in capsys.readouterr().err


def test_lines_that_differ_only_in_normalization_are_reported(score, capsys):
    assert score(b"Scho\xcc\x88n\nja\n", references="Schön\nja\n".encode()) == 0
    told = "equal to the reference but for Unicode's normal form: 1 line (first: line 1)"
    assert told in capsys.readouterr().err


def test_text_without_spaces_has_its_tokenizer_or_a_warning(score, capsys):
    text = "一只狗在跑。\n两个人坐着。\n".encode()
    assert score(text, references=text) == 0
    told = capsys.readouterr()
    assert "tok:zh" in told.out
    assert told.err == ""
    assert score(text, "--tokenize", "13a", references=text) == 0
    assert "--tokenize 13a finds no words in this script" in capsys.readouterr().err


def test_missing_and_empty_references_are_named(score, tmp_path: Path, capsys):
    assert main(["score", "--ref", str(tmp_path / "absent.de")]) == 2
    assert score(b"", references=b"") == 2
    missing, empty = capsys.readouterr().err.splitlines()
    assert "absent.de: no such file" in missing
    assert "ref.de.gz: the file is empty" in empty


@pytest.mark.parametrize(
    ("package", "options", "message"),
    [
        ("sacremoses", ["--compound-split"], 'sacremoses is not installed: pip install "./fasttfm[moses]"'),
        ("comet", ["--comet", "Unbabel/any", "--src", "lines"], "--comet needs the package unbabel-comet"),
        ("MeCab", ["--tokenize", "ja-mecab"], "the tokenizer ja-mecab is not installed"),
        (None, ["--baseline", "lines"], "lines has 1 line but"),
        (None, ["--comet", "Unbabel/any", "--src", "lines"], "lines has 1 line but"),
        (None, ["--baseline", "absent"], "absent: no such file"),
    ],
)
def test_missing_packages_and_files_are_reported_before_reading_translations(
    score, tmp_path, monkeypatch, capsys, package, options, message
):
    monkeypatch.chdir(tmp_path)
    Path("lines").write_text("one\n" if package is None else "one\ntwo\n")
    monkeypatch.setitem(sys.modules, "comet", types.ModuleType("comet"))
    if package is not None:
        monkeypatch.setitem(sys.modules, package, None)
        if package == "MeCab":
            monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    assert score(REFERENCES.encode(), *options) == 2
    assert message in capsys.readouterr().err
    assert sys.stdin.read() == REFERENCES, "translations that a pipe gave would be lost"


def test_an_empty_translation_counts_as_one(score, capsys):
    assert score(b"Der alte Mann kauft ein Haus.\n\n", "--json") == 0
    assert json.loads(capsys.readouterr().out)["lines"] == 2


def test_another_systems_translations_are_compared(score, tmp_path, capfd):
    (tmp_path / "base").write_text("Der Mann kauft Haus.\nDie Frau schläft.\n")
    options = ("--baseline", str(tmp_path / "base"), "--ter", "--test", "randomization")
    assert score(REFERENCES.encode(), *options) == 0
    said = capfd.readouterr()
    assert said.err == ""
    rows = {row[:22].strip(): row[22:] for row in said.out.splitlines()[4:]}
    assert list(rows) == ["BLEU", "chrF", "TER"]
    assert " -> 100.00, p = " in rows["BLEU"]
    assert "ar:10000" in rows["BLEU"]
    assert score(REFERENCES.encode(), *options, "--json") == 0
    record = json.loads(capfd.readouterr().out)
    assert record["bleu_baseline"] < record["bleu"]
    assert 0 <= record["ter_p_value"] <= 1
    (tmp_path / "base").write_text("Der Mann kauft Haus.\n")
    assert score(REFERENCES.encode(), *options) == 2
    assert "base has 1 line but " in capfd.readouterr().err
