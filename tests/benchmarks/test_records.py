"""Records follow their schema: every file that is kept, and whatever is written to one."""

import json

import pytest

from benchmarks.measure import records
from fasttfm.errors import UserError

FILES = sorted(path for path in records.RESULTS.glob("*.json*"))


def record(**changes):
    made = {
        "schema": 1,
        "group": "kernels",
        "case": "LayerNorm",
        "shape": {"M": 8, "N": 16, "mask": "none", "causal": False},
        "dtype": "float32",
        "pass": "forward",
        "provider": "fasttfm",
        "status": "timed",
        "reason": None,
        "clock": "host, synchronized",
        "time_us": {"p20": 1.0, "p50": 2.0, "p80": 3.0, "runs": 5},
        "throughput": {"value": 10.0, "unit": "tokens/s"},
        "tflop_per_s": None,
        "gb_per_s": 12.0,
        "roofline": {"floor_us": 1.0, "share": 0.5, "ceilings": {"gb_per_s": 20.0, "tflop_per_s": 0.1}},
        "peak_bytes": 1024,
        "launches": 1,
        "compile_s": 0.01,
        "error": {"value": 1e-7, "allowed": 1e-6, "measure": "max |x - float64| / max |float64|"},
        "seed": 0,
        "level": "quick",
        "threads": 2,
        "machine": {
            "time": "2026-01-02T03:04:05+00:00",
            "command": "python -m benchmarks",
            "commit": "0" * 40,
            "uncommitted_changes": False,
            "python": "3.11.7",
            "system": "Linux",
            "processor": "a CPU",
            "cores": 2,
            "fasttfm": "0.1.0",
            "torch": "2.13.0",
            "triton": None,
        },
    }
    return made | changes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_kept_record_follows_its_schema(path):
    rows = records.read(path)
    assert rows
    assert "smoke" not in {row.get("level") for row in rows}  # times of toy shapes mean nothing


def test_there_are_records():
    assert FILES


def test_a_record_is_valid():
    records.validate(record())
    records.validate(record(status="absent", reason="pip install x", time_us=None))
    records.validate(record(details={"bleu": 30.0}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"group": "kernel"}, "record.group: 'kernel' is not one of"),
        ({"extra": 1}, "'extra' was unexpected"),
        ({"time_us": {"p20": 1.0, "p50": 2.0, "runs": 3}}, "record.time_us: 'p80' is a required property"),
        ({"time_us": {"p20": 1.0, "p50": 0.0, "p80": 1.0, "runs": 3}}, "equal to the minimum of 0"),
        ({"time_us": None}, "status is timed but record.time_us is None"),
        ({"status": "absent", "reason": "pip install x"}, "status is absent but record.time_us is"),
        ({"status": "wrong", "time_us": None}, "status is wrong but record.reason is None"),
        ({"error": {"value": 1.0, "allowed": 0.1, "measure": "x"}}, "larger than allowed, and yet there is a time"),
        ({"peak_bytes": 1.5}, "peak_bytes: 1.5 is not of type 'integer', 'null'"),
        ({"launches": True}, "launches: True is not of type"),
        ({"shape": {"M": [1]}}, r"shape.M: \[1\] is not of type"),
        ({"machine": {}}, "record.machine: 'time' is a required property"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(changes, why):
    with pytest.raises(ValueError, match=why):
        records.validate(record(**changes))


def test_a_record_of_no_kind_is_refused():
    with pytest.raises(ValueError, match="no known kind"):
        records.validate({"what": 1})


def test_the_schemas_are_plain_json():
    assert json.loads(json.dumps(records.SCHEMAS)) == records.SCHEMAS


def test_writing_replaces_the_same_measurement_and_keeps_the_others(tmp_path):
    file = tmp_path / "new" / "kernels.jsonl"
    records.write(file, [record(), record(provider="torch eager")])
    records.write(file, [record(time_us={"p20": 4.0, "p50": 5.0, "p80": 6.0, "runs": 7}), record(case="embedding")])
    results = records.read(file)
    assert [(r["case"], r["provider"], r["time_us"]["p50"]) for r in results] == [
        ("LayerNorm", "torch eager", 2.0),
        ("LayerNorm", "fasttfm", 5.0),
        ("embedding", "fasttfm", 2.0),
    ]
    assert [path.name for path in file.parent.iterdir()] == ["kernels.jsonl"]


def test_nothing_invalid_is_written(tmp_path):
    with pytest.raises(ValueError, match="required property"):
        records.write(tmp_path / "a.jsonl", [{"schema": 1}])
    assert not list(tmp_path.iterdir())


def test_a_foreign_file_is_named_with_its_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record()) + "\nnonsense\n")
    with pytest.raises(UserError, match=r"a.jsonl, line 2, is no record"):
        records.read(file)
    with pytest.raises(UserError, match="cannot be read"):
        records.read(tmp_path / "absent.jsonl")


def test_numbers_are_kept_to_four_digits_and_stay_json():
    assert records.rounded(123456.0) == 123500.0
    assert records.rounded(None) is None
    assert json.loads(json.dumps(records.rounded(float("inf")))) == 1e308


def test_a_file_is_named_after_group_and_machine():
    assert records.file_name("blocks", {"device": "NVIDIA H200"}) == "blocks-nvidia-h200.jsonl"
    assert records.file_name("kernels", {"processor": "AMD EPYC", "cores": 2}) == "kernels-amd-epyc-2-cores.jsonl"
