"""The programs that translate with a model of the user's: what they compare, and records that follow their schemas."""

from __future__ import annotations

import json

import pytest
from model_dirs import PAIRS, tokenizer, write_model_dir

from benchmarks import precisions
from benchmarks.measure.records import validate
from fasttfm.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("model") / "model", trained=False)


@pytest.fixture
def text(tmp_path):
    for name, lines in (("in.en", PAIRS), ("in.de", PAIRS.values())):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return tmp_path


def test_each_precision_is_scored_on_each_test_set(model, text):
    (text / "short.en").write_text("a dog\n")
    (text / "short.de").write_text("ein Hund\n")
    sets = [flag for name in ("in", "short") for flag in ("--src", f"{text}/{name}.en", "--ref", f"{text}/{name}.de")]
    assert precisions.main([str(model), *sets, "--workers", "1", "--results", str(text)]) == 0
    record = json.loads((text / "precisions.jsonl").read_text())
    validate(record)
    rows = record["measured"]
    assert [(row["text"], row["precision"]) for row in rows] == [
        (name, precision) for name in ("in.en", "short.en") for precision in ("fp32", "bf16", "int8")
    ]
    assert all(row["bleu_change"] == 0 and row["lines_as_in_fp32"] == row["lines"] for row in rows[::3])


def test_a_vocabulary_map_is_tried_beside_none(model, text):
    """This one allows a single token, so that its translations cannot be the others'."""
    (text / "vmap.txt").write_text(f"\t{tokenizer().pieces([20])[0]}\n", encoding="utf-8")
    sets = ["--src", f"{text}/in.en", "--ref", f"{text}/in.de"]
    flags = ["--shortlist", f"{text}/vmap.txt", "--workers", "1", "--results", str(text)]
    assert precisions.main([str(model), *sets, *flags]) == 0
    record = json.loads((text / "precisions.jsonl").read_text())
    validate(record)
    assert [row["shortlist"] for row in record["measured"]] == [False, True] * 3
    assert all(row["lines_as_in_fp32"] < row["lines"] for row in record["measured"][1::2])


def test_files_of_unequal_length_are_refused(model, text):
    (text / "more.de").write_text("ein Hund\n" * 20)
    with pytest.raises(UserError, match="aligned"):
        precisions.main([str(model), "--src", f"{text}/in.en", "--ref", f"{text}/more.de"])
