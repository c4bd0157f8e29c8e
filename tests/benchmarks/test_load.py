"""The load of a machine counts other processes, but not this one and its children; machines and commands by name."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from waiting import PATIENCE, wait_for_end

from benchmarks.measure import machine as load
from benchmarks.measure.machine import machine_name
from fasttfm.system.machine import allowed_cores

BURN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
SEEN = 0.5 - 0.1
"""Fewest measured seconds of BURN: Linux counts in hundredths, twice per process."""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_seconds_of_living_and_ended_children_are_our_own():
    before = load._own()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    ended = load._own()
    assert ended - before >= SEEN
    with subprocess.Popen(
        [sys.executable, "-c", f"{BURN}\nprint(1, flush=True); input()"], stdin=-1, stdout=-1
    ) as child:
        child.stdout.readline()
        assert load._own() - ended >= SEEN
        child.communicate(b"\n")


def test_the_seconds_of_orphans_that_end_in_the_context_are_our_own():
    worker = f"import os\n{BURN}\nprint(os.getpid(), flush=True); time.sleep({PATIENCE})"
    server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    watch = load.Watch()
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        with watch.ending():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            wait_for_end([orphan])
    assert load._own() - watch._own >= SEEN, "the worker's time counts as another program's"


def test_others_is_their_share_of_all_processors(monkeypatch):
    clock = {"ticks": (0.0, 0.0), "own": 0.0, "now": 0.0}
    monkeypatch.setattr(load, "_ticks", lambda: clock["ticks"])
    monkeypatch.setattr(load, "_own", lambda: clock["own"])
    monkeypatch.setattr(load.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(load.os, "cpu_count", lambda: 4)
    watch = load.Watch()
    assert watch.read()["others"] is None  # too short to tell
    clock.update(ticks=(2.0, 18.0), own=10.0, now=10.0)
    read = watch.read()
    assert (read["steal"], read["others"]) == (0.05, 0.2)
    assert load.disturbed(read)
    assert not load.disturbed(read | {"others": 0.1})
    assert load.disturbed(read | {"others": 0.1, "steal": 0.06})
    assert not load.disturbed({"steal": None, "others": None})


def test_the_speed_of_all_cores_is_measured_and_the_number_of_threads_kept(monkeypatch):
    seen = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *x: (seen.append(torch.get_num_threads()), product(*x))[1])
    threads = torch.get_num_threads()
    assert load.Watch().read()["gflop_per_s"] is not None  # 0.0 on a very busy machine
    assert (set(seen), torch.get_num_threads()) == ({allowed_cores()}, threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load.Watch().read()["gflop_per_s"] is None


def test_a_recorded_command_has_no_folders_of_the_machine(monkeypatch):
    words = ["--text", "/home/someone/multi30k", "--work=/tmp/work", "--only", "a b", "--", "--seed", "1"]
    monkeypatch.setattr(load.sys, "argv", ["/opt/program.py", *words])
    assert load.describe()["command"] == "python program.py --text multi30k --work=work --only 'a b' -- --seed 1"


def test_a_machine_name_has_the_processor_and_its_widest_instruction_set():
    machine = {"processor": "Intel(R) Xeon(R) Processor", "cores": 2}
    assert machine_name(machine) == "CPU: Intel(R) Xeon(R) Processor, 2 cores"
    names = []
    for flags in ("avx avx2 fma", "avx2 avx512f avx512_vnni", "avx2 avx512f amx_bf16 amx_tile amx_int8"):
        machine["instruction_sets"] = flags.split()
        names.append(machine_name(machine).removeprefix("CPU: Intel(R) Xeon(R) Processor"))
    assert names == [" with AVX2, 2 cores", " with AVX-512, 2 cores", " with AMX, 2 cores"]
    assert machine_name(machine | {"device": "NVIDIA H200"}) == "NVIDIA H200"
