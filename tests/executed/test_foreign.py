"""The command that executes kernels of other projects: outcomes of cases, and Liger's kernels if installed."""

import foreign
import pytest
import torch
import triton
import triton.language as tl

from benchmarks.measure import records


@triton.jit
def doubled(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def launched(elements: int, times: float):
    x = torch.randn(50)
    out = torch.empty_like(x)
    doubled[(1,)](x, out, elements, N=64)
    yield out, x * times


def test_the_record(tmp_path, monkeypatch):
    given = {"right": (50, 2.0), "too_far": (51, 2.0), "other": (50, 3.0)}
    cases = [foreign.variant(name, launched, *of) for name, of in given.items()]
    monkeypatch.setattr(foreign, "PACKAGES", {"torch": cases, "no-such-package": cases})
    assert foreign.main(["--chip", "sm_80", "--results", str(tmp_path)]) == 1
    (record,) = records.read(tmp_path / "foreign.jsonl")
    assert (record["package"], record["cases"], record["passed"]) == ("torch", 3, 1)
    assert record["others"].keys() == {"too_far", "other"}
    assert record["others"]["too_far"].startswith("fault: bounds")
    assert record["others"]["other"].startswith("wrong: ")


@pytest.mark.parametrize("chip", foreign.CHIPS)
@pytest.mark.parametrize("case", foreign.PACKAGES["liger_kernel"])
def test_kernels_of_liger(case, chip):
    pytest.importorskip("liger_kernel")
    assert foreign.outcome(case, chip) == "passed"
