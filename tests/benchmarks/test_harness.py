"""The harness rejects inputs that flatter, and keeps no time of wrong results."""

import itertools
import time

import pytest
import torch
from toy import FakeClock, plain, rows

from benchmarks.measure import clocks, harness, numerics
from benchmarks.measure.case import Setting
from benchmarks.measure.clocks import HostClock, host_peak_bytes, last_level_cache
from benchmarks.measure.providers import CTRANSLATE2, CUDA_GRAPH, Absent
from fasttfm.kernels.proof.costs import Cost, Machine

COUNT = itertools.count()
SHARED = torch.linspace(0, 1, 16)


@pytest.mark.parametrize("passes", ["forward", "training forward", "backward", "forward+backward"])
def test_a_wrong_provider_has_no_time(passes):
    results = rows({"torch eager": plain, "fasttfm": plain, "off": lambda x: plain(x) * 1.001}, passes)
    assert results["fasttfm"]["status"] == results["torch eager"]["status"] == "timed"
    assert results["fasttfm"]["time_us"] == {"p20": 10.0, "p50": 10.0, "p80": 10.0, "runs": 3}
    off = results["off"]
    assert off["status"] == "wrong"
    assert off["time_us"] is None
    assert off["error"]["value"] > off["error"]["allowed"]
    assert "is allowed" in off["reason"]


def test_a_wrong_gradient_has_no_time():
    def off(x):
        return plain(x / 2 + x.detach() / 2)

    for passes, status in (("forward", "timed"), ("backward", "wrong")):
        assert rows({"torch eager": plain, "off": off}, passes)["off"]["status"] == status


def test_a_wrong_parameter_gradient_has_no_time():
    class Layer(torch.nn.Linear):
        def __init__(self, scale):
            super().__init__(16, 4)
            self.scale = scale

        def forward(self, x):
            weight = self.weight * self.scale + (self.weight * (1 - self.scale)).detach()
            return torch.nn.functional.linear(x, weight, self.bias)

    layers = [Layer(1.0), Layer(1.0), Layer(0.5)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    double = Layer(1.0).double()
    double.load_state_dict(layers[0].state_dict())
    results = rows(dict(zip(("torch eager", "fasttfm", "off"), layers)), "backward", reference=double)
    assert [results[name]["status"] for name in ("torch eager", "fasttfm", "off")] == ["timed", "timed", "wrong"]


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


def test_each_round_times_all_providers_on_the_same_inputs():
    seen = []
    rows({name: watched(seen, name) for name in "abc"}, "step", rounds=7, warm_up=0)
    timed = seen[6:]  # after the first calls and the check
    assert len(timed) == 3 * 7
    for begin in range(0, 3 * 7, 3):
        names, addresses = zip(*timed[begin : begin + 3])
        assert sorted(names) == ["a", "b", "c"]
        assert len(set(addresses)) == 1


def test_throughputs_compare_as_times_do_for_inputs_of_different_sizes():

    class Turns(FakeClock):
        def microseconds(self, run):
            return 15.0 if super().microseconds(run) and "slow" in seen[-1][0] else 10.0

    seen = []
    results = rows(
        {name: watched(seen, name) for name in ("torch eager", "slow")},
        "step",
        clock=Turns(),
        inputs=lambda i: (torch.randn((3, 5, 7, 11, 13)[i], 16),),
        unit="rows/s",
        units=len,
        rounds=5,
    )
    fast, slow = (results[name]["throughput"]["value"] for name in ("torch eager", "slow"))
    assert fast / slow == pytest.approx(1.5, rel=1e-3)
    assert results["slow"]["throughput"]["unit"] == "rows/s"


QUICK = Setting(device=torch.device("cpu"), dtype=torch.float32, level="quick")


class Restless(FakeClock):
    """Times spread in the first runs."""

    def __init__(self, runs):
        super().__init__()
        self.restless = runs

    def microseconds(self, run):
        super().microseconds(run)
        return 10.0 + 10.0 * (self.runs % 2) * (self.runs <= self.restless)


@pytest.fixture
def idle(monkeypatch):
    """Load of an idle machine; idle["others"] can be changed."""
    load = {"before": 0.1, "during": 0.5, "steal": 0.0, "others": 0.0}
    monkeypatch.setattr(harness.Watch, "read", lambda self: dict(load))
    return load


@pytest.mark.parametrize(
    ("restless", "rounds", "noisy"),
    [(0, 3, False), (1 + 3, 2 * 3, False), (100, 2 * 3, True)],  # 1 + 3: the check and the first three rounds
    ids=["quiet", "timed once more", "restless"],
)
def test_a_case_with_spread_times_is_timed_once_more_and_then_marked_noisy(idle, restless, rounds, noisy):
    clock = Restless(restless)
    row = rows({"torch eager": plain}, clock=clock, setting=QUICK)["torch eager"]
    assert (row["noisy"], row["spread"] > 0.25, row["load"], row["time_us"]["runs"]) == (noisy, noisy, idle, 3)
    assert noisy or row["spread"] == 0.0
    assert clock.runs == 1 + rounds + 1  # with the two checks


@pytest.mark.parametrize(("field", "value"), [("others", 0.3), ("steal", 0.1)])
def test_a_case_timed_on_a_busy_machine_is_marked_noisy(idle, field, value):
    idle[field] = value
    clock = FakeClock()
    results = rows({"torch eager": plain, "fasttfm": plain}, clock=clock, setting=QUICK)
    assert all(row["noisy"] for row in results.values())
    assert clock.runs == 2 * (1 + 2 * 3 + 1)


def test_a_provider_that_ignores_dropout_has_no_time():
    def drops(x):
        return torch.nn.functional.dropout(plain(x), 0.5)

    results = rows({"torch eager": drops, "ignores": plain}, without_dropout={"torch eager": plain, "ignores": plain})
    assert results["torch eager"]["status"] == "timed"
    assert results["ignores"]["status"] == "wrong"
    assert "ignores dropout" in results["ignores"]["reason"]


def test_a_training_step_that_ignores_dropout_has_no_time_though_its_weights_change():
    class Step:
        def __init__(self, dropout):
            self.model, self.dropout = torch.nn.Linear(4, 4), dropout
            torch.nn.init.ones_(self.model.weight)

        def __call__(self, x):
            with torch.no_grad():
                loss = torch.nn.functional.dropout(plain(x), self.dropout).sum() * self.model.weight.sum()
                self.model.weight.mul_(1.1)
            return loss

    steps = {"torch eager": Step(0.5), "ignores": Step(0.0)}
    checked = dict.fromkeys(steps, lambda x: plain(x).sum())
    trained = {name: each.model for name, each in steps.items()}
    options = {"without_dropout": checked, "trained": trained, "reference": checked["ignores"]}
    results = rows(steps, "step", **options)
    assert results["torch eager"]["status"] == "timed"
    assert results["ignores"]["status"] == "wrong"
    assert "ignores dropout" in results["ignores"]["reason"]


def test_refused_and_absent_providers_have_rows_with_the_reason():
    def refuses(x):
        raise RuntimeError("No available kernel.\nAnd a second line.")

    results = rows({"torch eager": plain, "refuses": refuses, "away": Absent("pip install away")})
    assert results["refuses"]["status"] == "refused"
    assert results["refuses"]["reason"] == "RuntimeError: No available kernel."
    assert (results["away"]["status"], results["away"]["reason"]) == ("absent", "pip install away")
    assert results["torch eager"]["status"] == "timed"


def test_memory_that_runs_out_in_the_comparison_is_no_fault_of_the_provider():
    def error(result, expected):
        raise torch.OutOfMemoryError("CUDA out of memory")

    (record,) = rows({"torch eager": plain}, error=error).values()
    assert (record["status"], record["reason"]) == ("refused", "OutOfMemoryError: CUDA out of memory")


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


def test_only_a_training_forward_saves_a_graph():
    saved = {}

    def observed(x):
        y = plain(x)
        saved[passes] = y.requires_grad
        return y

    for passes in ("forward", "training forward"):
        rows({"observed": observed}, passes)
    assert saved == {"forward": False, "training forward": True}


def test_rates_follow_from_cost_and_time_without_a_roofline_for_int8():
    options = {"cost": Cost(flops=40_000_000, bytes=1_000_000), "ceilings": Machine(bandwidth=1e12, flops=8e12)}
    results = rows({"torch eager": plain, "torch int8, a worker a core": plain}, **options)
    row = results["torch eager"]
    assert row["tflop_per_s"] == pytest.approx(4.0)
    assert row["gb_per_s"] == pytest.approx(100.0)
    assert row["roofline"] == {"floor_us": 5.0, "share": 0.5, "ceilings": {"gb_per_s": 1000.0, "tflop_per_s": 8.0}}
    assert (row["peak_bytes"], row["launches"]) == (1000, 3)
    assert results["torch int8, a worker a core"]["roofline"] is None


def test_kept_memory_is_added_to_the_peak_and_unknown_values_are_none():
    class Graph:
        def __call__(self, x):
            return plain(x)

        def held_bytes(self):
            return 500

    results = rows({"torch eager": plain, CUDA_GRAPH: Graph(), "fasttfm": Graph(), CTRANSLATE2: plain})
    counted = {name: (row["peak_bytes"], row["launches"]) for name, row in results.items()}
    held = dict.fromkeys((CUDA_GRAPH, "fasttfm"), (1500, None))
    assert counted == {"torch eager": (1000, 3), **held, CTRANSLATE2: (None, None)}


def test_the_host_clock_waits_for_the_run_and_overwrites_the_cache():
    clock = HostClock(torch.device("cpu"))
    before = clock._flush.clone()
    assert clock.microseconds(lambda: time.sleep(0.01)) >= 10_000
    assert not torch.equal(clock._flush, before)
    assert clock._flush.nbytes >= 2 * last_level_cache()


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
    assert not numerics.equal([[1, 2]], [[1, 2], [3]])
    assert not numerics.equal([[1, 2], [3]], [[1, 2]])
    assert not numerics.equal([torch.ones(2)], [])


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


def test_kinked_error_tolerates_one_percent_of_the_elements_by_a_tenth():
    expected = torch.linspace(1, 2, 1000)
    results = expected.clone()
    results[:10] += 0.1
    assert numerics.kinked_error(results, expected) < 1e-6 < numerics.relative_error(results, expected)
    results[10] += 0.1
    assert numerics.kinked_error(results, expected) == pytest.approx(0.05)
    results[10] -= 0.1
    results[0] += 0.3
    assert numerics.kinked_error(results, expected) == pytest.approx(0.2)


def test_the_ceiling_of_int8_is_of_the_searchs_operator(monkeypatch):
    dtypes = []

    def multiplier(quantized, scales):
        return lambda rows: dtypes.append((rows.dtype, quantized.dtype))

    monkeypatch.setattr(clocks.int8, "multiplier", multiplier)
    ceilings = clocks.ceilings(Setting(device=torch.device("cpu"), dtype=torch.int8, level="smoke"))
    assert ceilings.flops > 0
    assert set(dtypes) == {(torch.uint8, torch.int8)}
