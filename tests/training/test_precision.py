"""Precision `auto`: by the device, or that of the resumed run."""

import pytest
import torch

from fasttfm.store.model_dir import read_config
from fasttfm.system.machine import emulates_bfloat16
from fasttfm.training.precision import autocast_dtype, resolved_precision
from fasttfm.training.run import train

from .runs import CPU

AUTO = {"precision": "auto", "schedule": "constant"}


@pytest.fixture
def processor(monkeypatch):
    """Set the reported instruction sets of the CPU."""
    return lambda *units: monkeypatch.setattr("fasttfm.system.machine.processor_units", lambda: list(units))


@pytest.mark.parametrize(
    ("units", "precision", "dtype"),
    [
        (["avx2", "avx512f", "avx512_bf16"], "bf16", torch.bfloat16),
        (["avx2", "avx512f", "amx_bf16"], "bf16", torch.bfloat16),
        (["avx2", "avx512f"], "fp32", None),
        ([], "fp32", None),
    ],
)
def test_auto_is_bf16_where_units_for_it_are_known(units, precision, dtype, processor):
    processor(*units)
    assert resolved_precision("auto", CPU) == precision
    assert autocast_dtype("auto", CPU) == dtype
    assert emulates_bfloat16(units) == (bool(units) and precision == "fp32")
    for given in ("fp32", "bf16", "fp16"):
        assert resolved_precision(given, CPU) == given


def test_a_run_says_and_keeps_the_precision_that_it_began_with(tiny_data, tiny_values, processor, tmp_path, capsys):
    for units, out, updates, precision in (
        (("avx2", "amx_bf16"), "run", 1, "bf16"),
        (("avx2",), "run", 2, "bf16"),
        (("avx2",), "new", 1, "fp32"),
    ):
        processor(*units)
        train(tiny_values(**AUTO, max_update=updates), tiny_data, tmp_path / out, CPU)
        told = capsys.readouterr().err
        assert f", {precision}; " in told
        assert ("resuming from update 1" in told) == (updates == 2)
        assert read_config(tmp_path / out)["training"]["precision"] == precision
