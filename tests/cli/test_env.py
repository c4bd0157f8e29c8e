"""`fasttfm env`: versions, devices and the backend of each operator, as text and JSON."""

import json

import pytest
import torch

import fasttfm
from fasttfm.cli import env
from fasttfm.cli.main import main
from fasttfm.functional import backend
from fasttfm.kernels.proof import assembler
from fasttfm.system import machine
from fasttfm.system.wording import counted


def printed(capsys, *arguments: str) -> str:
    assert main(["env", *arguments]) == 0
    return capsys.readouterr().out


def test_the_versions_processor_and_threads_are_those_of_this_process(capsys):
    results = json.loads(printed(capsys, "--json"))
    assert results["versions"]["torch"] == torch.__version__
    assert results["processor"]["threads"] == torch.get_num_threads()
    assert set(results["processor"]["units"]) <= set(machine._UNITS)
    text = printed(capsys)
    assert f"torch {torch.__version__}" in text
    assert f", {counted(torch.get_num_threads(), 'thread')}" in text


def test_our_version_is_that_of_the_source_that_runs(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    versions = json.loads(printed(capsys, "--json"))["versions"]
    assert (versions["fasttfm"], versions["torch"]) == (fasttfm.__version__, "0.0.1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_every_operator_runs_in_pytorch(capsys):
    results = json.loads(printed(capsys, "--json"))
    assert (results["device"], results["tuned"], results["chip"]) == (None, None, None)
    assert set(results["routes"].values()) == {"torch"}
    assert "none that torch can use" in printed(capsys)


def test_chip_shows_the_routes_of_another_chip(capsys):
    old = json.loads(printed(capsys, "--chip", "sm_60", "--json"))["routes"]
    new = json.loads(printed(capsys, "--chip", "sm_90", "--json"))["routes"]
    assert old["attention fp16"].startswith("16 keys short, 32 keys short, 64 keys softmax")
    assert new["attention bf16"].endswith("128 keys short, 512 keys flash, 2048 keys flash or cudnn")
    assert old["feed_forward fp16"] == "forward cublas, forward+dropout cublas, backward cublas"
    assert old.keys() == new.keys()
    with backend("torch"):
        assert set(env.environment("sm_90")["routes"].values()) == {"torch"}


def test_the_assembler_is_shown_with_version_fault_and_override(capsys, monkeypatch):
    monkeypatch.setitem(assembler.FAULTS, assembler.assembler(90).version, "is not to be trusted")
    line = next(line for line in printed(capsys).splitlines() if "sm_60 to sm_90" in line)
    assert assembler.assembler(90).version in line
    assert "TRITON_PTXAS_PATH=FILE overrides it; is not to be trusted" in line


def test_the_device_and_its_tuning_are_shown(capsys, monkeypatch):
    device = {"name": "a device", "chip": "sm_90", "processors": 132, "memory_gib": 139.0, "driver": "1.0"}
    monkeypatch.setattr(env, "describe_gpu", lambda: device)
    monkeypatch.setattr(env, "_tuned", lambda: {"file": "tuned/a.json", "answers": 3, "shipped": 2})
    text = printed(capsys)
    assert "a device, sm_90, 139.0 GiB, driver 1.0" in text
    assert "3 of tuned/a.json; 2 shipped with fasttfm" in text


def test_an_unknown_chip_is_refused(refusal_of):
    assert refusal_of(["env", "--chip", "sm_61"]).startswith("fasttfm env: --chip sm_61: one of sm_60, ")
