"""Command lines of `fasttfm score`; the scores themselves are in tests/data/test_scoring.py."""

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
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Run `fasttfm score` in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(hypotheses: str | bytes, *options: str, references: str = REFERENCES) -> tuple[int, str, str]:
        Path("ref.de.gz").write_bytes(gzip.compress(references.encode()))
        given = hypotheses if isinstance(hypotheses, bytes) else hypotheses.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        status = main(["score", "--ref", "ref.de.gz", *options])
        return status, *capsys.readouterr()

    return run


def test_it_prints_each_number_with_its_signature(score):
    status, out, _ = score(REFERENCES.lower(), "--compound-split")
    assert status == 0
    rows = out.splitlines()
    assert [row[:22].strip() for row in rows] == ["BLEU", "BLEU, lower-cased", "chrF", "BLEU, compounds split"]
    assert rows[1].split()[2] == "100.00"
    assert "BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in rows[0]
    assert float(rows[0].split()[1]) < 100


def test_json_has_the_same_numbers(score):
    record = json.loads(score(REFERENCES, "--json", "--tokenize", "char")[1])
    assert (record["lines"], record["bleu"], record["chrf"]) == (2, 100.0, 100.0)
    assert "tok:char" in record["bleu_signature"]
    assert json.loads(score("Der alte Mann kauft ein Haus.\n\n", "--json")[1])["lines"] == 2, "an empty line is one"


def test_several_references_count_together(score):
    Path("other").write_text("ein Haus\nnicht\n", encoding="utf-8")
    status, out, _ = score("ein Haus\nnicht\n", "--ref", "other", "--ter")
    assert (status, out.count("nrefs:2")) == (0, 4)


def test_another_systems_translations_are_compared(score):
    Path("base").write_text("Der Mann kauft Haus.\nDie Frau schläft.\n")
    options = ("--baseline", "base", "--ter", "--test", "randomization")
    status, out, err = score(REFERENCES, *options)
    assert (status, err) == (0, "")
    rows = {row[:22].strip(): row[22:] for row in out.splitlines()[4:]}
    assert list(rows) == ["BLEU", "chrF", "TER"]
    assert " -> 100.00, p = " in rows["BLEU"]
    assert "ar:10000" in rows["BLEU"]
    record = json.loads(score(REFERENCES, *options, "--json")[1])
    assert record["bleu_baseline"] < record["bleu"]
    assert 0 <= record["ter_p_value"] <= 1


@pytest.mark.parametrize(
    ("text", "options", "hypotheses", "told"),
    [
        ("Schön\nja\n", (), "Scho\u0308n\nja\n", "equal to the reference but for Unicode's normal form: 1 line"),
        ("一只狗在跑。\n", ("--tokenize", "13a"), "一只狗在跑。\n", "--tokenize 13a finds no words in this script"),
    ],
)
def test_scores_that_mislead_are_reported(score, text, options, hypotheses, told):
    status, _, err = score(hypotheses, *options, references=text)
    assert status == 0
    assert told in err


@pytest.mark.parametrize(
    ("hypotheses", "options", "message"),
    [
        ("one\n", (), "standard input has 1 line but "),
        (b"gut\nsch\xf6n\n", (), "standard input: line 2 is not valid UTF-8"),
        ("0 ||| a ||| -0.5\n1 ||| b ||| -1\n", (), "standard input is an n-best list"),
        ("a\nb\n", ("--tokenize", "moses"), "--tokenize moses: one of auto, 13a, intl, char"),
        ("a\nb\n", ("--ref", "empty"), "empty has 0 lines but "),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(score, hypotheses, options, message):
    Path("empty").touch()
    status, out, err = score(hypotheses, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fasttfm score: {message}")


def test_an_empty_reference_is_named(score):
    assert "ref.de.gz: the file is empty" in score("", references="")[2]


@pytest.mark.parametrize(
    ("package", "options", "message"),
    [
        ("sacremoses", ["--compound-split"], 'sacremoses is not installed: pip install "./fasttfm[moses]"'),
        ("comet", ["--comet", "Unbabel/any", "--src", "two"], "--comet needs the package unbabel-comet"),
        ("", ["--baseline", "one"], "one has 1 line but"),
        ("", ["--baseline", "absent"], "absent: no such file"),
    ],
)
def test_missing_packages_and_files_are_reported_before_reading_translations(
    score, monkeypatch, package, options, message
):
    Path("one").write_text("one\n")
    Path("two").write_text("one\ntwo\n")
    monkeypatch.setitem(sys.modules, "comet", types.ModuleType("comet"))
    if package:
        monkeypatch.setitem(sys.modules, package, None)
    status, _, err = score(REFERENCES, *options)
    assert status == 2
    assert message in err
    assert sys.stdin.read() == REFERENCES, "translations that a pipe gave would be lost"
