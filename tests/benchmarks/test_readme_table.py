"""README says what the records say, and nothing else."""

from __future__ import annotations

import json

import pytest

from benchmarks.measure.result_files import RESULTS, load
from benchmarks.report import headline, readme_table
from fasttfm.errors import UserError


def test_readme_is_as_the_records_have_it():
    text = readme_table.README.read_text(encoding="utf-8")
    assert readme_table.updated(text, load(RESULTS)) == text, (
        "README's table has drifted from benchmarks/results: run python -m benchmarks report --readme"
    )


def test_a_changed_record_makes_readme_drift(tmp_path):
    for file in RESULTS.glob("end-to-end-*.jsonl"):
        (tmp_path / file.name).write_text(file.read_text())
    text = readme_table.updated(readme_table.README.read_text(encoding="utf-8"), load(tmp_path))
    file = tmp_path / "end-to-end-multi30k.jsonl"
    file.write_text(file.read_text().replace('"bleu": 3', '"bleu": 2'))
    assert readme_table.updated(text, load(tmp_path)) != text


def test_what_no_record_holds_is_left_out(write, record):
    text = readme_table.table(load(write("a.jsonl", record())))
    assert "BLEU" not in text
    assert text.count("\n|") == 2  # the head alone: one provider is no comparison


def test_kernels_are_summed_up_against_plain_pytorch(write, record):
    rows = []
    for length, ours, eager in ((10, 100.0, 100.0), (20, 100.0, 400.0)):
        shape = {"B": 1, "L": length}
        rows += [record(p50=ours, shape=shape), record(p50=eager, shape=shape, provider="torch eager")]
    (claim,) = headline.claims(load(write("kernels.jsonl", *rows)))
    assert claim.figure == "2.00x as fast (geometric mean; 1.00x to 4.00x)"
    assert claim.what == "2 rows of kernels, fp32, against plain PyTorch; CPU: AMD EPYC, 2 cores"
    assert claim.locations == "kernels.jsonl:1,2,3,4"


def test_throughput_stands_beside_the_peers(write, record):
    def row(provider, value, **more):
        unit = {"value": value, "unit": "target tokens/s"}
        more = {"group": "training_step", "case": "training_step", "shape": {"tokens": 2000}} | more
        return record(provider=provider, throughput=unit, **more)

    files = load(write("a.jsonl", row("torch.nn", 1234.5), row("fasttfm", 2345.6), row("fasttfm", 9.0, case="alone")))
    (claim,) = headline.claims(files)
    assert claim.figure == "fasttfm 2,350, torch.nn 1,230 target tokens/s"
    assert claim.what.startswith("training step, tokens=2,000, fp32; CPU")


def test_a_claim_names_its_commit_and_what_was_noted(write):
    made = json.loads((RESULTS / "end-to-end-demo.jsonl").read_text().splitlines()[0])
    made |= {"corpus": "multi30k", "commit": "ab" * 20, "uncommitted_changes": True, "note": "other jobs ran"}
    made["command"] = "python -m benchmarks decoding --only batch=32 beam=4 --full --note x"
    table = readme_table.table(load(write("a.jsonl", made)))
    assert "| abababa with changes; other jobs ran |" in table
    assert "`python -m benchmarks decoding --only 'batch=32 beam=4' --full`" in table


def test_readme_has_the_leading_figures_of_the_newest_machine_alone(write, record):
    def row(provider, processor, time, length):
        unit = {"value": 10.0, "unit": "target tokens/s"}
        shape = {"batch": 32, "beam": 4, "length": length}
        machine = {"processor": processor, "time": f"2026-01-0{time}T00:00:00+00:00"}
        fields = {"group": "decoding", "case": "paper-base", "shape": shape, "machine": machine}
        return record(provider=provider, throughput=unit, **fields)

    rows = [
        row(provider, processor, time, length)
        for processor, time in (("old", 1), ("new", 2))
        for length in (8, 27)
        for provider in ("fasttfm", "other")
    ]
    files = load(write("a.jsonl", *rows))
    assert len(headline.claims(files)) == 4
    lines = [line for line in readme_table.table(files).splitlines() if "paper-base" in line]
    assert len(lines) == 1
    assert "length=27" in lines[0]
    assert "new" in lines[0]


def test_smoke_rows_and_wrong_rows_claim_nothing(write, record):
    rows = [record(level="smoke"), record(level="smoke", provider="torch eager")]
    assert headline.claims(load(write("a.jsonl", *rows))) == []
    rows = [record(status="wrong"), record(provider="torch eager")]
    assert headline.claims(load(write("b.jsonl", *rows))) == []


def test_the_table_replaces_what_stands_between_the_markers_and_nothing_else(tmp_path, write, record):
    files = load(write("a.jsonl", record()))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{readme_table.BEGIN}\nold\n{readme_table.END}\nafter\n")
    assert readme_table.write(files, readme) is True
    text = readme.read_text()
    assert text.startswith(f"before\n{readme_table.BEGIN}\nEvery figure")
    assert text.endswith(f"{readme_table.END}\nafter\n")
    assert "old" not in text
    assert readme_table.write(files, readme) is False
    with pytest.raises(UserError, match="README has no table to write"):
        readme_table.updated("no markers", files)
