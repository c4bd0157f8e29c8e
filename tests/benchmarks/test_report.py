"""The report: every row is in it, whatever became of it; the same records give the same bytes."""

import json

import pytest

from benchmarks.measure.records import RESULTS, load
from benchmarks.report import page as report
from fasttfm.errors import UserError

ROOF = {"floor_us": 40.0, "share": 0.4, "ceilings": {"gb_per_s": 12.5, "tflop_per_s": 0.125}}
LONGER = {"B": 1, "H": 8, "L": 54, "D": 64, "causal": True}


@pytest.fixture
def folder(tmp_path, write, record):
    """A group on a CPU with every status, two lengths, and a decoding group with two batches."""
    rates = {"roofline": ROOF, "tflop_per_s": 0.01, "gb_per_s": 2.0}
    batches = [
        record(
            group="decoding",
            case="translate",
            shape={"batch": batch, "beam": 4},
            provider=provider,
            p50=1e6,
            throughput={"value": batch * rate, "unit": "sentences/s"},
            **{"pass": "decode"},
        )
        for batch in (1, 8)
        for provider, rate in (("fasttfm", 20.0), ("CTranslate2", 25.0))
    ]
    write(
        "results/kernels-cpu.jsonl",
        record(p50=100.0, **rates),
        record(p50=200.0, provider="torch eager", **rates),
        record(provider="SDPA flash", status="refused", reason="RuntimeError: No available kernel <here>"),
        record(provider="odd", status="wrong", reason="error 0.5 against the reference, 0.001 is allowed"),
        record(provider="xformers", status="absent", reason="pip install xformers; needs a CUDA device"),
        record(p50=150.0, shape=LONGER, **rates),
    )
    write("results/decoding-cpu.jsonl", *batches)
    return tmp_path / "results"


def written(folder, out):
    assert report.main(["--results", str(folder), "--out", str(out)]) == 0
    return (out / "report.md").read_text()


def test_every_row_is_shown_whatever_became_of_it(folder, tmp_path):
    text = written(folder, tmp_path / "out")
    for words in (
        "10 rows of the suite: 7 timed, 1 refused by their provider, 1 wrong",
        "No available kernel <here>",
        "error 0.5 against the reference",
        "pip install xformers; needs a CUDA device",
        "kernels-cpu.jsonl:4",
    ):
        assert words in text
    wrong = next(line for line in text.splitlines() if "| odd |" in line)
    assert "µs" not in wrong  # no time for wrong numbers


def test_a_noisy_row_is_called_so(tmp_path, write, record):
    write("results/a.jsonl", record(noisy=True), record(provider="torch eager", spread=0.2))
    text = written(tmp_path / "results", tmp_path / "out")
    assert text.count("| timed, noisy |") == 2


def test_a_cpu_is_called_a_cpu(folder, tmp_path, write, record):
    text = written(folder, tmp_path / "out")
    assert "CPU. Every time on this page was taken on a CPU. No GPU has run these kernels" in text
    assert "### CPU: AMD EPYC, 2 cores, 1 thread, float32" in text
    write("results/gpu.jsonl", record(machine={"device": "NVIDIA H200"}))
    assert "Timed on NVIDIA H200; figures marked CPU on a CPU." in written(folder, tmp_path / "out")


def test_each_provider_stands_beside_ours(folder, tmp_path):
    text = written(folder, tmp_path / "out")
    assert "| torch eager | 2.00x | 2.00x | 2.00x | 1 |" in text
    assert "| CTranslate2 | 1.00x | 1.00x | 1.00x | 2 |" in text


def test_ratios_of_providers_are_of_shared_cases(folder):
    results = report.ratios(load(folder).suite)
    assert results["torch eager"] == [2.0]
    assert "xformers" not in results


def test_the_report_that_is_kept_is_the_one_of_the_records(tmp_path):
    text = written(RESULTS, tmp_path / "out")
    kept = (report.OUT / "report.md").read_text(encoding="utf-8")
    assert kept == text, "docs/benchmark-report has drifted from the records: run python -m benchmarks report --readme"


BAD = [
    ("", "holds no records"),
    ("{\n", r"a\.jsonl, line 1, is no record of this suite"),
    ('{"schema": 2}\n', r"a\.jsonl, line 1, .*record.schema: 1 was expected"),
    ('{"x": 1}\n', r"a\.jsonl, line 1, .*no known kind"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_records_are_named_with_file_and_line(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        report.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_and_one_that_cannot_be_written_are_refused(tmp_path, folder):
    with pytest.raises(UserError, match="none does not exist"):
        report.main(["--results", str(tmp_path / "none")])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file cannot be written to"):
        report.main(["--results", str(folder), "--out", str(tmp_path / "file")])


def test_a_peer_on_the_same_corpus_has_a_claim_of_its_own(tmp_path, write):
    line = (RESULTS / "end-to-end-demo.jsonl").read_text().splitlines()[0]
    ours = json.loads(line)
    write("runs/a.jsonl", ours, ours | {"corpus": "demo, torch.nn", "bleu": 12.5})
    text = written(tmp_path / "runs", tmp_path / "out")
    assert "with a plain torch.nn trainer" in text
