"""The kernel rows under pytest-benchmark, from the registry that `python -m benchmarks` uses.

    pytest benchmarks --benchmark-only                                      every row that can run here
    pytest benchmarks --benchmark-only -k "LayerNorm and fasttfm"
    FASTTFM_BENCHMARK_LEVEL=smoke pytest benchmarks --benchmark-only        the smallest shapes

A test is a case and a provider. One that is absent or refuses is skipped with its reason, wrong numbers fail. Numbers
are checked and inputs rotate as in the harness, but the clock is pytest-benchmark's, which does not flush the cache:
for comparing one's own changes. Records to publish come from `python -m benchmarks`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.__main__ import usual_dtype
from benchmarks.cases import kernels
from benchmarks.measure.case import Setting, Work
from benchmarks.measure.clocks import Clocks
from benchmarks.measure.harness import Trial

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_SETTING = Setting(
    device=_DEVICE,
    dtype=usual_dtype(_DEVICE),
    level=os.environ.get("FASTTFM_BENCHMARK_LEVEL", "quick"),
    threads=torch.get_num_threads(),
)
_CLOCKS = Clocks(_DEVICE)
_CASES = {f"{case.title}": case for case in kernels.cases(_SETTING)}


@functools.lru_cache(maxsize=1)  # a case's providers stand side by side; two cases need not fit in memory
def _work(title: str) -> Work:
    return _CASES[title].make(_SETTING)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("title", "provider"), [(title, name) for title in _CASES for name in _work(title).providers])


def test_kernel(title: str, provider: str, benchmark: Any) -> None:
    case, whole = _CASES[title], _work(title)
    compared = {name: whole.providers[name] for name in (whole.plain, provider)}
    work = dataclasses.replace(whole, providers=compared)
    trial = Trial(case, work, _SETTING, _CLOCKS.of(case))
    trial.begin()
    entry = trial.entries[provider]
    if entry.status == "wrong":
        pytest.fail(str(entry.reason))
    if entry.status != "timed":
        pytest.skip(f"{entry.status}: {entry.reason}")

    def prepared() -> tuple[tuple[Callable[[], Any]], dict[str, Any]]:
        run = trial.prepare(entry.function, trial.inputs.next(provider))
        _wait()
        return (run,), {}

    def run(act: Callable[[], Any]) -> None:
        act()
        _wait()

    benchmark.group = title
    with trial.gradients():
        benchmark.pedantic(run, setup=prepared, rounds=20, warmup_rounds=2)


def _wait() -> None:
    if _DEVICE.type == "cuda":
        torch.cuda.synchronize(_DEVICE)
