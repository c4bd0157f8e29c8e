"""`fasttfm env --check` names causes of slowness and damaged files, and nothing else."""

import json
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch

from fasttfm.cli import check
from fasttfm.cli.check import Facts, judge
from fasttfm.cli.main import main
from fasttfm.store.checkpoint import save_checkpoint
from fasttfm.store.steps import step_folder
from fasttfm.system.folders import replacing

CPU = Facts(cores=4, threads=4, busy_cores=0.1, units=frozenset({"avx2", "amx_bf16"}))
GPU = replace(CPU, device="a GPU", tf32=True, has_tf32=True, threads=1, missing=frozenset({"numba"}))


def test_a_healthy_machine_has_no_findings():
    assert list(judge(CPU)) == list(judge(GPU)) == []
    assert list(judge(replace(CPU, units=frozenset()))) == [], "unknown is not absent"


@pytest.mark.parametrize(
    ("facts", "subject", "remedy"),
    [
        (replace(CPU, threads=1), "threads", "OMP_NUM_THREADS=4"),
        (replace(CPU, threads=8), "threads", "OMP_NUM_THREADS=4"),
        (replace(CPU, busy_cores=1.2), "other programs", "end them"),
        (replace(GPU, busy_cores=1.2), "other programs", "end them"),
        (replace(CPU, units=frozenset({"avx2", "avx512f"})), "bfloat16", "--precision fp32"),
        (replace(CPU, missing=frozenset({"numba"})), "numba", "./fasttfm[cpu]"),
        (replace(CPU, gpu_without_driver=True), "GPU", "driver"),
        (replace(CPU, environment={"TRITON_INTERPRET": "1"}), "TRITON_INTERPRET=1", "unset"),
        (replace(CPU, environment={"FASTTFM_BACKEND": "torch"}), "FASTTFM_BACKEND=torch", "unset"),
        (replace(CPU, environment={"FASTTFM_BACKEND": "fast"}), "FASTTFM_BACKEND=fast", "unset"),
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
    assert main(["env", "--check"]) == 1
    assert capsys.readouterr().out.startswith("threads: 1 of 4 cores are used\n    set OMP_NUM_THREADS=4")
    assert main(["env", "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["subject"] == "threads"
    monkeypatch.setattr(check, "gather", lambda device: CPU)
    assert main(["env", "--check"]) == 0
    assert capsys.readouterr().out == "nothing slows this machine down\n"


def test_facts_of_this_machine_are_gathered():
    facts = check.gather(None)
    assert facts.cores >= 1
    assert facts.threads >= 1
    assert 0 <= facts.busy_cores < 10_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/stat")
def test_a_busy_program_is_seen_and_our_work_is_not(monkeypatch):
    moments = iter([5.0, 6.0])  # a sample of a second, of which this process had 0.1
    work = iter([2.0, 2.1])
    clock = types.SimpleNamespace(
        monotonic=lambda: next(moments), process_time=lambda: next(work), sleep=lambda seconds: None
    )
    monkeypatch.setattr(check, "time", clock)
    readings = iter([1_000, 1_000 + 150 * check.os.sysconf("SC_CLK_TCK") // 100])  # 1.5 core-seconds
    monkeypatch.setattr(check, "_jiffies", lambda: next(readings))
    assert check._busy_cores() == pytest.approx(1.4)
    monkeypatch.undo()
    before = check._jiffies()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert check._jiffies() > before


def test_damaged_files_are_found_by_their_digests(tmp_path, capsys):
    """Data directories and the checkpoints of a run."""
    whole, run = tmp_path / "data", tmp_path / "run"
    with replacing(whole, "a test", "files") as fresh:
        for name in ("a", "b", "README.md"):
            (fresh.path / name).write_text(name)
    for step in (1, 2):
        save_checkpoint(step_folder(run, step), {"w": torch.ones(3)}, {"step": step})
    assert main(["env", "--check", str(whole), str(run)]) == 0
    assert capsys.readouterr().out.startswith("all files match their digests")
    (whole / "a").write_text("changed")
    (whole / "b").unlink()
    (whole / "README.md").write_text("mine")
    with (step_folder(run, 2) / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert main(["env", "--check", str(whole), str(run), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {each["remedy"] for each in findings} == {"copy it back, or recreate the folder"}
    assert [each["fault"] for each in findings] == [
        f"{whole / 'a'}: is damaged or was changed, its SHA-256 differs from sha256sums",
        f"{whole / 'b'}: is missing",
        f"{step_folder(run, 2) / 'model.safetensors'}: is damaged or was changed, its SHA-256 differs from sha256sums",
    ]
    listed = step_folder(run, 1) / "sha256sums"
    for content, told in (("", "is empty"), (listed.read_text()[:-5], "is truncated or damaged")):
        listed.write_text(content)
        assert main(["env", "--check", str(run)]) == 1
        assert f"{listed}: {told}" in capsys.readouterr().out
        assert [each.remedy for each in check.check_folder(run) if str(listed) in each.fault] == [""], "told once"
    listed.unlink()
    (whole / "data.yaml").touch()
    (whole / "sha256sums").rename(tmp_path / "sha256sums")
    save_checkpoint(whole / "below", {"w": torch.ones(3)}, {"step": 1})  # with digests of its own
    for folder, manifest in ((run, listed), (whole, whole / "sha256sums")):
        assert main(["env", "--check", str(folder)]) == 1
        assert f"{manifest}: is missing, so damage would go unnoticed" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for path, told in ((tmp_path / "empty", "holds no sha256sums"), (tmp_path / "none", "is not a directory")):
        assert main(["env", "--check", str(path)]) == 2
        assert told in capsys.readouterr().err
