"""docs/benchmarks.md: its examples run and are short, its tables are complete."""

import re
from pathlib import Path

import torch

from benchmarks.measure import harness, machine, records
from benchmarks.measure.case import Setting
from benchmarks.measure.clocks import Clocks

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SMOKE = Setting(device=torch.device("cpu"), dtype=torch.float32, level="smoke")


def test_the_example_of_a_case_runs():
    names = {}
    exec(compile(BLOCKS[0], "docs/benchmarks.md", "exec"), names)
    case = names["softmax"](SMOKE)
    rows = harness.run(case, SMOKE, Clocks(SMOKE.device).of(case), 0.0, machine=machine.describe(), least_rounds=1)
    for row in rows:
        records.validate(row)
    assert {row["provider"]: row["status"] for row in rows} == {"torch eager": "timed", "exponentials": "timed"}


def test_the_example_of_a_provider_runs(capsys):
    names = {}
    exec(compile(BLOCKS[1], "docs/benchmarks.md", "exec"), names)
    assert {row["provider"]: row["status"] for row in names["rows"]}["mine"] == "timed"
    assert "pip install liger-kernel" in capsys.readouterr().out


def test_the_examples_are_short():
    assert len(BLOCKS) == 2
    assert all(len([line for line in block.splitlines() if line.strip()]) < 20 for block in BLOCKS)


def test_the_page_has_every_group_field_and_status():
    for name in (*records.GROUPS, *records.STATUSES):
        assert f"`{name}`" in PAGE
    others = "schema group case shape dtype provider status reason seed level threads details"
    for field in set(records.BENCHMARK["properties"]) - set(others.split()):
        assert f"`{field}`" in PAGE, field
