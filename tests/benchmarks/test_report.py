"""The report: a short page per machine, with all cases and the status of all rows."""

import csv
import io
import re

import pytest

from benchmarks.measure.machine import machine_name, slug
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
        record(group="decoding", case="translate", shape={"batch": batch}, provider=provider, **{"pass": "decode"})
        for batch in (1, 8)
        for provider in ("fasttfm", "CTranslate2")
    ]
    write(
        "results/kernels-cpu.jsonl",
        record(p50=100.0, peak_bytes=3 << 20, **rates),
        record(p50=200.0, provider="torch eager", **rates),
        record(provider="SDPA flash", status="refused", reason="RuntimeError: No available kernel <here>"),
        record(provider="odd", status="wrong", reason="error 0.5 against the reference, 0.001 is allowed"),
        record(provider="xformers", status="absent", reason="pip install xformers; needs a CUDA device"),
        record(p50=150.0, shape=LONGER, **rates),
    )
    write("results/decoding-cpu.jsonl", *batches)
    return tmp_path / "results"


def written(folder, out):
    """Name -> text of all pages."""
    assert report.main(["--results", str(folder), "--out", str(out)]) == 0
    return {path.stem: path.read_text(encoding="utf-8") for path in out.glob("*.md")}


def test_a_page_has_a_line_per_case_and_the_reasons_of_rows_without_a_time(folder, tmp_path):
    text = written(folder, tmp_path / "out")["amd-epyc-2-cores"]
    assert "10 rows: 7 timed, 1 refused, 1 wrong, 1 absent" in text
    lines = [line for line in text.splitlines() if line.startswith("| attention ")]
    assert [line.split(" | ")[2:] for line in lines] == [
        ["100 µs ±2%", "torch eager 200 µs", "2.00x", "40%", "3.00", " |"],
        ["150 µs ±2%", "", "", "40%", "", " |"],
    ]
    for words in (
        "| SDPA flash | refused | 1 | RuntimeError: No available kernel <here> |",
        "| odd | wrong | 1 | error 0.5 against the reference, 0.001 is allowed |",
        "| xformers | absent | 1 | pip install xformers; needs a CUDA device |",
        "[Kernels, fp32, 1 thread](#kernels-fp32-1-thread)",
        "## Kernels, fp32, 1 thread",
    ):
        assert words in text


def test_noisy_cases_and_smoke_runs_are_marked(tmp_path, write, record):
    write("results/a.jsonl", record(noisy=True, level="smoke"), record(provider="torch eager", p50=80.0))
    text = written(tmp_path / "results", tmp_path / "out")["amd-epyc-2-cores"]
    assert "| **100 µs ±2%** | torch eager 80.0 µs | 0.80x, noisy |" in text
    assert "their times are meaningless" in text


def test_all_rows_can_be_printed_as_csv(folder, tmp_path, capsys):
    assert report.main(["--results", str(folder), "--all", "--out", str(tmp_path / "out")]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == 10
    assert (lines[4]["file"], lines[4]["time_us.p50"]) == ("kernels-cpu.jsonl", "100.0")
    assert not (tmp_path / "out").exists()


def test_every_machine_has_a_page_and_every_page_says_which_devices_were_timed(folder, tmp_path, write, record):
    pages = written(folder, tmp_path / "out")
    assert all("All times were measured on a CPU. No GPU has run these kernels" in text for text in pages.values())
    write("results/gpu.jsonl", record(machine={"device": "NVIDIA H200"}))
    pages = written(folder, tmp_path / "out")
    assert set(pages) == {"report", "nvidia-h200", "amd-epyc-2-cores"}
    assert all("Timed on NVIDIA H200; rows marked CPU were measured on a CPU." in text for text in pages.values())
    assert (
        "| [CPU: AMD EPYC, 2 cores](amd-epyc-2-cores.md) | 2026-01-02 | kernels, decoding | 10 rows" in pages["report"]
    )


def test_memory_of_a_cuda_graph_measured_without_its_pool_is_not_shown(tmp_path, write, record):
    fields = {"group": "training_step", "provider": "fasttfm, CUDA graph", "pass": "step"}
    gpu = {"device": "NVIDIA H200"}
    old = record(peak_bytes=303_104, launches=34, machine=gpu, shape={"rows": 1}, **fields)
    new = record(peak_bytes=5 << 30, machine=gpu, shape={"rows": 2}, **fields)
    write("results/a.jsonl", old, new)
    text = written(tmp_path / "results", tmp_path / "out")["nvidia-h200"]
    cells = [line.split(" | ")[6] for line in text.splitlines() if line.startswith("| attention rows=")]
    assert cells == ["", "5,120"]
    assert "Memory of CUDA graphs is left out: it was measured without the graph's pool." in text


def test_the_kept_pages_are_short_and_in_the_sites_contents():
    kept = {path.stem: path.read_text(encoding="utf-8") for path in report.OUT.glob("*.md")}
    machines = {machine_name(entry.machine) for entry in load(RESULTS)}
    assert set(kept) == {"report", *map(slug, machines)}
    contents = (report.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name, text in kept.items():
        assert text.count("\n") <= 300, name
        assert f"benchmark-report/{name}.md" in contents
        for picture in re.findall(r"\]\((\S+\.png)\)", text):
            assert (report.OUT / picture).stat().st_size > 1_000


def test_invalid_records_are_named_and_no_page_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"schema": 2}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 1, .*record.schema: 1 was expected"):
        report.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "message"), [("--results", "none does not exist"), ("--out", r"file/none cannot be written to")]
)
def test_folders_that_cannot_be_used_are_named(flag, message, tmp_path, folder):
    (tmp_path / "file").write_text("")
    paths = {"--results": folder, "--out": tmp_path / "out"} | {flag: tmp_path / "file" / "none"}
    with pytest.raises(UserError, match=message):
        report.main([str(word) for pair in paths.items() for word in pair])


def test_a_peer_on_the_same_corpus_has_its_own_line(tmp_path, write, end_to_end):
    peer = "python -m benchmarks.peers.torch_nn_trainer --preset demo"
    write("runs/a.jsonl", end_to_end(), end_to_end("demo, torch.nn", train_command=peer))
    text = written(tmp_path / "runs", tmp_path / "out")["amd-epyc-2-cores"]
    assert "| `torch_nn_trainer --preset demo` |" in text
