"""The kernel benchmarks without a GPU: providers compute the same thing, and timings are kept as they were taken."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_check, kernel_cases, machine
from fasttfm.timing import Timing, measure, quantile

CPU = {"dtype": torch.float32, "device": "cpu"}


def small_cases(backward):
    for padded, causal in ((True, False), (True, True), (False, True), (False, False)):
        yield kernel_cases.attention(2, 2, 12, 8, padded=padded, causal=causal, dropout_p=0.0, backward=backward, **CPU)
    yield kernel_cases.residual_layer_norm(10, 16, dropout_p=0.0, backward=backward, **CPU)
    yield kernel_cases.feed_forward(10, 16, 32, dropout_p=0.0, backward=backward, **CPU)
    if backward:
        yield kernel_cases.linear_cross_entropy(10, 16, 40, **CPU)


@pytest.mark.parametrize("backward", [False, True])
def test_every_provider_computes_the_same(backward):
    compared = 0
    for case in small_cases(backward):
        expected = case.providers["fasttfm"]()
        for name in ("eager", "sdpa-math"):
            if name in case.providers:
                found = case.providers[name]()
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{case.record()} {name}")
                compared += 1
    assert compared == (11 if backward else 10)


def test_forward_alone_keeps_no_graph():
    case = kernel_cases.feed_forward(4, 8, 16, dropout_p=0.0, backward=False, **CPU)
    assert not case.providers["fasttfm"]().requires_grad


def test_each_run_draws_its_own_dropout():
    case = kernel_cases.residual_layer_norm(10, 16, dropout_p=0.5, backward=False, **CPU)
    assert not torch.equal(case.providers["fasttfm"](), case.providers["fasttfm"]())


def test_the_check_has_every_family():
    assert {name for name, _ in kernel_cases.all_cases()} == {
        "attention",
        "embedding",
        "feed_forward",
        "linear_cross_entropy",
        "residual_layer_norm",
    }


class FakeClock:
    """Runs take the number of microseconds that they return."""

    def microseconds(self, run):
        return run()

    def peak_bytes(self, run):
        return 1000


def refuses():
    raise RuntimeError("No available kernel.\nAnd a second line.")


def test_providers_take_turns_and_a_refusal_does_not_stop_the_others():
    order = []
    seconds = iter(range(100))

    def run(name, times):
        def once():
            order.append(name)
            return float(next(times))

        return once

    found = measure(
        {"a": run("a", iter(range(100))), "b": refuses, "c": run("c", iter(range(100, 200)))},
        FakeClock(),
        seconds=10,
        warm_up=1,
        least_runs=3,
        now=lambda: next(seconds),
    )
    assert order == ["a", "c"] + ["a", "c"] * 12  # once to warm up; three rounds, then until the tenth second has come
    assert found["a"] == Timing(
        median_us=6.5, p20_us=pytest.approx(3.2), p80_us=pytest.approx(9.8), runs=12, peak_bytes=1000
    )
    assert found["b"] == "RuntimeError: No available kernel."
    assert list(found) == ["a", "b", "c"]


def test_at_least_so_many_rounds_however_slow():
    found = measure({"a": lambda: 1.0}, FakeClock(), seconds=0, least_runs=7)
    assert found["a"].runs == 7


def test_quantiles_lie_between_neighbours():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([5.0], 0.8) == 5.0


def test_every_line_says_what_ran_how_long_and_where(tmp_path, capsys):
    case = kernel_cases.residual_layer_norm(10, 16, dropout_p=0.0, backward=False, **CPU)
    case = kernel_cases.Case("norm", case.shape, case.dtype, False, case.cost, {"x": lambda: 20.0, "y": refuses})
    file = tmp_path / "results" / "a.jsonl"
    gpu_check.run_timings([case], FakeClock(), seconds_per_case=0, file=file, where={"device": "a fake"})
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["benchmark"], first["M"], first["provider"], first["device"]) == ("norm", 10, "x", "a fake")
    assert first["median_us"] == 20.0
    assert first["needed_gb_per_s"] == round(case.cost.bytes / 20e-6 / 1e9, 1)
    assert second["refused"].startswith("RuntimeError: No available kernel")
    assert "x 20.0 us" in capsys.readouterr().out


def test_a_measurement_names_commit_and_versions():
    described = machine.describe()
    assert described["torch"] == torch.__version__.split("+")[0] or described["torch"] == torch.__version__
    assert set(described) >= {"time", "command", "commit", "uncommitted_changes", "triton", "fasttfm", "python"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_the_check_refuses_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check"], cwd=machine.ROOT, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no CUDA or ROCm device" in done.stderr
