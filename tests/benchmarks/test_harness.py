"""The harness: refused inputs, turns, rounds and noise, what a record counts, clocks and errors."""

import itertools
import time

import pytest
import torch
from toy import FakeClock, plain, rows

from benchmarks.cases import synthetic
from benchmarks.measure import clocks, harness, numerics
from benchmarks.measure.case import Setting
from benchmarks.measure.clocks import HostClock, host_peak_bytes
from benchmarks.measure.providers import CTRANSLATE2, CUDA_GRAPH, Absent
from fasttfm.kernels.proof.costs import Cost, Machine

COUNT = itertools.count()
SHARED = torch.linspace(0, 1, 16)


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (lambda i: (torch.zeros(4, 4),), "constant"),
        (lambda i: (torch.full((4,), 1.5), torch.randn(3)), "constant"),
        (lambda i: (torch.ones(5, dtype=torch.int64),), "only constants"),
        (lambda i: (SHARED,), "share a tensor"),
        (lambda i: (SHARED.clone(),), "are equal"),
        (lambda i: (torch.randn(4) + next(COUNT),), "is not reproducible"),
    ],
    ids=["zeros", "one constant", "integers", "same object", "same numbers", "not reproducible"],
)
def test_inputs_that_flatter_are_refused(inputs, why):
    with pytest.raises(ValueError, match=why):
        rows({"torch eager": plain}, inputs=inputs)


def watched(seen, name):
    """Provider that records its name and its input's address."""

    def run(x):
        seen.append((name, x.data_ptr()))
        return plain(x)

    return run


@pytest.mark.parametrize("count", [1, 3, 5])
def test_no_provider_gets_an_input_twice_in_a_row(count):
    seen = []
    rows({f"p{i}": watched(seen, f"p{i}") for i in range(count)})
    # without the two checks, which give all providers the same inputs
    turns = [*seen[:count], *seen[2 * count : -count]]
    assert len(turns) == count * (1 + 2 + 2 + 3)  # the first call, warming up, memory and launches, timed rounds
    for i in range(count):
        addresses = [address for name, address in turns if name == f"p{i}"]
        assert all(a != b for a, b in itertools.pairwise(addresses))


QUICK = Setting(device=torch.device("cpu"), dtype=torch.float32, level="quick")


class Restless(FakeClock):
    """Times spread in the first runs."""

    def __init__(self, runs):
        super().__init__()
        self.restless = runs

    def microseconds(self, run):
        super().microseconds(run)
        return 10.0 + 10.0 * (self.runs % 2) * (self.runs <= self.restless)


@pytest.mark.parametrize(
    ("restless", "busy", "rounds", "noisy"),
    [
        (0, {}, 3, False),
        (1 + 3, {}, 2 * 3, False),  # the check and the first three rounds
        (100, {}, 2 * 3, True),
        (0, {"others": 0.3}, 2 * 3, True),
        (0, {"steal": 0.1}, 2 * 3, True),
    ],
    ids=["quiet", "timed once more", "restless", "other programs", "stolen time"],
)
def test_a_case_with_spread_times_or_on_a_busy_machine_is_timed_once_more_and_then_marked_noisy(
    restless, busy, rounds, noisy, monkeypatch
):
    load = {"before": 0.1, "during": 0.5, "steal": 0.0, "others": 0.0, **busy}
    monkeypatch.setattr(harness.Watch, "read", lambda self: dict(load))
    clock = Restless(restless)
    row = rows({"torch eager": plain}, clock=clock, setting=QUICK)["torch eager"]
    assert (row["noisy"], row["load"], row["time_us"]["runs"]) == (noisy, load, 3)
    assert row["spread"] > 0.25 if restless == 100 else row["spread"] == 0.0
    assert clock.runs == 1 + rounds + 1  # with the two checks


def test_a_backward_is_timed_without_its_forward():
    inside = []

    class Watching(FakeClock):
        def microseconds(self, run):
            inside.append("start")
            run()
            inside.append("stop")
            return 10.0

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            inside.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            inside.append("backward")
            return grad.clone()

    rows({"marked": lambda x: Marked.apply(x) * 2}, "backward", reference=lambda x: x * 2, clock=Watching())
    checked = ["start", "forward", "backward", "stop"]  # the complete result, when the clock stops
    timed = ["forward", "start", "backward", "stop"]
    first = inside.index("start")
    assert inside[first : first + 4] == inside[-4:] == checked
    assert inside[-16:-4] == 3 * timed
    assert inside.count("start") == 2 + 3


@pytest.mark.parametrize("passes", ["forward", "training forward"])
def test_only_a_training_forward_saves_a_graph(passes):
    saved = set()

    def observed(x):
        y = plain(x)
        saved.add(y.requires_grad)
        return y

    rows({"observed": observed}, passes)
    assert saved == {passes == "training forward"}


class Graph:
    """Provider that keeps memory between its runs."""

    def __call__(self, x):
        return plain(x)

    def held_bytes(self):
        return 500


def test_a_row_has_its_time_rates_memory_and_launches_or_the_reason_for_none():
    options = {"cost": Cost(flops=40_000_000, bytes=1_000_000), "ceilings": Machine(bandwidth=1e12, flops=8e12)}
    away = Absent("pip install away")
    named = dict.fromkeys(("torch int8, a worker a core", CTRANSLATE2), plain)
    options |= {"unit": "rows/s", "units": len}
    results = rows({"torch eager": plain, **named, CUDA_GRAPH: Graph(), "fasttfm": Graph(), "away": away}, **options)
    row = results["torch eager"]
    assert row["throughput"] == {"value": pytest.approx(8 / 10e-6), "unit": "rows/s"}
    assert row["time_us"] == {"p20": 10.0, "p50": 10.0, "p80": 10.0, "runs": 3}
    assert row["tflop_per_s"] == pytest.approx(4.0)
    assert row["gb_per_s"] == pytest.approx(100.0)
    assert row["roofline"] == {"floor_us": 5.0, "share": 0.5, "ceilings": {"gb_per_s": 1000.0, "tflop_per_s": 8.0}}
    assert results["torch int8, a worker a core"]["roofline"] is None, "its ceilings are others"
    counted = {name: (row["peak_bytes"], row["launches"]) for name, row in results.items()}
    assert counted["torch eager"] == (1000, 3)
    assert counted[CUDA_GRAPH] == counted["fasttfm"] == (1500, None), "with what it holds"
    assert counted[CTRANSLATE2] == (None, None)
    assert (results["away"]["status"], results["away"]["reason"]) == ("absent", "pip install away")


def test_the_host_clock_waits_for_the_run_and_overwrites_the_cache(monkeypatch):
    monkeypatch.setattr(clocks, "last_level_cache", lambda: 1 << 20)
    clock = HostClock(torch.device("cpu"))
    before = clock._flush.clone()
    assert clock.microseconds(lambda: time.sleep(0.01)) >= 10_000
    assert not torch.equal(clock._flush, before)
    assert clock._flush.nbytes >= 2 << 20


def test_peak_memory_on_the_host():
    def run():
        a = torch.empty(1000, 1000)
        b = a + 1
        del a
        c = torch.empty(500, 1000)
        return b, c

    assert host_peak_bytes(run) == pytest.approx(8_000_000, abs=1000)  # plus scalars


def test_a_list_that_has_lost_its_end_is_not_equal():
    assert numerics.equal([[1, 2], [3]], [[1, 2], [3]])
    for one, other in (([[1, 2]], [[1, 2], [3]]), ([[1, 2], [3]], [[1, 2]]), ([torch.ones(2)], [])):
        assert not numerics.equal(one, other)
    same, again, other = (synthetic.corpus(5, synthetic.WMT, 50, seed) for seed in (1, 1, 2))
    assert numerics.equal(same, again), "objects by their attributes"
    assert not numerics.equal(same, other)


def test_the_error_is_that_of_the_worst_tensor():
    expected = [torch.tensor([1000.0, 1.0]), torch.tensor([0.01, 0.02])]
    results = [torch.tensor([1000.0, 2.0]), torch.tensor([0.01, 0.03])]
    assert numerics.relative_error(results, expected) == pytest.approx(0.5)
    assert numerics.allowed("float32", 1e-6) == pytest.approx(2e-6 + 32 * 2**-23)
    assert numerics.allowed("bfloat16", 0.01) == pytest.approx(0.02 + 2 * 2**-7)
    assert numerics.allowed("bfloat16", None) == pytest.approx(2**-3.5)


@pytest.mark.parametrize("error", [numerics.relative_error, numerics.kinked_error])
@pytest.mark.parametrize("place", [0, 1])
def test_nan_in_any_tensor_is_an_infinite_error(error, place):
    expected = [torch.ones(200), torch.ones(200)]
    results = [x.clone() for x in expected]
    results[place][7] = torch.nan
    assert error(results, expected) == float("inf")


@pytest.mark.parametrize(("changed", "by", "error"), [(10, 0.1, 0.0), (11, 0.1, 0.05), (1, 0.4, 0.2)])
def test_kinked_error_tolerates_one_percent_of_the_elements_by_a_tenth(changed, by, error):
    expected = torch.linspace(1, 2, 1000)
    results = expected.clone()
    results[:changed] += by
    assert numerics.kinked_error(results, expected) == pytest.approx(error, abs=1e-6)
    assert numerics.relative_error(results, expected) == pytest.approx(by / 2, rel=1e-5)


def test_the_ceiling_of_int8_is_of_the_searchs_operator(monkeypatch):
    dtypes = []
    monkeypatch.setattr(
        clocks.int8, "multiplier", lambda quantized, scales: lambda rows: dtypes.append((rows.dtype, quantized.dtype))
    )
    assert clocks.ceilings(Setting(device=torch.device("cpu"), dtype=torch.int8, level="smoke")).flops > 0
    assert set(dtypes) == {(torch.uint8, torch.int8)}
