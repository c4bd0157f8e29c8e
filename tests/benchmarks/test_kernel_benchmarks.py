"""Cases of kernels and blocks: all operators and forms are there, and all providers are right."""

import dataclasses
import itertools
import sys

import pytest
import torch
from toy import HERE, SETTING

from benchmarks.cases import blocks, kernels
from benchmarks.measure import harness, providers, records
from benchmarks.measure.case import LEVELS
from benchmarks.measure.clocks import clock_of
from benchmarks.measure.providers import Absent
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


FUSED = {"linear + cross entropy", "linear + cross entropy, unsmoothed"}


@pytest.mark.parametrize("level", LEVELS)
def test_the_kernels_have_all_operators_forms_and_passes(level):
    results = kernels.cases(dataclasses.replace(SETTING, level=level))
    assert {case.name for case in results} - FUSED == {
        "LayerNorm", "attention", "attention weights", "cross attention", "cross entropy", "embedding",
        "feed-forward", "feed-forward gelu", "feed-forward silu", "packed attention",
        "residual + dropout + LayerNorm", "scored attention",
    }  # fmt: skip
    attention = [case.shape for case in results if case.name == "attention"]
    masks = {"none", "causal", "lengths", "lengths+causal", "bool", "additive"}
    assert ({shape["mask"] for shape in attention}, {shape["dropout"] for shape in attention}) == (masks, {0.0, 0.1})
    passes = {name: {case.passes for case in results if case.name == name} for name in (case.name for case in results)}
    for name, found in passes.items():
        fused = "forward+backward" in found
        assert fused == (name in {"cross entropy", *FUSED}), "some providers fuse the two"
        assert name in FUSED or ("backward" in found and found & {"forward", "training forward"}), name
    assert all(case.cost is not None and case.cost.bytes > 0 for case in results)
    assert len({case.title for case in results}) == len(results)


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="needs torch 2.13")
def test_torchs_linear_cross_entropy_is_timed():
    (case,) = (c for c in kernels.cases(SETTING) if c.name == "linear + cross entropy, unsmoothed")
    rows = run(case)
    assert {rows[name]["status"] for name in ("fasttfm", "torch eager", providers.TORCH_CHUNKED)} == {"timed"}


def test_absent_providers_say_how_to_install_them():
    standard = kernels.cases(dataclasses.replace(SETTING, level="standard"))
    work = next(case for case in standard if case.shape.get("mask") == "none").make()
    assert set(work.providers) == {
        "fasttfm", "torch eager", "torch.compile", "SDPA math", "SDPA flash", "FlexAttention", "flash-attn",
    }  # fmt: skip
    for name, provider in work.providers.items():
        if isinstance(provider, Absent):
            assert "pip install" in provider.install or "installed" in provider.install, name


def test_an_installed_package_that_fails_at_import_is_refused_and_breaks_no_case(monkeypatch):
    for name in (providers.LIGER, providers.FLASH_ATTN):
        monkeypatch.setitem(providers._PACKAGES, name, providers._Package("json", "installed, and for a CPU too"))
    for module in ("liger_kernel", "flash_attn", "flash_attn.ops.triton.layer_norm"):
        monkeypatch.setitem(sys.modules, module, None)  # its import raises
    names = ("LayerNorm", "residual + dropout + LayerNorm", "attention", "packed attention", "cross entropy")
    results = {case.name: case for case in reversed(kernels.cases(SETTING)) if case.name in names}
    assert set(results) == set(names)
    for case in results.values():
        rows = run(case)
        assert rows["fasttfm"]["status"] == "timed"
        broken = [row for name, row in rows.items() if name in (providers.LIGER, providers.FLASH_ATTN)]
        assert broken
        assert all(row["status"] == "refused" and "Error: " in row["reason"] for row in broken)


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


@pytest.mark.parametrize(
    ("seconds", "least", "rounds"),
    [(10, 3, 12), (0, 7, 7)],  # the clock says 0, 1, 2, ...: three rounds, then until the tenth second has come
)
def test_the_tuner_runs_candidates_in_turns(seconds, least, rounds):
    order, clock = [], itertools.count()

    def candidate(name, times):
        def run_once():
            order.append(name)
            return float(next(times))

        return run_once

    def refuses():
        raise RuntimeError("No available kernel.\nAnd a second line.")

    candidates = {"a": candidate("a", itertools.count()), "b": refuses, "c": candidate("c", itertools.count(100))}
    options = {"seconds": seconds, "least_runs": least, "now": lambda: next(clock)}
    results = measure(candidates, lambda run: run(), **options)
    assert order == ["a", "a", "c", "c"] + ["a", "c"] * rounds  # twice to warm up
    median = 2 + (rounds - 1) / 2
    assert results == {"a": median, "b": "RuntimeError: No available kernel.", "c": 100 + median}
