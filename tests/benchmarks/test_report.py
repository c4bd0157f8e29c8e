"""The report, README's blocks and the pictures match the records; what counts in them, and what is marked.

The form of pages, index and blocks is held by the kept ones: a change makes them differ from the records.
"""

import re

import pytest

from benchmarks.__main__ import main
from benchmarks.measure.machine import machine_name, slug
from benchmarks.measure.records import RESULTS, load
from benchmarks.report import page as report
from benchmarks.report import pictures, readme, seeds
from benchmarks.report.rows import quiet, suite
from fasttfm.errors import UserError


def test_readme_the_report_and_the_pictures_match_the_records(capsys):
    assert main(["check"]) == 0, capsys.readouterr().out


def test_stale_files_are_named(tmp_path, monkeypatch, capsys):
    """README and a page with other text, charts and pictures missing or with other numbers."""
    text = readme.README.read_text(encoding="utf-8")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "OUT", tmp_path / "report")
    monkeypatch.setattr(pictures, "OUT", tmp_path)
    readme.README.write_text(text.replace("0.70x", "1.70x"), encoding="utf-8")
    entries = load(RESULTS)
    pictures.save(tmp_path / "roofline.png", *pictures.roofline(entries))
    pictures.save(tmp_path / "training.png", *pictures.roofline(entries))
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    for name in ("README.md", "report/nvidia-h200.md", "report/nvidia-h200.png", "training.png", "host-time.png"):
        assert f"{tmp_path / name} differs from the records" in out
    assert "roofline.png" not in out


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


@pytest.fixture
def folder(tmp_path, write, record, end_to_end):
    """Records of a CPU: every status, a row of level smoke, a noisy one; of another a run with uncommitted changes."""
    roof = {"floor_us": 40.0, "share": 0.4, "ceilings": {"gb_per_s": 12.5, "tflop_per_s": 0.125}}
    rates = {"roofline": roof, "tflop_per_s": 0.01, "gb_per_s": 2.0}
    longer = {"shape": {"B": 1, "H": 8, "L": 54, "D": 64, "causal": True}}
    write(
        "results/kernels-cpu.jsonl",
        record(p50=100.0, peak_bytes=3 << 20, **rates),
        record(p50=200.0, provider="torch eager", **rates),
        record(provider="SDPA flash", status="refused", reason="RuntimeError: No available kernel <here>"),
        record(provider="odd", status="wrong", reason="error 0.5 against the reference, 0.001 is allowed"),
        record(provider="xformers", status="absent", reason="pip install xformers; needs a CUDA device"),
        record(p50=150.0, level="smoke", noisy=True, **rates, **longer),
        record(p50=120.0, provider="torch eager", **rates, **longer),
    )
    changed = {
        "processor": "Another",
        "commit": "ab" * 20,
        "uncommitted_changes": True,
        "time": "2026-11-20T00:00:00+00:00",
    }
    write("results/runs.jsonl", end_to_end(note="other jobs ran", machine=changed))
    return tmp_path / "results"


def test_a_page_has_a_line_per_case_what_is_doubtful_and_why_rows_have_no_time(folder, tmp_path):
    assert report.main(["--results", str(folder), "--out", str(tmp_path / "out")]) == 0
    pages = [tmp_path / "out" / f"{name}-2-cores.md" for name in ("amd-epyc", "another")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    lines = [line for line in text.splitlines() if line.startswith("| attention ")]
    assert [line.split(" | ")[2:] for line in lines] == [
        ["100 µs ±2%", "torch eager 200 µs", "2.00x", "40%", "3.00", " |"],
        ["**150 µs ±2%**", "torch eager 120 µs", "0.80x, noisy", "40%", "", " |"],
    ]
    for words in (
        "7 rows: 4 timed, 1 refused, 1 wrong, 1 absent",
        "No rows of the suite",
        "All times were measured on a CPU. No GPU has run these kernels",
        "their times are meaningless",
        "| SDPA flash | refused | 1 | RuntimeError: No available kernel <here> |",
        "| odd | wrong | 1 | error 0.5 against the reference, 0.001 is allowed |",
        "| xformers | absent | 1 | pip install xformers; needs a CUDA device |",
        "| `--preset demo` | abababa with changes of 2026-11-20; other jobs ran | 1,000 | 4.0 |",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--results", "a.jsonl", r"a\.jsonl, line 1, .*record.schema: 1 was expected"),
        ("--results", "none", "none does not exist"),
        ("--out", "a.jsonl/none", r"a\.jsonl/none cannot be written to"),
    ],
)
def test_what_cannot_be_used_is_named_and_no_page_is_written(flag, name, message, tmp_path, folder):
    (tmp_path / "a.jsonl").write_text('{"schema": 2}\n')
    paths = {"--results": folder, "--out": tmp_path / "out"} | {flag: tmp_path / name}
    with pytest.raises(UserError, match=message):
        report.main([str(word) for pair in paths.items() for word in pair])
    assert not (tmp_path / "out").exists()


def test_a_line_has_the_mean_the_worst_shape_and_the_number_of_slower_shapes(write, record):
    shape = {"B": 4, "H": 8, "L": 27, "mask": "lengths", "dropout": 0.1}
    fields = {"shape": shape, "machine": {"device": "A GPU", "chip": "sm_90"}}
    rows = [
        record(p50=time, provider=provider, noisy=noisy, **{"pass": name}, **fields)
        for name, times, noisy in (
            ("training forward", {"fasttfm": 50.0, "torch eager": 400.0, "SDPA": 200.0}, False),
            ("backward", {"fasttfm": 200.0, "SDPA": 100.0}, False),
            ("forward", {"fasttfm": 200.0, "SDPA": 1.0}, True),
        )
        for provider, time in times.items()
    ]
    markers = "".join(f"<!-- {name}: here -->\nold\n<!-- end -->\n" for name in ("status", "figures", "measured"))
    entries = load(write("a.jsonl", *rows))
    with pytest.raises(UserError, match="README lacks the block chips"):
        readme.updated(markers, entries)
    text = readme.updated(f"before\n{markers}<!-- chips: here -->\nold\n<!-- end -->\nafter\n", entries)
    assert re.fullmatch(r"(?s)before\n<!-- status: .*<!-- end -->\nafter\n", text)
    assert "old" not in text
    worst = "0.50x: B=4 H=8 L=27 mask=lengths dropout=0.1, backward; SDPA"
    assert f"| Attention with dropout, fp32 | A GPU | 1.41x | {worst} | 1 of 2 | 2026-01-02 |" in text
    assert "beside SDPA: **1.41x** on A GPU, worst shape 0.50x" in text


SHORT, MIDDLE, LONG = ({"shape": {"B": 1, "L": length}} for length in (10, 20, 30))
OURS, GRAPH, EAGER, SDPA = "fasttfm", "fasttfm, CUDA graph", "torch eager", "torch SDPA"


@pytest.mark.parametrize(
    ("rows", "ratios"),
    [
        (
            [
                *((OURS, 200, SHORT), (EAGER, 400, SHORT), (SDPA, 100, SHORT)),
                *((OURS, 100, LONG), (EAGER, 800, LONG), (SDPA, 900, LONG)),
            ],
            [0.5, 8.0],
        ),
        ([(OURS, 200, {}), (GRAPH, 25, {}), ("torch.nn", 100, {})], [0.5]),
        ([(OURS, 200, {}), (GRAPH, 25, {}), ("torch.nn, CUDA graph", 100, {})], [4.0]),
        (
            [
                *((OURS, 200, SHORT), (EAGER, 400, SHORT), (OURS, 200, MIDDLE), (EAGER, 400, MIDDLE)),
                (SDPA, 100, MIDDLE | {"spread": 0.3}),  # before the field `noisy`; ours would win beside eager alone
                *((OURS, 200, LONG | {"noisy": True}), (EAGER, 100, LONG)),
            ],
            [2.0],
        ),
        ([(OURS, 100, {"level": "smoke"}), (EAGER, 100, {})], []),
        ([(OURS, 100, {"status": "wrong"}), (EAGER, 100, {})], []),
    ],
    ids=["the fastest other", "no other graph", "another graph", "noisy", "smoke", "wrong"],
)
def test_ours_is_compared_with_the_fastest_other_in_cases_that_count(rows, ratios, write, record):
    file = write("a.jsonl", *(record(provider=name, p50=float(time), **fields) for name, time, fields in rows))
    assert quiet(suite(load(file))).ratio.tolist() == ratios


def runs(end_to_end, *scores, **fields):
    """Records of a speedrun; scores: seed and BLEU of each run, the oldest first."""
    command = "fasttfm train --preset multi30k-fast --threads 2 --seed"
    return [
        end_to_end(
            "multi30k-fast", train_command=f"{command} {seed}", bleu=bleu, minutes_of={"train": 18.0, "score": 1.5},
            machine={"time": f"2026-11-{10 + number}T00:00:00+00:00"}, **fields,
        )
        for number, (seed, bleu) in enumerate(scores)
    ]  # fmt: skip


def test_a_mean_is_of_the_newest_run_of_each_seed(write, end_to_end):
    entries = load(write("a.jsonl", *runs(end_to_end, (1, 9.0), (1, 39.0), ("1 --seed 2", 40.0), (3, 39.5))))
    assert [mean.words() for mean in seeds.means(entries)] == [
        "**39.50 BLEU** in 19.5 minutes from the text, mean of 3 seeds (39.00 to 40.00)"
    ]
    text = report.machine_page("a machine", entries, entries, charted=False)
    assert "\n- `--preset multi30k-fast --threads 2`: **39.50 BLEU** in" in text
    assert "[speedrun](docs/speedrun.md) on two CPU cores: **39.50 BLEU** in" in readme.figures(entries)


def test_two_seeds_and_another_test_set_make_no_mean_together(write, end_to_end):
    two, other = runs(end_to_end, (1, 39.0), (2, 40.0)), runs(end_to_end, (3, 30.0), test="test_2016_flickr")
    entries = load(write("a.jsonl", *two, *other))
    assert seeds.means(entries) == []
    assert "multi30k-fast --threads 2 --seed 3`, scored on test_2016_flickr |" in report.machine_page(
        "a machine", entries, entries, charted=False
    )
