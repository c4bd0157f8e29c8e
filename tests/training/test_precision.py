"""Precision `auto`: by the device, or that of the resumed run."""

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.store.model_dir import read_config
from fasttfm.system.machine import emulates_bfloat16
from fasttfm.training.precision import autocast_dtype, resolved_precision
from fasttfm.training.run import train

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_asked_for_is_taken_on_any_device(precision, processor):
    processor("avx2")
    assert resolved_precision(precision, CPU) == precision


def test_a_run_says_and_keeps_the_precision_that_it_began_with(tiny_data, tiny_values, processor, tmp_path, capsys):
    processor("avx2", "amx_bf16")
    given = {"precision": "auto", "schedule": "constant"}
    train(tiny_values(**given, max_update=2), tiny_data, tmp_path / "run", CPU)
    assert ", bf16; " in capsys.readouterr().err
    processor("avx2")
    train(tiny_values(**given, max_update=3), tiny_data, tmp_path / "run", CPU)
    told = capsys.readouterr().err
    assert "resuming from update 2" in told
    assert ", bf16; " in told
    assert read_config(tmp_path / "run")["training"]["precision"] == "bf16"
    train(tiny_values(**given, max_update=2), tiny_data, tmp_path / "new", CPU)
    assert ", fp32; " in capsys.readouterr().err
    assert read_config(tmp_path / "new")["training"]["precision"] == "fp32"


@pytest.mark.parametrize(("saved", "given"), [("fp16", {"optimizer": "muon"}), ("auto", {})])
def test_a_precision_that_no_such_run_has_begun_with_is_refused(
    tiny_data, tiny_values, processor, tmp_path, saved, given
):
    processor("avx2")
    given = {"precision": "auto", "schedule": "constant", **given}
    train(tiny_values(**given, max_update=1), tiny_data, tmp_path / "run", CPU)
    written = tmp_path / "run" / "config.yaml"
    written.write_text(written.read_text().replace("precision: fp32", f"precision: {saved}"))
    with pytest.raises(UserError, match=rf"config\.yaml: training\.precision {saved} was not written by this run"):
        train(tiny_values(**given, max_update=2), tiny_data, tmp_path / "run", CPU)
