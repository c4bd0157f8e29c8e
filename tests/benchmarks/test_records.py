"""Records follow their schema: every file that is kept, and whatever is written to one."""

import json

import pytest

from benchmarks.measure import records
from fasttfm.errors import UserError

FILES = sorted(path for path in records.RESULTS.glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_kept_record_follows_its_schema(path):
    rows = records.read(path)
    assert rows
    assert "smoke" not in {row.get("level") for row in rows}  # times of toy shapes mean nothing


def test_there_are_records():
    assert FILES


def test_a_record_is_valid(record):
    records.validate(record())
    records.validate(record(status="absent"))
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
def test_what_is_wrong_with_a_record_is_said(record, changes, why):
    with pytest.raises(ValueError, match=why):
        records.validate(record() | changes)


def test_a_record_of_no_kind_is_refused():
    with pytest.raises(ValueError, match="no known kind"):
        records.validate({"what": 1})


def test_the_schemas_are_plain_json():
    assert json.loads(json.dumps(records.SCHEMAS)) == records.SCHEMAS


def test_writing_replaces_the_same_measurement_and_keeps_the_others(tmp_path, record):
    file = tmp_path / "new" / "kernels.jsonl"
    records.write(file, [record(), record(provider="torch eager")])
    records.write(file, [record(time_us={"p20": 4.0, "p50": 5.0, "p80": 6.0, "runs": 7}), record(case="embedding")])
    results = records.read(file)
    assert [(r["case"], r["provider"], r["time_us"]["p50"]) for r in results] == [
        ("attention", "torch eager", 100.0),
        ("attention", "fasttfm", 5.0),
        ("embedding", "fasttfm", 100.0),
    ]
    assert [path.name for path in file.parent.iterdir()] == ["kernels.jsonl"]


def test_nothing_invalid_is_written(tmp_path):
    with pytest.raises(ValueError, match="required property"):
        records.write(tmp_path / "a.jsonl", [{"schema": 1}])
    assert not list(tmp_path.iterdir())


def test_a_foreign_file_is_named_with_its_line(tmp_path, record):
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
    machine = {"processor": "AMD EPYC", "cores": 2}
    assert records.file_name("kernels", machine) == "kernels-amd-epyc-2-cores.jsonl"
    with_amx = machine | {"instruction_sets": ["avx2", "avx512f", "amx_bf16"]}
    assert records.file_name("kernels", with_amx) == "kernels-amd-epyc-amx-2-cores.jsonl"
