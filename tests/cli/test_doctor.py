"""`fasttfm doctor` names what slows a machine down, and nothing else."""

import json
import subprocess
import sys
import types
from dataclasses import replace

import pytest

from fasttfm.cli import doctor
from fasttfm.cli.doctor import Facts, judge
from fasttfm.cli.main import main

CPU = Facts(cores=4, threads=4, busy_cores=0.1, units=frozenset({"avx2", "amx_bf16"}))
GPU = replace(CPU, device="a GPU", tf32=True, has_tf32=True, threads=1, missing=frozenset({"numba"}))


def test_a_machine_as_it_should_be_has_no_findings():
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
        (replace(CPU, missing=frozenset({"numba"})), "numba", "fasttfm[cpu]"),
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


def test_the_command_tells_people_and_programs(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather", lambda: replace(CPU, threads=1))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("threads: 1 of 4 cores are used\n    set OMP_NUM_THREADS=4")
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["subject"] == "threads"
    monkeypatch.setattr(doctor, "gather", lambda: CPU)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "nothing slows this machine down (a CPU, 4 cores)\n"


def test_this_machine_is_looked_at():
    facts = doctor.gather()
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
    monkeypatch.setattr(doctor, "time", clock)
    readings = iter([1_000, 1_000 + 150 * doctor.os.sysconf("SC_CLK_TCK") // 100])  # 1.5 core-seconds
    monkeypatch.setattr(doctor, "_jiffies", lambda: next(readings))
    assert doctor._busy_cores() == pytest.approx(1.4)
    monkeypatch.undo()
    before = doctor._jiffies()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert doctor._jiffies() > before
