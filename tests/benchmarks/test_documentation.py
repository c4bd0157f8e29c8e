"""docs/benchmarks.md: its two examples run and are short, its tables are complete."""

import re
from pathlib import Path

from toy import HERE, SETTING

from benchmarks.measure import harness, records
from benchmarks.measure.clocks import clock_of

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
CASE, PROVIDER = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_examples_of_a_case_and_of_a_provider_are_short_and_run(capsys):
    names = {}
    for example in (CASE, PROVIDER):
        assert len([line for line in example.splitlines() if line.strip()]) < 20
        exec(compile(example, "docs/benchmarks.md", "exec"), names)
    case = names["softmax"](SETTING)
    rows = harness.run(case, SETTING, clock_of(case, SETTING), 0.0, machine=HERE, least_rounds=1)
    for row in rows:
        records.validate(row)
    assert {row["provider"]: row["status"] for row in rows} == {"torch eager": "timed", "exponentials": "timed"}
    assert {row["provider"]: row["status"] for row in names["rows"]}["mine"] == "timed"
    assert "pip install liger-kernel" in capsys.readouterr().out
