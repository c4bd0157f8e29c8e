"""README says what the records say, and nothing else."""

from __future__ import annotations

import pytest

from benchmarks import headline, readme_table
from benchmarks.result_files import RESULTS, load
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
    file = tmp_path / "end-to-end-demo.jsonl"
    file.write_text(file.read_text().replace('"bleu": 9', '"bleu": 8'))
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
    assert claim.places == "kernels.jsonl:1,2,3,4"


def test_throughput_stands_beside_the_peers(write, record):
    def row(provider, value, **more):
        unit = {"value": value, "unit": "target tokens/s"}
        more = {"group": "training_step", "case": "training_step", "shape": {"tokens": 2000}} | more
        return record(provider=provider, throughput=unit, **more)

    files = load(write("a.jsonl", row("torch.nn", 1234.5), row("fasttfm", 2345.6), row("fasttfm", 9.0, case="alone")))
    (claim,) = headline.claims(files)
    assert claim.figure == "fasttfm 2,350, torch.nn 1,230 target tokens/s"
    assert claim.what.startswith("training step, tokens=2,000, fp32; CPU")


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
