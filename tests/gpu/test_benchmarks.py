"""The clocks of the benchmarks on a device: they synchronize, and count its memory and launches."""

import dataclasses
import time

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.cases import kernels
from benchmarks.measure import records
from benchmarks.measure.case import Setting
from benchmarks.measure.clocks import clock_of

pytestmark = pytest.mark.gpu
CYCLES = 20_000_000  # ten milliseconds on a clock of two gigahertz


def clocks():
    """A clock of device events and a host clock."""
    device = torch.device("cuda", torch.cuda.current_device())
    setting = Setting(device=device, dtype=torch.float16, level="smoke")
    case = kernels.cases(setting)[0]
    made = [clock_of(each, setting) for each in (case, dataclasses.replace(case, passes="step"))]
    assert [clock.name for clock in made] == ["device events", "host, synchronized"]
    return made


def test_clocks_wait_for_the_device():
    for clock in clocks():
        single = clock.microseconds(lambda: torch.cuda._sleep(CYCLES))
        twice = clock.microseconds(lambda: torch.cuda._sleep(2 * CYCLES))
        assert single > 2_000, clock.name
        assert twice > 1.5 * single, clock.name


def test_host_time_is_not_measured():
    x = torch.zeros(1 << 20, device="cuda")

    def run():
        time.sleep(0.003)
        x.add_(1)

    clock = clocks()[0]
    clock.microseconds(run)
    assert clock.microseconds(run) < 500


def test_memory_and_launches_are_those_of_the_device():
    x = torch.randn(1 << 20, device="cuda")
    for clock in clocks():
        assert clock.peak_bytes(lambda: x + 1) == x.nbytes
        assert clock.launches(lambda: (x + 1) * 2) == 2


def test_every_case_runs_and_our_results_are_right(tmp_path):
    assert command.main(["kernels", "blocks", "--smoke", "--device", "cuda", "--out", str(tmp_path)]) == 0
    rows = [row for path in tmp_path.iterdir() for row in records.read(path)]
    ours = [row for row in rows if row["provider"].startswith("fasttfm")]
    assert len(ours) > 40
    for row in ours:
        assert row["status"] == "timed", (row["case"], row["shape"], row["pass"], row["reason"])
        assert row["launches"] > 0
        assert row["clock"] == "device events"
    wrong = [(row["case"], row["shape"], row["pass"], row["provider"]) for row in rows if row["status"] == "wrong"]
    assert not wrong  # a wrong peer has a wrong set-up
