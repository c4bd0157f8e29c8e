"""README says what the records say, and nothing else."""

import json
import re

import pytest

from benchmarks.__main__ import main
from benchmarks.measure.records import RESULTS, load
from benchmarks.report import headline, page, pictures, readme, tables
from benchmarks.report.rows import suite
from fasttfm.errors import UserError


def drawn(tmp_path, entries):
    """README's blocks of these records, by name."""
    names = ("status", "figures", "measured", "chips")
    markers = "\n".join(f"<!-- {name}: here -->\nold\n<!-- end -->" for name in names)
    text = readme.updated(f"before\n{markers}\nafter\n", entries)
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    return dict(re.findall(r"<!-- (\w+): here -->\n(.*?)<!-- end -->", text, re.DOTALL))


def test_readme_the_report_and_the_pictures_are_as_the_records_have_it(capsys):
    assert main(["check"]) == 0, capsys.readouterr().out


def test_what_differs_from_the_records_is_named(tmp_path, monkeypatch, capsys):
    """A page and README say something else, charts and pictures are missing or of other numbers."""
    monkeypatch.setattr(page, "README", tmp_path / "README.md")
    monkeypatch.setattr(page, "OUT", tmp_path / "report")
    monkeypatch.setattr(pictures, "OUT", tmp_path)
    page.README.write_text(readme.README.read_text(encoding="utf-8").replace("0.70x", "1.70x"), encoding="utf-8")
    entries = load(RESULTS)
    pictures.save(tmp_path / "roofline.png", *pictures.roofline(entries))
    pictures.save(tmp_path / "training.png", *pictures.roofline(entries))
    assert page.main(["--check"]) == 1
    told = capsys.readouterr().out
    for name in ("README.md", "report/nvidia-h200.md", "report/nvidia-h200.png", "training.png", "host-time.png"):
        assert f"{tmp_path / name} is not as the records have it" in told
    assert "roofline.png" not in told


def test_a_block_that_readme_lacks_is_named():
    with pytest.raises(UserError, match="README lacks the block chips"):
        readme.updated("no markers", [])


def test_a_line_has_the_mean_the_worst_shape_and_how_many_are_slower(tmp_path, write, record):
    shape = {"B": 4, "H": 8, "L": 27, "mask": "lengths", "dropout": 0.1}
    machine = record()["machine"] | {"device": "A GPU", "chip": "sm_90"}
    rows = [
        record(p50=time, shape=shape, provider=provider, noisy=noisy) | {"pass": name, "machine": machine}
        for name, times, noisy in (
            ("training forward", {"fasttfm": 50.0, "torch eager": 400.0, "SDPA": 200.0}, False),
            ("backward", {"fasttfm": 200.0, "SDPA": 100.0}, False),
            ("forward", {"fasttfm": 200.0, "SDPA": 1.0}, True),
        )
        for provider, time in times.items()
    ]
    for row in rows:
        row["case"] = "attention"
    blocks = drawn(tmp_path, load(write("kernels.jsonl", *rows)))
    worst = "0.50x: B=4 H=8 L=27 mask=lengths dropout=0.1, backward; SDPA"
    assert f"| Attention with dropout, fp32 | A GPU | 1.41x | {worst} | 1 of 2 | 2026-01-02 |" in blocks["measured"]
    assert "beside SDPA: **1.41x** on A GPU, worst shape 0.50x" in blocks["figures"]
    assert "H100, H200 (sm_90) | kernels (GPU)" in blocks["chips"]
    assert "Timed on A GPU" in blocks["status"]


def test_a_cpu_says_when_it_was_measured_and_what_is_slower(tmp_path, write, record):
    shape = {"batch": 1, "beam": 1, "source": 27, "length": 27, "vocabulary": 8_000}
    rows = [
        record(p50=time, provider=provider, group="decoding", case="paper-base", shape=shape) | {"pass": "decode"}
        for provider, time in (("fasttfm, a worker a core", 200.0), ("CTranslate2", 100.0))
    ]
    blocks = drawn(tmp_path, load(write("a.jsonl", *rows)))
    assert "**0.50x** on AMD EPYC (2026-01-02), worst shape 0.50x" in blocks["figures"]
    assert "- Slower than the fastest other: search, fp32 on AMD EPYC (2026-01-02) 0.50x" in blocks["figures"]
    assert "No GPU has run" in blocks["status"]


def test_kernels_are_summed_up_against_the_fastest_other_provider(write, record):
    rows = []
    for length, ours, eager, other in ((10, 200.0, 400.0, 100.0), (20, 100.0, 800.0, 900.0)):
        shape = {"B": 1, "L": length}
        rows += [
            record(p50=time, shape=shape, provider=provider)
            for provider, time in (("fasttfm", ours), ("torch eager", eager), ("torch SDPA", other))
        ]
    (claim,) = headline.claims(load(write("kernels.jsonl", *rows)))
    assert claim.figure == "2.00x as fast (geometric mean; 0.50x to 8.00x), slower in 1; times ±2%"
    assert claim.what.startswith("2 shapes of kernels, fp32, our fastest way against the fastest other; CPU")
    assert claim.locations == "kernels.jsonl:1,3,4,5"


@pytest.mark.parametrize(("theirs", "figure"), [("torch.nn", "0.50x"), ("torch.nn, CUDA graph", "4.00x")])
def test_a_graph_of_ours_counts_beside_a_graph_of_theirs(theirs, figure, write, record):
    times = (("fasttfm", 200.0), ("fasttfm, CUDA graph", 25.0), (theirs, 100.0))
    rows = [record(group="training_step", p50=time, provider=provider) for provider, time in times]
    (claim,) = headline.claims(load(write("training_step.jsonl", *rows)))
    assert claim.figure.startswith(f"{figure} as fast")


def test_a_case_with_a_noisy_row_is_in_no_claim_and_counted(write, record):
    """Leaving out the noisy row alone would compare us with whoever is next."""
    rows = [
        record(p50=time, shape={"B": 1, "L": length}, provider=provider, spread=spread, noisy=noisy)
        for length, provider, time, spread, noisy in (
            (10, "fasttfm", 200.0, 0.02, False),
            (10, "torch eager", 400.0, 0.02, False),
            (20, "fasttfm", 200.0, 0.02, False),
            (20, "torch eager", 400.0, 0.02, False),
            (20, "torch SDPA", 100.0, 0.3, False),  # from before rows were marked
            (30, "fasttfm", 200.0, 0.02, True),
            (30, "torch eager", 100.0, 0.02, False),
        )
    ]
    entries = load(write("kernels.jsonl", *rows))
    (claim,) = headline.claims(entries)
    assert claim.figure == (
        "2.00x as fast (geometric mean; 2.00x to 2.00x), slower in 0; times ±2%; 2 noisy shapes left out"
    )


def test_the_grid_has_every_shape_and_the_best_of_each_tool(write, record):
    def row(batch, beam, dtype, provider, p50, vocabulary=8_000, **more):
        shape = {"batch": batch, "beam": beam, "source": 27, "length": 27, "vocabulary": vocabulary}
        fields = {"group": "decoding", "case": "paper-base", "dtype": dtype, "shape": shape, "pass": "decode"}
        return record(provider=provider, p50=p50 * 1e3, **(fields | more))

    files = load(
        write(
            "a.jsonl",
            row(1, 1, "float32", "fasttfm", 30.0),
            row(1, 1, "float32", "fasttfm, a worker a core", 20.0),
            row(1, 1, "float32", "CTranslate2", 25.0, spread=0.003),
            row(32, 1, "float32", "fasttfm", 90.0),
            row(32, 1, "float32", "CTranslate2", 80.0),
            row(32, 1, "float32", "CTranslate2, a worker a core", 70.0),
            row(1, 4, "bfloat16", "fasttfm int8", 11.0),
            row(1, 4, "bfloat16", "CTranslate2 int8", 12.0, noisy=True),
            row(1, 1, "float32", "fasttfm", 1.0, case="another"),
            row(1, 1, "float32", "fasttfm", 99.0, vocabulary=32_000),
            row(1, 1, "float32", "CTranslate2", 1.0, vocabulary=32_000, status="wrong"),
        )
    )
    head, rows = tables.grid(tables.searches(suite(files)))
    assert head == ["sentences × words", "beam 1, fp32", "beam 4, bf16"]
    assert rows == [
        ["1 × 27", "fasttfm 20.0 ms ±2%<br>CTranslate2 25.0 ms ±0.3%", "too noisy to say"],
        ["32 × 27", "**fasttfm 90.0 ms ±2%**<br>CTranslate2 70.0 ms ±2%", ""],
        ["1 × 27, vocabulary 32,000", "fasttfm 99.0 ms ±2%<br>CTranslate2 wrong", ""],
    ]


def test_a_cell_says_where_the_machine_was_slower_than_in_the_rest_of_its_table(write, record):
    def row(batch, provider, speed):
        shape = {"batch": batch, "beam": 1, "source": 27, "length": 27, "vocabulary": 8_000}
        fields = {"group": "decoding", "case": "paper-base", "dtype": "float32", "shape": shape, "pass": "decode"}
        load = {} if speed is None else {"load": {"steal": 0.0, "others": 0.0, "gflop_per_s": speed}}
        return record(provider=provider, p50=9e3, **(fields | load))

    def rows(*speeds):
        made = [row(2**n, name, speed) for n, speed in enumerate(speeds) for name in ("fasttfm", "CTranslate2")]
        found = tables.searches(suite(load(write("a.jsonl", *made))))
        return [cell for _, cell in tables.grid(found)[1]], tables.searches_note(found)

    cells, note = rows(100.0, 108.0, 80.0, 100.0)
    assert [cell.endswith("<br>(machine at 80%)") for cell in cells] == [False, False, True, False]
    assert "Machine at N%" in note
    for speeds in ((100.0, 101.0), (None, None)):
        cells, note = rows(*speeds)
        assert "achine" not in "".join([*cells, note])


def test_a_claim_names_its_commit_and_what_was_noted(write):
    made = json.loads((RESULTS / "end-to-end-demo.jsonl").read_text().splitlines()[0])
    made |= {"corpus": "multi30k", "note": "other jobs ran"}
    made["machine"] |= {"commit": "ab" * 20, "uncommitted_changes": True, "time": "2026-11-20T00:00:00+00:00"}
    files = load(write("a.jsonl", made))
    origins = {headline.origin(claim.entries) for claim in headline.claims(files)}
    assert origins == {"abababa of 2026-11-20 with changes; other jobs ran"}


def test_smoke_rows_and_wrong_rows_claim_nothing(write, record):
    rows = [record(level="smoke"), record(level="smoke", provider="torch eager")]
    assert headline.claims(load(write("a.jsonl", *rows))) == []
    rows = [record(status="wrong"), record(provider="torch eager")]
    assert headline.claims(load(write("b.jsonl", *rows))) == []
