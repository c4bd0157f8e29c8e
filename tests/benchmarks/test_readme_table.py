"""README says what the records say, and nothing else."""

import json
import re

import pytest

from benchmarks.__main__ import main
from benchmarks.measure.records import RESULTS, load
from benchmarks.report import page, pictures, readme
from benchmarks.report.rows import quiet, suite
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
    text = readme.README.read_text(encoding="utf-8")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(page, "OUT", tmp_path / "report")
    monkeypatch.setattr(pictures, "OUT", tmp_path)
    readme.README.write_text(text.replace("0.70x", "1.70x"), encoding="utf-8")
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
    sets = {"instruction_sets": ["avx2"]}
    shape = {"batch": 1, "beam": 1, "source": 27, "length": 27, "vocabulary": 8_000}
    rows = [
        record(p50=time, provider=provider, group="decoding", case="paper-base", shape=shape, machine=sets)
        | {"pass": "decode"}
        for provider, time in (("fasttfm, a worker a core", 200.0), ("CTranslate2", 100.0))
    ]
    blocks = drawn(tmp_path, load(write("a.jsonl", *rows)))
    assert "**0.50x** on AMD EPYC with AVX2 (2026-01-02), worst shape 0.50x" in blocks["figures"]
    assert "- Slower than the fastest other: search, fp32 on AMD EPYC with AVX2 (2026-01-02) 0.50x" in blocks["figures"]
    assert "No GPU has run" in blocks["status"]


def ratios(file):
    """How many times as fast ours is as the fastest other, in each case that counts."""
    return quiet(suite(load(file))).ratio.tolist()


def test_ours_stands_beside_the_fastest_other_provider(write, record):
    rows = []
    for length, ours, eager, other in ((10, 200.0, 400.0, 100.0), (20, 100.0, 800.0, 900.0)):
        shape = {"B": 1, "L": length}
        rows += [
            record(p50=time, shape=shape, provider=provider)
            for provider, time in (("fasttfm", ours), ("torch eager", eager), ("torch SDPA", other))
        ]
    assert ratios(write("kernels.jsonl", *rows)) == [0.5, 8.0]


@pytest.mark.parametrize(("theirs", "ratio"), [("torch.nn", 0.5), ("torch.nn, CUDA graph", 4.0)])
def test_a_graph_of_ours_counts_beside_a_graph_of_theirs(theirs, ratio, write, record):
    times = (("fasttfm", 200.0), ("fasttfm, CUDA graph", 25.0), (theirs, 100.0))
    rows = [record(group="training_step", p50=time, provider=provider) for provider, time in times]
    assert ratios(write("training_step.jsonl", *rows)) == [ratio]


def test_a_case_with_a_noisy_row_does_not_count(write, record):
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
    assert ratios(write("kernels.jsonl", *rows)) == [2.0]


def test_smoke_rows_and_wrong_rows_do_not_count(write, record):
    for fields in ({"level": "smoke"}, {"status": "wrong"}):
        assert ratios(write("a.jsonl", record(**fields), record(provider="torch eager"))) == []


def test_a_whole_run_names_its_commit_and_what_was_noted(write):
    made = json.loads((RESULTS / "end-to-end-demo.jsonl").read_text().splitlines()[0])
    made |= {"note": "other jobs ran"}
    made["machine"] |= {"commit": "ab" * 20, "uncommitted_changes": True, "time": "2026-11-20T00:00:00+00:00"}
    entries = load(write("a.jsonl", made))
    text = page.machine_page("a machine", entries, entries, charted=False)
    assert "| `--preset demo` | abababa with changes of 2026-11-20; other jobs ran | 1,400 | 1.4 |" in text
