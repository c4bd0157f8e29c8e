"""README's blocks, the report and the pictures match the records."""

import re

import pytest

from benchmarks.__main__ import main
from benchmarks.measure.records import RESULTS, load
from benchmarks.report import page, pictures, readme
from benchmarks.report.rows import quiet, suite
from fasttfm.errors import UserError


@pytest.fixture
def blocks(write):
    """blocks(*rows): name -> text of README's blocks for these records."""

    def make(*rows):
        names = ("status", "figures", "measured", "chips")
        markers = "\n".join(f"<!-- {name}: here -->\nold\n<!-- end -->" for name in names)
        text = readme.updated(f"before\n{markers}\nafter\n", load(write("a.jsonl", *rows)))
        assert text.startswith("before\n")
        assert text.endswith("<!-- end -->\nafter\n")
        assert "old" not in text
        return dict(re.findall(r"<!-- (\w+): here -->\n(.*?)<!-- end -->", text, re.DOTALL))

    return make


def test_readme_the_report_and_the_pictures_match_the_records(capsys):
    assert main(["check"]) == 0, capsys.readouterr().out


def test_stale_files_are_named(tmp_path, monkeypatch, capsys):
    """README and a page with other text, charts and pictures missing or with other numbers."""
    text = readme.README.read_text(encoding="utf-8")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(page, "OUT", tmp_path / "report")
    monkeypatch.setattr(pictures, "OUT", tmp_path)
    readme.README.write_text(text.replace("0.70x", "1.70x"), encoding="utf-8")
    entries = load(RESULTS)
    pictures.save(tmp_path / "roofline.png", *pictures.roofline(entries))
    pictures.save(tmp_path / "training.png", *pictures.roofline(entries))
    assert page.main(["--check"]) == 1
    out = capsys.readouterr().out
    for name in ("README.md", "report/nvidia-h200.md", "report/nvidia-h200.png", "training.png", "host-time.png"):
        assert f"{tmp_path / name} differs from the records" in out
    assert "roofline.png" not in out


def test_a_missing_block_is_named():
    with pytest.raises(UserError, match="README lacks the block chips"):
        readme.updated("no markers", [])


def test_a_line_has_the_mean_the_worst_shape_and_the_number_of_slower_shapes(blocks, record):
    shape = {"B": 4, "H": 8, "L": 27, "mask": "lengths", "dropout": 0.1}
    machine = {"device": "A GPU", "chip": "sm_90"}
    rows = [
        record(p50=time, shape=shape, provider=provider, noisy=noisy, machine=machine, **{"pass": name})
        for name, times, noisy in (
            ("training forward", {"fasttfm": 50.0, "torch eager": 400.0, "SDPA": 200.0}, False),
            ("backward", {"fasttfm": 200.0, "SDPA": 100.0}, False),
            ("forward", {"fasttfm": 200.0, "SDPA": 1.0}, True),
        )
        for provider, time in times.items()
    ]
    readme = blocks(*rows)
    worst = "0.50x: B=4 H=8 L=27 mask=lengths dropout=0.1, backward; SDPA"
    assert f"| Attention with dropout, fp32 | A GPU | 1.41x | {worst} | 1 of 2 | 2026-01-02 |" in readme["measured"]
    assert "beside SDPA: **1.41x** on A GPU, worst shape 0.50x" in readme["figures"]
    assert "H100, H200 (sm_90) | kernels (GPU)" in readme["chips"]
    assert "Timed on A GPU" in readme["status"]


def test_a_cpu_has_the_date_and_losses_are_listed(blocks, record):
    fields = {"group": "decoding", "case": "paper-base", "pass": "decode", "machine": {"instruction_sets": ["avx2"]}}
    times = (("fasttfm, a worker a core", 200.0), ("CTranslate2", 100.0))
    readme = blocks(*(record(p50=time, provider=provider, **fields) for provider, time in times))
    assert "**0.50x** on AMD EPYC with AVX2 (2026-01-02), worst shape 0.50x" in readme["figures"]
    assert "- Slower than the fastest other: search, fp32 on AMD EPYC with AVX2 (2026-01-02) 0.50x" in readme["figures"]
    assert "No GPU has run" in readme["status"]


@pytest.fixture
def ratios(write, record):
    """ratios((provider, time, fields), ...): speed over the fastest other, of each case that counts."""

    def make(*rows):
        file = write("a.jsonl", *(record(provider=name, p50=time, **fields) for name, time, fields in rows))
        return quiet(suite(load(file))).ratio.tolist()

    return make


SHORT, MIDDLE, LONG = ({"shape": {"B": 1, "L": length}} for length in (10, 20, 30))


def test_ours_is_compared_with_the_fastest_other_provider(ratios):
    found = ratios(
        ("fasttfm", 200.0, SHORT), ("torch eager", 400.0, SHORT), ("torch SDPA", 100.0, SHORT),
        ("fasttfm", 100.0, LONG), ("torch eager", 800.0, LONG), ("torch SDPA", 900.0, LONG),
    )  # fmt: skip
    assert found == [0.5, 8.0]


@pytest.mark.parametrize(("theirs", "ratio"), [("torch.nn", 0.5), ("torch.nn, CUDA graph", 4.0)])
def test_our_graph_only_counts_beside_another_graph(theirs, ratio, ratios):
    assert ratios(("fasttfm", 200.0, {}), ("fasttfm, CUDA graph", 25.0, {}), (theirs, 100.0, {})) == [ratio]


def test_a_case_with_a_noisy_row_does_not_count(ratios):
    """Dropping only the noisy row would compare ours with the second fastest."""
    found = ratios(
        ("fasttfm", 200.0, SHORT), ("torch eager", 400.0, SHORT), ("fasttfm", 200.0, MIDDLE),
        ("torch eager", 400.0, MIDDLE), ("torch SDPA", 100.0, MIDDLE | {"spread": 0.3}),  # before the field `noisy`
        ("fasttfm", 200.0, LONG | {"noisy": True}), ("torch eager", 100.0, LONG),
    )  # fmt: skip
    assert found == [2.0]


@pytest.mark.parametrize("fields", [{"level": "smoke"}, {"status": "wrong"}])
def test_smoke_rows_and_wrong_rows_do_not_count(fields, ratios):
    assert ratios(("fasttfm", 100.0, fields), ("torch eager", 100.0, {})) == []


def test_an_end_to_end_run_has_its_commit_and_note(write, end_to_end):
    machine = {"commit": "ab" * 20, "uncommitted_changes": True, "time": "2026-11-20T00:00:00+00:00"}
    entries = load(write("a.jsonl", end_to_end(note="other jobs ran", machine=machine)))
    text = page.machine_page("a machine", entries, entries, charted=False)
    assert "| `--preset demo` | abababa with changes of 2026-11-20; other jobs ran | 1,000 | 4.0 |" in text
