"""The load of a machine counts other processes, but not this one and its children; machines and commands by name."""

import subprocess
import sys

import pytest

from benchmarks.measure import machine as load

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


def test_a_recorded_command_has_no_folders_of_the_machine(monkeypatch):
    words = ["--text", "/home/someone/multi30k", "--work=/tmp/work", "--only", "a b", "--", "--seed", "1"]
    monkeypatch.setattr(load.sys, "argv", ["/opt/program.py", *words])
    assert load.describe()["command"] == "python program.py --text multi30k --work=work --only 'a b' -- --seed 1"
