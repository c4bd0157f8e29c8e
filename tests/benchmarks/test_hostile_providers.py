"""Providers that are wrong or cheat get no time, and do not affect the others."""

import itertools
import threading

import pytest
import torch
from toy import plain, rows
from waiting import PATIENCE

from benchmarks.measure.clocks import HostClock


def beside_plain(provider, passes="forward", **work):
    """(status, reason) of a provider without a time, timed beside plain PyTorch and ours, which must not suffer."""
    results = rows({"hostile": provider, "torch eager": plain, "fasttfm": plain}, passes, **work)
    assert results["torch eager"]["status"] == results["fasttfm"]["status"] == "timed"
    row = results["hostile"]
    assert row["time_us"] is row["throughput"] is row["roofline"] is None
    if row["status"] == "wrong" and row["error"]:
        assert (row["error"]["value"] > row["error"]["allowed"]) == ("against the reference," in row["reason"])
    return row["status"], row["reason"]


def after(count, then):
    """Provider that is plain() in its first `count` calls, and then then()."""
    calls = itertools.count(1)
    return lambda x: (plain if next(calls) <= count else then)(x)


class Lazy(torch.Tensor):
    """Computes when it is read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        real = [plain(a.as_subclass(torch.Tensor)) if isinstance(a, Lazy) else a for a in args]
        return function(*real, **(kwargs or {}))


class LazyList(list):
    def __iter__(self):
        return (plain(x) for x in super().__iter__())


def caching(key):
    """Provider that computes once per key(x)."""
    cache = {}
    return lambda x: cache.setdefault(key(x), plain(x))


PASSES = ["forward", "training forward", "backward", "forward+backward"]
UNREAD, CHANGED = "computed only when it is read", "after the timed runs, with new contents in the inputs' memory"
CHEATS = {
    **{f"off by a thousandth, {passes}": (lambda x: plain(x) * 1.001, passes, "is allowed") for passes in PASSES},
    "half a gradient": (lambda x: plain(x / 2 + x.detach() / 2), "backward", "is allowed"),
    "inputs": (lambda x: x, "forward", "is allowed"),
    "nan": (lambda x: plain(x) * float("nan"), "forward", "error inf"),
    "short": (lambda x: plain(x)[:-1], "forward", "error inf"),
    "twice": (lambda x: (plain(x), plain(x)), "forward", "error inf"),
    "numbers": (lambda x: plain(x).tolist(), "forward", "error inf"),
    "generator": (lambda x: (y for y in [plain(x)]), "forward", UNREAD),
    "lazy tensor": (lambda x: x.as_subclass(Lazy), "forward", UNREAD),
    "lazy list": (lambda x: LazyList([x]), "forward", UNREAD),
    "lazy tensor, timed": (after(5, lambda x: x.as_subclass(Lazy)), "forward", "in timed runs"),
    "lazy list, timed": (after(5, lambda x: LazyList([x])), "forward", "in timed runs"),
    "cached by memory": (caching(lambda x: x.data_ptr()), "forward", CHANGED),
    "cached by identity": (caching(id), "forward", CHANGED),
    "cached by memory and version": (caching(lambda x: (x.data_ptr(), x._version)), "forward", CHANGED),
    **{f"stops after the check, {passes}": (after(5, lambda x: x * 0), passes, CHANGED) for passes in PASSES},
}


@pytest.mark.parametrize(("provider", "passes", "why"), CHEATS.values(), ids=CHEATS)
def test_a_wrong_result_has_no_time(provider, passes, why):
    status, reason = beside_plain(provider, passes)
    assert (status, why in reason) == ("wrong", True), reason


def test_a_wrong_parameter_gradient_has_no_time():
    class Layer(torch.nn.Linear):
        def __init__(self, scale):
            super().__init__(16, 4)
            self.scale = scale

        def forward(self, x):
            weight = self.weight * self.scale + (self.weight * (1 - self.scale)).detach()
            return torch.nn.functional.linear(x, weight, self.bias)

    layers = [Layer(1.0), Layer(1.0), Layer(0.5), Layer(1.0).double()]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    results = rows(dict(zip(("torch eager", "fasttfm", "off"), layers)), "backward", reference=layers[3])
    assert [row["status"] for row in results.values()] == ["timed", "timed", "wrong"]


def test_a_wrong_plain_provider_does_not_loosen_the_others_bound():
    results = rows({"torch eager": lambda x: plain(x) * float("nan"), "zeros": torch.zeros_like, "fasttfm": plain})
    assert [results[name]["status"] for name in ("torch eager", "zeros", "fasttfm")] == ["wrong", "wrong", "timed"]


class Step:
    """A step with dropout, which changes its weight if it trains."""

    def __init__(self, dropout, trains):
        self.model, self.dropout, self.trains = torch.nn.Linear(4, 4), dropout, trains
        torch.nn.init.ones_(self.model.weight)

    def __call__(self, x):
        with torch.no_grad():
            loss = torch.nn.functional.dropout(plain(x), self.dropout).sum() * self.model.weight.sum()
            self.model.weight.mul_(1.1 if self.trains else 1.0)
        return loss


@pytest.mark.parametrize("trains", [False, True])
def test_a_provider_that_ignores_dropout_has_no_time_though_its_weights_change(trains):
    steps = {"torch eager": Step(0.5, trains), "ignores": Step(0.0, trains)}
    checked = dict.fromkeys(steps, lambda x: plain(x).sum())
    trained = {name: each.model for name, each in steps.items()} if trains else None
    results = rows(steps, "step", without_dropout=checked, trained=trained, reference=checked["ignores"])
    assert [row["status"] for row in results.values()] == ["timed", "wrong"]
    assert "ignores dropout" in results["ignores"]["reason"]


@pytest.mark.parametrize("finished", [0, 7])
def test_a_result_unfinished_when_the_clock_stops_has_no_time(finished):
    """finished: number of the eight rows; the others are written after the comparison."""
    looked, threads = threading.Event(), []

    def elsewhere(x):
        y, rows = torch.zeros_like(x), plain(x)
        y[:finished] = rows[:finished]

        def work():
            assert looked.wait(PATIENCE)
            y.copy_(rows)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return y

    try:
        status, reason = beside_plain(elsewhere, clock=HostClock(torch.device("cpu"), 1 << 20))
    finally:
        looked.set()
        for thread in threads:
            thread.join()
    assert (status, "against the reference" in reason) == ("wrong", True), reason


def scaled(x):
    x.data.mul_(0.5)


def zeroed(x):
    with torch.no_grad():
        x.zero_()


def flipped(x):
    """Keeps the sum."""
    x.data.copy_(x.data.flip(0))


def writing(write):
    """Provider that is plain(), and then writes over its input."""
    return lambda x: (plain(x), write(x))[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("write", [scaled, zeroed, flipped])
@pytest.mark.parametrize("since", [1, 2, 5, 8])
def test_a_provider_that_writes_over_the_inputs_has_no_time(write, since):
    """since: its first such call: the first, the check, the warm-up, the timed rounds."""
    results = rows({"hostile": after(since - 1, writing(write)), "torch eager": plain})
    assert results["hostile"]["status"] == "wrong"
    assert results["hostile"]["time_us"] is None
    assert "over" in results["hostile"]["reason"]
    # timed rounds, behind the version counters: it may have been any provider, so no row has a time
    known = since <= 2 or write is zeroed
    assert results["torch eager"]["status"] == ("timed" if known else "wrong")


def test_a_provider_documented_to_overwrite_its_inputs_gets_a_copy():
    results = rows({"torch eager": plain, "writes": writing(scaled)}, overwrites=frozenset({"writes"}))
    assert results["writes"]["status"] == results["torch eager"]["status"] == "timed"


def test_a_number_of_threads_set_by_a_provider_is_reset():
    before, seen = torch.get_num_threads(), []
    greedy = lambda x: (torch.set_num_threads(before + 1), plain(x))[1]  # noqa: E731
    rows({"greedy": greedy, "fasttfm": lambda x: (seen.append(torch.get_num_threads()), plain(x))[1]})
    assert {*seen, torch.get_num_threads()} == {before}


@pytest.mark.sample(2)
@pytest.mark.parametrize("last", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("error", [RuntimeError("No kernel.\nAnd a second line."), SystemExit(0)])
def test_a_provider_that_raises_in_any_run_is_refused(last, error):
    def raises(x):
        raise error

    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    assert beside_plain(after(last - 1, raises)) == ("refused", reason)
