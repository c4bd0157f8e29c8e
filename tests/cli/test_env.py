"""`fasttfm env`: versions, devices and routes; with --check causes of slowness and damaged files, and nothing else."""

import json
from dataclasses import replace

import pytest
import torch

import fasttfm
from fasttfm.cli import check, env
from fasttfm.cli.check import Facts, check_folder, judge
from fasttfm.cli.main import main
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import assembler
from fasttfm.store.checkpoint import save_checkpoint
from fasttfm.store.steps import step_folder
from fasttfm.system import machine
from fasttfm.system.folders import replacing


def printed(capsys, *arguments: str, status: int = 0) -> str:
    assert main(["env", *arguments]) == status
    return capsys.readouterr().out


# The report


def test_the_report_has_versions_threads_device_tuning_and_routes(capsys, monkeypatch):
    results = json.loads(printed(capsys, "--json"))
    assert results["versions"]["torch"] == torch.__version__
    assert results["processor"]["threads"] == torch.get_num_threads()
    assert set(results["processor"]["units"]) <= set(machine._UNITS)
    used = assembler.assembler(90).version
    device = {"name": "a device", "chip": "sm_90", "processors": 132, "memory_gib": 139.0, "driver": "1.0"}
    monkeypatch.setitem(assembler.FAULTS, used, "is not to be trusted")
    monkeypatch.setattr(env, "describe_gpu", lambda: device)
    monkeypatch.setattr(env, "_tuned", lambda: {"file": "tuned/a.json", "answers": 3})
    text = printed(capsys)
    for told in (f"fasttfm {fasttfm.__version__}", "a device, sm_90, 139.0 GiB", "3 of tuned/a.json", f"ptxas {used}"):
        assert told in text
    assert "overrides it; is not to be trusted" in text
    routes = env._routes(CHIPS["sm_90"])
    assert routes["attention bf16"].endswith("128 keys short, 512 keys flash, 2048 keys flash or cudnn")
    assert routes["feed_forward fp16"].startswith("forward ")
    assert set(env._routes(None).values()) == {"torch"}
    assert env._routes(None).keys() <= {name.split()[0] for name in routes}


# Causes of slowness

CPU = Facts(cores=4, threads=4, busy_cores=0.1, units=frozenset({"avx2", "amx_bf16"}))
GPU = replace(CPU, device="a GPU", tf32=True, has_tf32=True, threads=1, missing=frozenset({"numba"}))


def test_a_healthy_machine_has_no_findings():
    for facts in (CPU, GPU, replace(CPU, units=frozenset())):  # unknown is not absent
        assert list(judge(facts)) == []


@pytest.mark.parametrize(
    ("facts", "subject", "remedy"),
    [
        (replace(CPU, threads=1), "threads", "OMP_NUM_THREADS=4"),
        (replace(CPU, busy_cores=1.2), "other programs", "end them"),
        (replace(CPU, units=frozenset({"avx2", "avx512f"})), "bfloat16", "--precision fp32"),
        (replace(CPU, missing=frozenset({"numba"})), "numba", "./fasttfm[cpu]"),
        (replace(CPU, gpu_without_driver=True), "GPU", "driver"),
        (replace(CPU, environment={"TRITON_INTERPRET": "1"}), "TRITON_INTERPRET=1", "unset"),
        (replace(CPU, environment={"FASTTFM_BACKEND": "torch"}), "FASTTFM_BACKEND=torch", "unset"),
        (replace(GPU, missing=frozenset({"triton"})), "triton", "pip install triton"),
        (replace(GPU, tf32=False), "TF32", "set_float32_matmul_precision"),
        (replace(GPU, is_tuned=False), "tiles", "fasttfm tune"),
        (replace(GPU, assembler_fault="miscompiles"), "assembler", "fasttfm env"),
    ],
)
def test_each_fault_has_its_remedy(facts, subject, remedy):
    (finding,) = judge(facts)
    assert finding.subject == subject
    assert remedy in finding.remedy


def test_findings_are_printed_as_text_and_json(monkeypatch, capsys):
    monkeypatch.setattr(check, "gather", lambda device: replace(CPU, threads=1))
    text = printed(capsys, "--check", status=1)
    assert text.startswith("threads: 1 of 4 cores are used\n    set OMP_NUM_THREADS=4")
    assert json.loads(printed(capsys, "--check", "--json", status=1))["findings"][0]["subject"] == "threads"
    monkeypatch.setattr(check, "gather", lambda device: CPU)
    assert printed(capsys, "--check") == "nothing slows this machine down\n"


def test_facts_of_this_machine_are_gathered():
    facts = check.gather(None)
    assert min(facts.cores, facts.threads) >= 1
    assert 0 <= facts.busy_cores < 10_000


# Damaged files


@pytest.fixture
def folders(tmp_path):
    """A data directory and a run of two checkpoints."""
    data, run = tmp_path / "data", tmp_path / "run"
    with replacing(data, "a test", "files") as fresh:
        for name in ("a", "b", "README.md"):
            (fresh.path / name).write_text(name)
    for step in (1, 2):
        save_checkpoint(step_folder(run, step), {"w": torch.ones(3)}, {"step": step})
    return data, run


def test_damaged_files_are_found_by_their_digests(folders, capsys):
    data, run = folders
    assert printed(capsys, "--check", str(data), str(run)).startswith("all files match their digests")
    (data / "a").write_text("changed")
    (data / "b").unlink()
    (data / "README.md").write_text("mine")
    weights = step_folder(run, 2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    findings = json.loads(printed(capsys, "--check", str(data), str(run), "--json", status=1))["findings"]
    assert {each["remedy"] for each in findings} == {"copy it back, or recreate the folder"}
    differs = "is damaged or was changed, its SHA-256 differs from sha256sums"
    faults = [each["fault"] for each in findings]
    assert faults == [f"{data / 'a'}: {differs}", f"{data / 'b'}: is missing", f"{weights}: {differs}"]


def test_missing_and_damaged_digests_are_findings(folders, tmp_path, refusal_of):
    data, run = folders
    (step_folder(run, 1) / "sha256sums").write_text("")
    assert "is empty" in check_folder(run)[0].fault
    for folder, manifest in ((run, step_folder(run, 1) / "sha256sums"), (data, data / "sha256sums")):
        manifest.unlink()
        (data / "data.yaml").touch()
        (finding,) = check_folder(folder)
        assert f"{manifest}: is missing, so damage would go unnoticed" in finding.fault
    (tmp_path / "empty").mkdir()
    assert "holds no sha256sums" in refusal_of(["env", "--check", tmp_path / "empty"])
