"""Cases of kernels and blocks: all operators and forms are there, and all providers are right."""

import dataclasses
import functools

import pytest
import torch
from toy import HERE, SETTING

from benchmarks.cases import blocks, kernels
from benchmarks.measure import harness, providers, records
from benchmarks.measure.clocks import clock_of
from fasttfm.system.timing import measure

COMPILED = (providers.COMPILE, providers.FLEX, blocks.COMPILED)


def run(case, setting=SETTING):
    """Provider -> row of a case, without compiled providers, which take seconds each."""
    work = case.make()
    work.providers = {name: provider for name, provider in work.providers.items() if name not in COMPILED}
    case = dataclasses.replace(case, make=lambda: work)
    rows = harness.run(case, setting, clock_of(case, setting), 0.0, machine=HERE, least_rounds=1)
    return {row["provider"]: row for row in rows}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")  # SDPA warns when it refuses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [blocks, kernels])
def test_no_provider_of_any_case_is_wrong(group, dtype):
    setting = dataclasses.replace(SETTING, dtype=dtype)
    for case in group.cases(setting):
        for name, row in run(case, setting).items():
            records.validate(row)
            assert row["status"] != "wrong", (case.title, name, row["reason"])
            if name.startswith(("fasttfm", "torch eager", "torch.nn")):
                assert row["status"] == "timed", (case.title, name, row["reason"])
                assert row["error"]["value"] <= row["error"]["allowed"]
                assert row["peak_bytes"] is not None
                assert row["launches"] is None  # none on a CPU


def test_padding_and_causality_reduce_the_cost():
    by_mask = {
        case.shape["mask"]: case.cost
        for case in kernels.cases(dataclasses.replace(SETTING, level="quick"))
        if case.name == "attention" and case.passes == "forward" and case.shape["L"] == 100
    }
    # lengths from half of the keys to all: three quarters; causal: half of these pairs
    assert by_mask["lengths"].flops == pytest.approx(0.75 * by_mask["none"].flops, rel=0.02)
    assert by_mask["lengths+causal"].flops < 0.55 * by_mask["none"].flops
    assert by_mask["bool"].flops == by_mask["none"].flops
    assert by_mask["additive"].bytes > by_mask["bool"].bytes > by_mask["none"].bytes


def test_the_tuner_runs_candidates_in_turns_and_returns_medians():
    order, times = [], iter((9.0, 100.0, 1.0, 300.0, 2.0, 200.0))
    candidates = {name: functools.partial(order.append, name) for name in "ac"}
    results = measure(candidates, lambda run: run() or next(times), seconds=0, least_runs=3)
    assert order == ["a", "a", "c", "c"] + ["a", "c"] * 3  # twice to warm up
    assert results == {"a": 2.0, "c": 200.0}
