"""The load of a machine counts other processes, but not this one and its children; machines and commands by name."""

from benchmarks.measure import machine as load


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
