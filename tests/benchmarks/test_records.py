"""Records are validated when written, replaced by key, and filed by group and machine."""

import json

import pytest

from benchmarks.measure import records


def test_write_replaces_equal_keys_and_keeps_other_records(tmp_path, record):
    file = tmp_path / "new" / "kernels.jsonl"
    records.write(file, [record(), record(provider="torch eager")])
    records.write(file, [record(p50=5.0), record(case="embedding")])
    results = [(row["case"], row["provider"], row["time_us"]["p50"]) for row in records.read(file)]
    right = [("attention", "torch eager", 100.0), ("attention", "fasttfm", 5.0), ("embedding", "fasttfm", 100.0)]
    assert results == right
    with pytest.raises(ValueError, match="required property"):
        records.write(file, [record(case="another"), {"schema": 1}])
    assert len(records.read(file)) == 3
    assert [path.name for path in file.parent.iterdir()] == ["kernels.jsonl"]


def test_numbers_are_rounded_to_four_digits_and_are_valid_json():
    assert records.rounded(123456.0) == 123500.0
    assert records.rounded(None) is None
    assert json.loads(json.dumps(records.rounded(float("inf")))) == 1e308


def test_a_file_name_has_group_and_machine():
    assert records.file_name("blocks", {"device": "NVIDIA H200"}) == "blocks-nvidia-h200.jsonl"
    machine = {"processor": "AMD EPYC", "cores": 2, "instruction_sets": ["avx2", "avx512f", "amx_bf16"]}
    assert records.file_name("kernels", machine) == "kernels-amd-epyc-amx-2-cores.jsonl"
