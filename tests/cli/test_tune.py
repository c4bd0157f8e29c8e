"""`fasttfm tune` without a GPU: what it decides from times, what it keeps, and how it refuses."""

import dataclasses

import pytest
import torch

from fasttfm import tuning
from fasttfm.cli import main
from fasttfm.kernels import choice_cache, choices
from fasttfm.kernels.compile_case import CHIPS

CHIP = CHIPS["sm_90"]


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int


class FakeClock:
    """A run takes as long as the last tile that it asked for says."""

    def __init__(self, microseconds):
        self.of_tile = microseconds
        self.asked = []

    def microseconds(self, run):
        self.asked.clear()
        run()
        return sum(self.of_tile[tile.rows] for tile in self.asked)

    def peak_bytes(self, run):
        run()
        return 0


@pytest.fixture
def bench(monkeypatch):
    """A choice of 8, 16 or 32 rows, two pieces of work that ask for it, and a clock."""
    monkeypatch.setattr(choices, "CHOICES", {})
    monkeypatch.setattr(choices, "_kept", {})

    @choices.choice("test.tile", alternatives=lambda chip, columns: (Tile(16), Tile(32)))
    def tile(chip, columns):
        return Tile(8)

    @choices.choice("test.fixed", alternatives=lambda chip: ())
    def fixed(chip):
        return "only"

    clock = FakeClock({8: 10.0, 16: 9.9, 32: 5.0})

    def work(columns):
        def run():
            fixed(CHIP)
            chosen = tile(CHIP, columns)
            if chosen.rows not in clock.of_tile:
                raise RuntimeError("out of resource: shared memory")
            clock.asked.append(chosen)

        return run

    return tile, clock, {"small": work(512), "large": work(1024), "small again": work(512)}


def measured(bench):
    _, clock, work = bench
    return list(tuning.tune(work, CHIP, clock, seconds_per_decision=0))


def test_every_decision_with_more_than_one_answer_is_measured_on_the_work_that_asks_for_it(bench):
    results = measured(bench)
    assert [m.decision for m in results] == [("test.tile", (512,)), ("test.tile", (1024,))]
    assert [m.times["rows=8"].median_us for m in results] == [20.0, 10.0]  # 512 columns are asked for twice


def test_the_faster_answer_is_taken_and_stays_in_force(bench):
    results = measured(bench)
    assert [m.best for m in results] == [Tile(32), Tile(32)]
    assert results[0].line() == "test.tile 512: rows=8 -> rows=32, 20.0 -> 10.0 us"
    assert bench[0](CHIP, 512) == Tile(32)


def test_a_gain_within_the_noise_changes_nothing(bench):
    bench[1].of_tile[32] = 9.8
    results = measured(bench)
    assert not any(m.changed for m in results)
    assert results[0].line() == "test.tile 512: rows=8 stays, 20.0 us"
    assert bench[0](CHIP, 512) == Tile(8)


def test_an_answer_that_cannot_run_here_is_passed_over(bench):
    del bench[1].of_tile[32]
    results = measured(bench)
    assert not any(m.changed for m in results)
    assert "out of resource" in results[0].times["rows=32"]


def test_what_was_measured_is_kept_and_read_back(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path))
    system = choice_cache.System("a device", "sm_90", "1.0", {"torch": "2.13.0"})
    monkeypatch.setattr(choice_cache, "system_of", lambda device, chip: system)
    choice_cache.write(system, [m.as_answer() for m in measured(bench)])
    choices.keep(CHIP, {})
    assert bench[0](CHIP, 512) == Tile(8)
    choice_cache.load(torch.device("cuda", 0), CHIP)
    assert bench[0](CHIP, 512) == Tile(32)


def test_progress_goes_to_the_end(bench):
    _, clock, work = bench
    seen = []
    list(tuning.tune(work, CHIP, clock, seconds_per_decision=0, progress=lambda *position: seen.append(position)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_there_is_nothing_to_tune(capsys):
    assert main.main(["tune", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fasttfm tune: there is no CUDA or ROCm device")
    assert len(said.splitlines()) == 1


def test_the_work_of_a_model_runs_every_family(monkeypatch):
    """The real pieces of work, made small, on the CPU."""
    monkeypatch.setattr(tuning, "_TOKENS", 64)
    monkeypatch.setattr(tuning, "_LENGTHS", (8, 16))
    names, kinds = [], set()
    for name, run in tuning._layer_work(32, 2, torch.float32, torch.device("cpu")):
        run()
        names.append(name.split()[0])
        if names[-1] == "attention":
            kinds.add(" ".join(name.split()[2:]))
    padded = {"full", "causal", "lengths", "masked", "masked dropout", "cross", "joint", "joint cross"}
    assert kinds == padded | {"packed", "packed cross", "packed joint", "packed joint cross"}
    families = {"attention", "layer_norm", "residual_layer_norm", "feed_forward", "linear_cross_entropy", "embedding"}
    assert set(names) == families
