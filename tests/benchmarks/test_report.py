"""The report: every row is in it, whatever became of it; nothing is loaded from elsewhere; same records, same bytes."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from benchmarks.measure import machine
from benchmarks.measure.result_files import RESULTS, load
from benchmarks.report import document as report_document
from benchmarks.report import page as report
from benchmarks.report import plots as report_plots
from benchmarks.report import runs as report_runs
from benchmarks.report.plots import Axes, Bar, Point, Series
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
    return (out / "index.html").read_text(), (out / "report.md").read_text()


class _Page(HTMLParser):
    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.attributes += attributes
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name in ("href", "src")]

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(folder, tmp_path):
    page, _ = written(folder, tmp_path / "out")
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.links)
    assert "<script" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    for labels in (value for name, value in parsed.attributes if name == "aria-labelledby"):
        assert all(label in parsed.ids for label in labels.split())


def test_every_row_is_shown_whatever_became_of_it(folder, tmp_path):
    page, text = written(folder, tmp_path / "out")
    assert "10 rows of the suite: 7 timed, 1 refused by their provider, 1 wrong" in page
    assert "No available kernel &lt;here&gt;" in page
    for words in (
        "error 0.5 against the reference",
        "pip install xformers; needs a CUDA device",
        "kernels-cpu.jsonl:4",
    ):
        assert words in page
        assert words in text
    wrong = next(line for line in text.splitlines() if "| odd |" in line)
    assert "µs" not in wrong  # no time for wrong numbers


def test_a_cpu_is_called_a_cpu(folder, tmp_path, write, record):
    page, text = written(folder, tmp_path / "out")
    for made in (page, text):
        assert "CPU. Every time on this page was taken on a CPU. No GPU has run these kernels" in made
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert captions
    assert all("CPU: AMD EPYC, 2 cores" in caption for caption in captions)
    write("results/gpu.jsonl", record(machine={"device": "NVIDIA H200"}))
    page, _ = written(folder, tmp_path / "out")
    assert "Timed on NVIDIA H200; figures marked CPU on a CPU." in page


def test_figures_of_the_markdown_exist_and_stand_alone(folder, tmp_path):
    _, text = written(folder, tmp_path / "out")
    named = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert named
    assert {f"figures/{f.name}" for f in (tmp_path / "out" / "figures").iterdir()} == set(named)
    for name in named:
        root = ElementTree.fromstring((tmp_path / "out" / name).read_text())
        assert root.find("{http://www.w3.org/2000/svg}title").text
        assert root.find("{http://www.w3.org/2000/svg}desc").text


def test_predictions_and_floors_are_labelled(folder, tmp_path):
    page, text = written(folder, tmp_path / "out")
    for made in (page, text):
        assert "predicted, not measured" in made
        assert "790 TFLOP/s and 4.3 TB/s" in made
        assert "0.382 GFLOP a target token" in made


def test_scaling_is_drawn_for_sizes_with_two_values(folder, tmp_path):
    page, _ = written(folder, tmp_path / "out")
    assert "Scaling with length" in page
    assert "Scaling with batch" in page
    assert "sentences/s against sentences in a batch" in page


def test_scaling_with_length_keeps_batches_apart_that_vary_on_their_own(write, record):
    def row(batch, length, p50):
        fields = {"group": "decoding", "case": "search", "shape": {"batch": batch, "length": length}, "pass": "decode"}
        return record(p50=p50, **fields)

    both = [row(1, 8, 80.0), row(1, 27, 270.0), row(32, 8, 800.0), row(32, 27, 2700.0)]
    drawn = report.report_suite._curves
    suite = report.report_suite
    curves = drawn(load(write("a.jsonl", *both)).suite, suite._LENGTHS, suite._BATCHES, suite._per_token)
    assert [title for title, _ in curves] == ["search, decode; batch=1", "search, decode; batch=32"]
    assert [[point.x for point in series[0].points] for _, series in curves] == [[8, 27], [8, 27]]
    # where the batch follows from the length there is one curve
    curves = drawn(load(write("b.jsonl", both[0], both[3])).suite, suite._LENGTHS, suite._BATCHES, suite._per_token)
    assert [title for title, _ in curves] == ["search, decode"]


def test_ratios_of_providers_are_of_shared_cases(folder):
    results = report.report_suite.ratios(load(folder).suite)
    assert results["torch eager"] == [2.0]
    assert "xformers" not in results


def drawn(monkeypatch):
    """The matplotlib axes of every plot from now on."""
    seen = []
    kept = report_plots._new
    monkeypatch.setattr(report_plots, "_new", lambda *size: seen.append(kept(*size)) or seen[-1])
    return seen


def test_bars_show_values_and_their_spread(monkeypatch):
    figures = drawn(monkeypatch)
    rows = [
        Bar("fasttfm", 10, 9, 12, "10 µs", ours=True),
        Bar("other", 40, 38, 50, "40 µs"),
        Bar("none", None, shown="refused"),
    ]
    svg = ElementTree.fromstring(report_plots.bars("a", "t", rows, mark=5, mark_label="limit"))
    axes = figures[0][1]
    assert [bar.get_width() for bar in axes.patches] == [10, 40]
    spans = [segment[:, 0].tolist() for lines in axes.collections for segment in lines.get_segments()]
    assert spans == [[9, 12], [38, 50], [5, 5], [5, 5]]  # whiskers, then the mark at every bar
    assert svg.find("{http://www.w3.org/2000/svg}desc").text == "fasttfm: 10 µs; other: 40 µs; none: refused. limit"


def test_curves_and_roofs_have_the_numbers_of_their_series(monkeypatch):
    figures = drawn(monkeypatch)
    one = Series("one", [Point(1, 5, 4, 6), Point(2, 7, 6, 9)])
    report_plots.lines("a", "t", [one], Axes("x", "y"), level=1.0)
    line, level = figures[0][1].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 2], [5, 7])
    assert level.get_ydata() == [1.0, 1.0]
    report_plots.roofline("b", "t", [Series("one", [Point(10, 0.05)])], gb_per_s=10.0, tflop_per_s=0.1)
    roof, point = figures[1][1].lines[:2]
    assert roof.get_ydata().tolist() == pytest.approx(
        [50.0, 100.0, 100.0]
    )  # GFLOP/s: 5 FLOP a byte, the ridge, the top
    assert point.get_ydata().tolist() == [50.0]


def test_a_curve_of_equal_values_can_be_drawn():
    for log in (False, True):
        axes = Axes("x", "y", x_log=log, y_log=log)
        series = [Series("one", [Point(1, 5), Point(1, 5)])]
        ElementTree.fromstring(report_plots.lines("a", "t", series, axes))


def git(folder, *arguments):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        check=True,
        capture_output=True,
    )


def test_the_time_line_reads_the_history_and_committing_changes_nothing(tmp_path, write, record):
    def measured(p50, commit, day):
        return record(p50=p50, machine={"commit": commit * 40, "time": f"2026-01-0{day}T00:00:00+00:00"})

    git(tmp_path, "init", "-q")
    for p50, commit, day in ((100.0, "a", 1), (50.0, "b", 2)):
        write("results/kernels.jsonl", measured(p50, commit, day))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", "records")
    write("results/kernels.jsonl", measured(25.0, "c", 3))
    before = report_runs.time_line(load(tmp_path / "results"))
    assert [e.record["time_us"]["p50"] for e in report_runs.history(load(tmp_path / "results"))] == [100.0, 50.0, 25.0]
    svg = before.blocks[1].figures[0].svg
    assert "aaaaaaa: 1.00, bbbbbbb: 0.500, ccccccc: 0.250" in svg
    git(tmp_path, "commit", "-q", "-a", "-m", "records")
    assert report_runs.time_line(load(tmp_path / "results")) == before


def test_without_git_the_time_line_has_the_folder_alone(folder):
    section = report_runs.time_line(load(folder))
    assert any("a line needs two" in getattr(block, "words", "") for block in section.blocks)


def test_the_report_that_is_kept_is_the_one_of_the_records(tmp_path):
    page, text = written(RESULTS, tmp_path / "out")
    _Page().feed(page)
    if machine.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the report's time line is git's history of the records, which is not whole here")
    kept = (report.OUT / "report.md").read_text(encoding="utf-8")
    assert kept == text, "docs/benchmark-report has drifted from the records: run python -m benchmarks report --readme"
    figures = [{file.name for file in (folder / "figures").iterdir()} for folder in (report.OUT, tmp_path / "out")]
    assert figures[0] == figures[1]


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


def test_rows_of_ours_stand_out_and_figures_that_begin_with_the_name_do_not():
    rows = [["a", "fasttfm, packed, random order"], ["b", "fasttfm 621, torch.nn 3 tokens/s"], ["c", "torch.nn"]]
    page = report_document.html("t", [report_document.Table(("x", "provider"), rows)], [])
    assert page.count('<tr class="ours">') == 1
    assert '<tr class="ours"><td class="n">a<' in page


def test_a_missing_folder_and_one_that_cannot_be_written_are_refused(tmp_path, folder):
    with pytest.raises(UserError, match="none does not exist"):
        report.main(["--results", str(tmp_path / "none")])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file cannot be written to"):
        report.main(["--results", str(folder), "--out", str(tmp_path / "file")])


def test_a_peer_on_the_same_corpus_shares_its_plot_and_has_a_claim_of_its_own(tmp_path, write):
    line = (RESULTS / "end-to-end-demo.jsonl").read_text().splitlines()[0]
    ours = json.loads(line)
    write("runs/a.jsonl", ours, ours | {"corpus": "demo, torch.nn", "bleu": 12.5})
    page, _ = written(tmp_path / "runs", tmp_path / "out")
    assert page.count("demo: BLEU against minutes") == 1
    assert "torch.nn 12.50 (a.jsonl:2)" in page
    assert "with a plain torch.nn trainer" in page
