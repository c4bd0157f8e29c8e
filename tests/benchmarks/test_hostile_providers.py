"""Providers that cheat get no time, and do not affect the others."""

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
    return row["status"], row["reason"]


def after(count, then):
    """Provider that is plain() in its first `count` calls, and then then()."""
    calls = itertools.count(1)
    return lambda x: (plain if next(calls) <= count else then)(x)


def assert_wrong(why, provider, passes="forward", **work):
    status, reason = beside_plain(provider, passes, **work)
    assert status == "wrong"
    assert why in reason


class Lazy(torch.Tensor):
    """Computes when it is read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        real = [plain(a.as_subclass(torch.Tensor)) if isinstance(a, Lazy) else a for a in args]
        return function(*real, **(kwargs or {}))


class LazyList(list):
    def __iter__(self):
        return (plain(x) for x in super().__iter__())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "provider",
    [
        lambda x: x,
        torch.zeros_like,
        lambda x: plain(x) * float("nan"),
        lambda x: plain(x)[:-1],
        lambda x: (plain(x), plain(x)),
        lambda x: plain(x).tolist(),
        lambda x: (y for y in [plain(x)]),
    ],
    ids=["inputs", "zeros", "nan", "short", "twice", "numbers", "generator"],
)
def test_a_wrong_result_has_no_time(provider):
    assert beside_plain(provider)[0] == "wrong"


def test_a_wrong_plain_provider_does_not_loosen_the_others_bound():
    results = rows({"torch eager": lambda x: plain(x) * float("nan"), "zeros": torch.zeros_like, "fasttfm": plain})
    assert [results[name]["status"] for name in ("torch eager", "zeros", "fasttfm")] == ["wrong", "wrong", "timed"]


@pytest.mark.parametrize("lazy", [lambda x: x.as_subclass(Lazy), lambda x: LazyList([x])], ids=["tensor", "list"])
def test_a_lazy_result_has_no_time(lazy):
    assert_wrong("computed only when it is read", lazy)
    assert_wrong("in timed runs", after(5, lazy))


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
        assert_wrong("against the reference", elsewhere, clock=HostClock(torch.device("cpu")))
    finally:
        looked.set()
        for thread in threads:
            thread.join()


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


@pytest.mark.parametrize(
    "key",
    [lambda x: x.data_ptr(), id, lambda x: (x.data_ptr(), x._version)],
    ids=["memory", "identity", "memory and version"],
)
def test_a_cached_result_has_no_time(key):
    cache = {}
    assert_wrong("new contents in the inputs' memory", lambda x: cache.setdefault(key(x), plain(x)))


@pytest.mark.parametrize("passes", ["forward", "training forward", "backward", "forward+backward"])
def test_a_provider_that_stops_computing_after_the_check_has_no_time(passes):
    assert_wrong("after the timed runs", after(5, lambda x: x * 0), passes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("last", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("error", [RuntimeError("no more"), SystemExit(0)])
def test_a_provider_that_raises_in_any_run_is_refused(last, error):
    def raises(x):
        raise error

    assert beside_plain(after(last - 1, raises)) == ("refused", f"{type(error).__name__}: {error}")


def test_a_number_of_threads_set_by_a_provider_is_reset():
    before = torch.get_num_threads()
    seen = set()

    def greedy(x):
        torch.set_num_threads(before + 1)
        return plain(x)

    def next_to_it(x):
        seen.add(torch.get_num_threads())
        return plain(x)

    results = rows({"greedy": greedy, "torch eager": plain, "fasttfm": next_to_it})
    assert {row["status"] for row in results.values()} == {"timed"}
    assert seen == {before}
    assert torch.get_num_threads() == before
