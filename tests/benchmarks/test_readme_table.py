"""README says what the records say, and nothing else."""

import json

import pytest

from benchmarks.measure.records import RESULTS, load
from benchmarks.report import headline, page, tables
from benchmarks.report.rows import suite
from fasttfm.errors import UserError


def test_readme_is_as_the_records_have_it():
    text = page.README.read_text(encoding="utf-8")
    assert page.updated(text, load(RESULTS)) == text, (
        "README's table has drifted from benchmarks/results: run python -m benchmarks report --readme"
    )


def test_a_changed_record_makes_readme_drift(tmp_path):
    for file in RESULTS.glob("end-to-end-*.jsonl"):
        (tmp_path / file.name).write_text(file.read_text())
    text = page.updated(page.README.read_text(encoding="utf-8"), load(tmp_path))
    file = tmp_path / "end-to-end-multi30k.jsonl"
    file.write_text(file.read_text().replace('"bleu": 3', '"bleu": 2'))
    assert page.updated(text, load(tmp_path)) != text


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
    assert not claim.leads  # two of three cases are noisy
    assert headline.leading_machine(suite(entries), "kernels") is None


def test_the_newest_machine_leads_unless_it_was_busy(write, record):
    def rows(processor, day, spread):
        machine = {"processor": processor, "time": f"2026-01-0{day}T00:00:00+00:00"}
        return [record(p50=9.0, provider=name, spread=spread, machine=machine) for name in ("fasttfm", "torch eager")]

    entries = load(write("a.jsonl", *rows("old", 1, 0.02), *rows("new", 2, 0.02), *rows("busy", 3, 0.3)))
    leads = [headline.leading_machine(suite(entries), "kernels", cpu) for cpu in (None, True, False)]
    assert leads == ["CPU: new, 2 cores", "CPU: new, 2 cores", None]
    assert [claim.what.rpartition(": ")[2] for claim in headline.claims(entries) if claim.leads] == ["new, 2 cores"]


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
    text = page.readme_table(files)
    assert "| 32 × 27 | **fasttfm 90.0 ms ±2%**" in text
    assert "Searches with paper-base, CPU: AMD EPYC, 2 cores, 0123456 of 2026-01-02." in text


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
    assert "; commit abababa of 2026-11-20 with changes; other jobs ran" in page.readme_table(files)


@pytest.mark.parametrize("ours", [{"level": "smoke"}, {"status": "wrong"}, None])
def test_smoke_rows_wrong_rows_and_a_row_alone_claim_nothing(ours, write, record):
    others = [record(provider="torch eager", **({"level": "smoke"} if ours == {"level": "smoke"} else {}))]
    files = load(write("a.jsonl", *([record(**ours)] if ours else []), *others))
    assert headline.claims(files) == []
    assert not [mark for mark in ("\n|", "\n-", "BLEU") if mark in page.readme_table(files)]


def test_the_table_replaces_what_stands_between_the_markers_and_nothing_else(write, record):
    files = load(write("a.jsonl", record()))
    text = page.updated(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", files)
    assert text.startswith(f"before\n{page.BEGIN}\nThe [benchmark report]")
    assert text.endswith(f"{page.END}\nafter\n")
    assert "old" not in text
    assert page.updated(text, files) == text
    with pytest.raises(UserError, match="there is no place to write to"):
        page.updated("no markers", files)


def test_kernels_on_a_gpu_stand_beside_the_fastest_other_with_losses_bold_and_noise_named(write, record):
    shape = {"B": 4, "H": 8, "L": 27, "S": 27, "D": 64, "mask": "lengths", "dropout": 0.1}
    rows = []
    for name, times, noisy in (
        ("training forward", {"fasttfm": 50.0, "torch eager": 400.0, "SDPA": 100.0}, False),
        ("backward", {"fasttfm": 200.0, "SDPA": 100.0}, False),
    ):
        for provider, time in times.items():
            row = record(p50=time, shape=shape, provider=provider, noisy=noisy)
            row |= {"case": "attention", "pass": name, "machine": {**row["machine"], "device": "A GPU"}}
            rows.append(row)
    text = page.readme_table(load(write("kernels.jsonl", *rows)))
    cells = "50.0 µs ±2%<br>SDPA 100 µs | **200 µs ±2%**<br>SDPA 100 µs"
    assert f"| attention: 4 × 8 heads, 27 × 64, lengths, dropout 0.1 | {cells} |" in text
    rows[-1]["noisy"] = True
    assert "| too noisy to say |" in page.readme_table(load(write("kernels.jsonl", *rows)))
