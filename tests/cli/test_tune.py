"""`fasttfm tune` without a GPU: what it decides from times, what it keeps, and how it refuses."""

import dataclasses
import functools
import json

import pytest
import torch

from fasttfm import timing, tuning
from fasttfm.cli import main
from fasttfm.cpu import thresholds
from fasttfm.cpu import tuning as cpu_tuning
from fasttfm.errors import UserError
from fasttfm.kernels import choice_cache, choices
from fasttfm.kernels.chip import CHIPS

CHIP = CHIPS["sm_90"]


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int

    def __str__(self):
        return f"rows={self.rows}"


class FakeClock:
    """A run takes as long as the last tile that it asked for says."""

    def __init__(self, microseconds):
        self.of_tile = microseconds
        self.asked = []
        self.right = {8, 16, 32}

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

    tile = choices.Choice("test.tile", lambda chip, columns: Tile(8), lambda chip, columns: (Tile(16), Tile(32)))
    fixed = choices.Choice("test.fixed", lambda chip: "only", lambda chip: ())

    clock = FakeClock({8: 10.0, 16: 9.9, 32: 5.0})

    def work(columns):
        def run():
            fixed(CHIP)
            chosen = tile(CHIP, columns)
            if chosen.rows not in clock.of_tile:
                raise RuntimeError("out of resource: shared memory")
            clock.asked.append(chosen)
            return [torch.ones(3), (torch.full((2,), 2.0) if chosen.rows in clock.right else torch.zeros(2),)]

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


def test_a_fast_answer_with_other_numbers_is_passed_over(bench):
    bench[1].right.remove(32)
    results = measured(bench)
    assert not any(m.changed for m in results)
    assert "its numbers are not the shipped one's: they differ by 2.0e+00 of 2.0e+00" in results[0].times["rows=32"]


def test_an_answer_that_breaks_the_device_ends_it_in_a_line(bench, monkeypatch):
    class AcceleratorError(RuntimeError):
        pass

    real = bench[1].of_tile.pop(32)
    assert real == 5.0
    broken = {name: functools.partial(_breaking, run, AcceleratorError) for name, run in bench[2].items()}
    with pytest.raises(UserError, match=r"test\.tile 512: rows=32 ended in an error that the device does not recover"):
        list(tuning.tune(broken, CHIP, bench[1], seconds_per_decision=0))


def _breaking(run, error):
    try:
        return run()
    except RuntimeError:
        raise error("CUDA error: an illegal memory access was encountered") from None


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
def test_a_gpu_that_is_not_there_is_refused_in_a_line(capsys):
    assert main.main(["tune", "--quick", "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fasttfm tune: device cuda is not there")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", "cpu:x"])
def test_a_device_that_cannot_be_tuned_is_refused_in_a_line(device, capsys):
    assert main.main(["tune", "--device", device]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fasttfm tune: device ")
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


# ------------------------------------------------------------------------------------------------------------- on a CPU


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """A cache of its own, and a clock by which a pass takes 100 us and a hundredth of an element's share, PyTorch a
    fiftieth: faster from 10,000 elements on; but softmax never, and in bfloat16 from 100,000 elements on."""
    pytest.importorskip("numba")
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path))
    thresholds.forget()
    taken = []

    def work(name, elements, dtype):
        return lambda: taken.append((name, elements, dtype, elements >= thresholds.least(name)))

    class Planted:
        def microseconds(self, run):
            taken.clear()
            run()
            ((name, elements, dtype, is_pass),) = taken
            if not is_pass:
                return elements / 50
            return 1e9 if name == "softmax" else (1000 if dtype == torch.bfloat16 else 100) + elements / 100

        def peak_bytes(self, run):
            return 0

    monkeypatch.setattr(cpu_tuning, "work", work)
    monkeypatch.setattr(timing, "HostClock", Planted)
    seconds = iter(range(10**9)).__next__
    monkeypatch.setattr(
        cpu_tuning, "measure", functools.partial(timing.measure, now=seconds)
    )  # no case goes on for long
    yield tmp_path
    thresholds.forget()


@pytest.mark.parametrize(("quick", "least"), [([], 1 << 18), (["--quick"], 1 << 14)], ids=["all", "quick"])
def test_passes_are_taken_from_the_size_on_from_which_they_are_faster(planted, quick, least, capsys):
    assert thresholds.least("keep_mask") == thresholds.LEAST["keep_mask"].value
    assert main.main(["tune", "--device", "cpu", "--json", *quick]) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert said["command"] == "tune"
    assert said["decisions"] == said["differ_from_last"] == len(thresholds.LEAST)
    assert f"keep_mask: taken from {least:,} elements on (32,768 ships)" in captured.err
    assert "softmax: never taken" in captured.err
    assert thresholds.least("keep_mask") == least
    assert thresholds.least("softmax") == thresholds.NEVER
    assert (planted / "tuned").iterdir().__next__().name == said["file"].rpartition("/")[2]
    assert main.main(["tune", "--device", "cpu", "--json", "--quiet", *quick]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["differ_from_last"] == 0
    assert not captured.err


def test_what_was_tuned_holds_for_its_number_of_threads_alone(planted, threads):
    threads(1)
    assert main.main(["tune", "--device", "cpu", "--quick", "--quiet"]) == 0
    assert thresholds.least("softmax") == thresholds.NEVER
    threads(2)
    assert thresholds.least("softmax") == thresholds.LEAST["softmax"].value


@pytest.mark.parametrize("content", ["", "{", "[]", "of another", "1.5", "-1", "true", "named"])
def test_a_cache_file_that_is_damaged_or_foreign_is_left_alone(content, planted):
    key = thresholds.system(torch.get_num_threads())
    answer = thresholds.as_answer("softmax", 1, 1.0, 1.0)
    choice_cache.write(key, [answer])
    thresholds.forget()
    assert thresholds.least("softmax") == 1
    if content == "of another":
        content = key.file.read_text().replace(torch.__version__, "1.0")
    elif content == "named":
        content = key.file.read_text().replace("cpu.softmax", "cpu.other")
    elif content[:1] in ("1", "-", "t"):
        content = key.file.read_text().replace('"answer": 1', f'"answer": {content}')
    key.file.write_text(content)
    thresholds.forget()
    with pytest.warns(RuntimeWarning, match="is damaged: .* run `fasttfm tune --device cpu`") as told:
        least = {name: thresholds.least(name) for name in thresholds.LEAST}
    assert least == {name: each.value for name, each in thresholds.LEAST.items()}
    assert len(told) == 1
    assert key.file.read_text() == content
    assert main.main(["tune", "--device", "cpu", "--quick", "--quiet"]) == 0
    assert thresholds.least("softmax") == thresholds.NEVER


def test_what_other_versions_measured_is_told_once(planted):
    key = thresholds.system(torch.get_num_threads())
    choice_cache.write(
        dataclasses.replace(key, versions={"torch": "1.0"}), [thresholds.as_answer("softmax", 1, 1.0, 1.0)]
    )
    with pytest.warns(RuntimeWarning, match="was measured with another driver or version"):
        assert thresholds.least("softmax") == thresholds.LEAST["softmax"].value


def test_without_numba_there_is_nothing_to_tune_on_a_cpu(capsys, monkeypatch):
    from fasttfm.cpu import step_passes

    monkeypatch.setattr(step_passes, "usable", lambda: False)
    assert main.main(["tune", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("fasttfm tune: numba is not installed or does not work here")


@pytest.mark.parametrize("name", thresholds.LEAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_work_of_a_pass_enters_it_if_it_is_taken_and_else_does_not(name, dtype, monkeypatch):
    pytest.importorskip("numba")
    from fasttfm.cpu import training_passes

    entered = []
    for function in {each.removesuffix("_without_dropout") for each in thresholds.LEAST}:
        original = getattr(training_passes, function)
        monkeypatch.setattr(
            training_passes, function,
            lambda *given, of=function, original=original: (entered.append(of), original(*given))[1],
        )  # fmt: skip
    with thresholds.forced(dict.fromkeys(thresholds.LEAST, thresholds.NEVER)):
        run = cpu_tuning.work(name, cpu_tuning.SIZES[0], dtype)
        run()
        assert not entered
        with thresholds.forced({name: cpu_tuning.SIZES[0]}):
            run()
    assert entered == [name.removesuffix("_without_dropout")]


def test_only_what_no_search_depends_on_is_tuned():
    assert not any(each.decides_search for each in thresholds.LEAST.values())
    assert not set(thresholds.LEAST) & set(thresholds.FIXED)
