"""Fixtures: records with invented figures, which stay in the tests' folders, and models whose searches end."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import records
from fasttfm.data.tokenizer import EOS
from fasttfm.models import Transformer, TransformerConfig

MACHINE = {
    "time": "2026-01-02T03:04:05+00:00",
    "command": "python -m benchmarks kernels",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "uncommitted_changes": False,
    "python": "3.11.7",
    "system": "Linux",
    "processor": "AMD EPYC",
    "cores": 2,
    "fasttfm": "0.1.0",
    "torch": "2.13.0",
    "triton": "3.7.1",
}


READ = records.read
READ_ONCE = functools.cache(READ)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's speed is measured with a small product, and files of this repository's records are read once."""
    monkeypatch.setattr("benchmarks.measure.machine._SIDE", 128)
    monkeypatch.setattr(records, "read", lambda path: (READ_ONCE if path.parent == records.RESULTS else READ)(path))


@pytest.fixture(scope="session")
def ending_model():
    """ending_model(config, mean): random model with outputs of many lengths; mean: mean logit of end-of-sentence."""

    def make(config: TransformerConfig, mean: float) -> Transformer:
        torch.manual_seed(0)
        model = Transformer(config).eval()
        with torch.no_grad():
            norm = model.decoder.layers[-1].norm3
            norm.weight.normal_(std=4.0)
            norm.bias.normal_()
            model.target_embedding.weight[:4] = 0.0
            model.target_embedding.weight[EOS] = mean * norm.bias / norm.bias.square().sum()
        return model

    return make


@pytest.fixture
def record():
    """record(p50=..., spread=..., field=...): a valid record of the suite."""

    def make(
        *, p50: float = 100.0, spread: float = 0.02, runs: int = 20, machine: dict | None = None, **fields: Any
    ) -> dict[str, Any]:
        status = fields.get("status", "timed")
        results: dict[str, Any] = {
            "schema": 1,
            "group": "kernels",
            "case": "attention",
            "shape": {"B": 2, "H": 8, "L": 27, "D": 64, "causal": True},
            "dtype": "float32",
            "pass": "forward",
            "provider": "fasttfm",
            "status": status,
            "reason": None if status == "timed" else f"made up: {status}",
            "clock": "host",
            "time_us": {"p20": p50 * (1 - spread), "p50": p50, "p80": p50 * (1 + spread), "runs": runs},
            **dict.fromkeys(("throughput", "tflop_per_s", "gb_per_s", "roofline")),
            **dict.fromkeys(("peak_bytes", "launches", "compile_s", "error")),
            "seed": 0,
            "level": "standard",
            "threads": 1,
            "machine": MACHINE | (machine or {}),
        }
        if status != "timed":
            results["time_us"] = None
        return results | fields

    return make


@pytest.fixture
def end_to_end():
    """end_to_end(corpus, field=...): a record of this repository with other fields."""

    def make(corpus: str = "demo", *, machine: dict | None = None, **fields: Any) -> dict[str, Any]:
        kept = records.read(records.RESULTS / "end-to-end-multi30k-fast.jsonl")[0]
        known = {"training_minutes": 4.0, "updates": 1000, "train_command": "fasttfm train --preset demo"}
        return kept | known | {"corpus": corpus} | {"machine": MACHINE | (machine or {})} | fields

    return make


@pytest.fixture
def write(tmp_path: Path):
    """write(name, *records): a file of records in tmp_path."""

    def to_file(name: str, *records: dict[str, Any]) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return file

    return to_file
