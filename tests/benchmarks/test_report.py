"""The report, README's blocks and the pictures match the records; what counts in them, and what is marked.

The form of pages, index and blocks is held by the kept ones: a change makes them differ from the records.
"""

import re

import pytest

from benchmarks.__main__ import main
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


def test_a_mean_is_of_the_newest_run_of_each_seed(write, end_to_end, tmp_path):
    of_another_test_set = runs(end_to_end, (4, 30.0), test="test_2016_flickr")
    scored = runs(end_to_end, (1, 9.0), (1, 39.0), ("1 --seed 2", 40.0), (3, 39.5))
    file = write("a.jsonl", *scored, *of_another_test_set)
    entries = load(file)
    assert [mean.words() for mean in seeds.means(entries)] == [
        "**39.50 BLEU** in 19.5 minutes from the text, mean of 3 seeds (39.00 to 40.00)"
    ]
    assert main(["report", "--results", str(file), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "amd-epyc-2-cores.md").read_text(encoding="utf-8")
    assert "\n- `--preset multi30k-fast --threads 2`: **39.50 BLEU** in" in text
    assert "[speedrun](docs/speedrun.md) on two CPU cores: **39.50 BLEU** in" in readme.figures(entries)
