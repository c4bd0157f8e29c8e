"""`fasttfm tune` without a GPU: decisions from measured times, storage, refusals."""

import dataclasses
import json

import pytest
import torch

from fasttfm.cli import main
from fasttfm.errors import UserError
from fasttfm.functional import tuning
from fasttfm.kernels import choice_cache, choices, launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.system import timing

CHIP = CHIPS["sm_90"]
SYSTEM = {"device": "a device", "chip": "sm_90", "driver": "1.0", "versions": {"torch": "2.13.0"}}


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int

    def __str__(self):
        return f"rows={self.rows}"


class Bench:
    """A choice of 8, 16 or 32 rows, work that uses it, and a clock that returns a fixed time for each tile."""

    def __init__(self):
        self.tile = choices.Choice("test.tile", lambda *_: Tile(8), lambda *_: (Tile(16), Tile(32)))
        self.fixed = choices.Choice("test.fixed", lambda chip: "only", lambda chip: ())
        self.of_tile = {8: 10.0, 16: 9.9, 32: 5.0}
        self.right = {8, 16, 32}
        self.error = RuntimeError("out of resource: shared memory")
        self.work = [self.piece(columns) for columns in (512, 1024, 512)]
        self.taken = 0.0

    def piece(self, columns):
        def run():
            self.fixed(CHIP)
            rows = self.tile(CHIP, columns).rows
            if rows not in self.of_tile:
                raise self.error
            self.taken += self.of_tile[rows]
            return torch.ones(3), torch.full((2,), 2.0) if rows in self.right else torch.zeros(2)

        return run

    def clock(self, run):
        self.taken = 0.0
        run()
        return self.taken

    def measured(self):
        """Return decision -> (stored answer, printed line)."""
        decisions = tuning.decisions_of(self.work, CHIP)
        return {each: tuning.tune(each, work, CHIP, self.clock, seconds=0) for each, work in decisions.items()}


SMALL, LARGE = ("test.tile", (512,)), ("test.tile", (1024,))


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(choices, "CHOICES", {})
    monkeypatch.setattr(choices, "_kept", {})
    return Bench()


def test_every_decision_is_measured_on_its_work_and_the_faster_answer_is_used(bench):
    results = bench.measured()
    assert results == {  # of test.fixed there is one answer
        SMALL: (("rows=32", 10.0, 20.0), "test.tile 512: rows=8 -> rows=32, 20.0 -> 10.0 us"),  # two pieces
        LARGE: (("rows=32", 5.0, 10.0), "test.tile 1024: rows=8 -> rows=32, 10.0 -> 5.0 us"),
    }
    assert choices.kept(CHIP) == {SMALL: "rows=32", LARGE: "rows=32"}
    assert bench.tile(CHIP, 512) == Tile(32)


@pytest.mark.parametrize(
    ("times", "right", "told"),
    [
        ({8: 10.0, 16: 9.9, 32: 9.8}, {8, 16, 32}, "test.tile 512: rows=8 stays, 20.0 us"),
        ({8: 10.0, 16: 9.9}, {8, 16}, "us; rows=32 is passed over: RuntimeError: out of resource: shared memory"),
        ({8: 10.0, 16: 9.9, 32: 5.0}, {8, 16}, "its outputs differ from the shipped one's, by 2.0e+00 of 2.0e+00"),
    ],
)
def test_an_answer_within_the_noise_that_cannot_run_or_is_wrong_is_passed_over(bench, times, right, told):
    bench.of_tile, bench.right = times, right
    kept, line = bench.measured()[SMALL]
    assert kept.answer == "rows=8"
    assert told in line
    assert not choices.kept(CHIP)


def test_an_answer_that_breaks_the_device_ends_it_in_a_line(bench):
    del bench.of_tile[32]
    bench.error = type("AcceleratorError", (RuntimeError,), {})("an illegal memory access was encountered")
    with pytest.raises(UserError, match=r"test\.tile 512: rows=32 ended in an error that the device does not recover"):
        bench.measured()


@pytest.fixture
def device(bench, tmp_path, monkeypatch):
    """A simulated GPU with the work and clock of the bench."""
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path))
    monkeypatch.setattr(choice_cache, "system_of", lambda device, chip: SYSTEM)
    monkeypatch.setattr(launch, "chip", lambda device: CHIP)
    monkeypatch.setattr("fasttfm.system.machine.pick_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr("fasttfm.functional.backends.use_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(tuning, "model_work", lambda device, quick: bench.work)
    monkeypatch.setattr(timing, "DeviceClock", lambda device: type("Clock", (), {"microseconds": bench.clock}))
    monkeypatch.setattr(tuning, "measure", lambda *given, seconds: timing.measure(*given, seconds=0))
    return bench


def test_results_are_stored_and_read_back(device, capsys):
    assert main.main(["tune", "--json"]) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert said["device"] == "a device"
    assert [said[name] for name in ("decisions", "differ_from_shipped", "differ_from_last")] == [2, 2, 2]
    assert said["file"] == str(choice_cache.file_of(SYSTEM))
    assert "test.tile 512: rows=8 -> rows=32" in captured.err
    choices.keep(CHIP, {})
    assert device.tile(CHIP, 512) == Tile(8)
    choice_cache.load(torch.device("cuda", 0), CHIP)
    assert device.tile(CHIP, 512) == Tile(32)


def test_a_damaged_file_is_written_anew_and_later_keeps_what_is_not_measured_again(device):
    choice_cache.write(SYSTEM, {}).write_text("{")
    assert main.main(["tune", "--quiet"]) == 0
    device.work = device.work[:1]
    assert main.main(["tune", "--quiet"]) == 0
    assert set(choice_cache.read(SYSTEM)) == {SMALL, LARGE}


def test_the_work_of_a_model_runs_at_a_small_size_on_the_cpu(monkeypatch):
    monkeypatch.setattr(tuning, "_TOKENS", 64)
    monkeypatch.setattr(tuning, "_LENGTHS", (8,))
    for run in tuning.operators(32, 2, torch.float32, torch.device("cpu")):
        assert all(isinstance(gradient, torch.Tensor) for gradient in run())
