"""Kernels on the device against the reference, in the dtypes of training.

The rule is flash-attention's: the error against the reference in float64 may be twice that of plain PyTorch in the same
precision, plus a floor of a few units in the last place.
"""

import contextlib
from typing import Any

import keep_mask
import pytest
import torch

from fasttfm import reference
from fasttfm.functional import backend

from .problems import PROBLEMS, Problem, in_double, solve

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOOR = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative to the largest magnitude: about 32, 2 and 2 units in the last place."""


def check(problem: Problem, device: torch.device, dtype: torch.dtype, products: Any = None) -> None:
    """Compares by the rule above; products: a context in which plain PyTorch multiplies like the kernel."""
    inputs = problem.inputs(device, dtype)
    with backend("triton"):
        ours = solve(problem.ours, inputs)
    exact = solve(problem.theirs, in_double(inputs))
    with products or contextlib.nullcontext():
        plain = solve(problem.theirs, inputs)
    for position, (actual, true, same) in enumerate(zip(ours, exact, plain, strict=True)):
        assert torch.isfinite(actual).all(), f"result {position} is not finite"
        largest = true.abs().max().item()
        allowed = 2 * (same.double() - true).abs().max().item() + FLOOR[dtype] * largest
        error = (actual.double() - true).abs().max().item()
        assert error <= allowed, f"result {position}: error {error:.2e}, allowed {allowed:.2e}, largest {largest:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_kernel_errs_at_most_twice_as_much_as_torch_in_its_own_precision(problem, device, dtype, ieee):
    check(problem, device, dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sanitized(problem, device, ieee):
    """Runs every problem once, for compute-sanitizer."""
    with backend("triton"):
        solve(problem.ours, problem.inputs(device, torch.float16))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_runs_give_the_same_bits_beside_other_work(problem, device, dtype, ieee):
    """Races and atomics would show here."""
    inputs = problem.inputs(device, dtype)
    noise = torch.randn(1024, 1024, device=device)
    beside = torch.cuda.Stream()
    with backend("triton"):
        first = solve(problem.ours, inputs)
        for _ in range(20):
            with torch.cuda.stream(beside):
                noise = (noise @ noise).clamp(-1, 1)
            for a, b in zip(first, solve(problem.ours, inputs), strict=True):
                assert torch.equal(a, b)
    torch.cuda.synchronize()


def test_the_keep_mask_on_the_device_equals_the_references(device):
    p = 0.3
    for seed in (0, 1, -1, 2**62 + 12345):
        where = torch.tensor([seed], device=device)
        actual = keep_mask.write(
            torch.empty(3, 50, 130, dtype=torch.int8, device=device), where, 9, reference.dropout_threshold(p)
        )
        expected = reference.keep_mask((3, 50, 130), p, where.cpu(), site=9)
        assert torch.equal(actual.cpu().bool(), expected)


def test_tf32_is_used_when_torch_allows_it_and_never_otherwise(device):
    from fasttfm import functional as F
    from fasttfm.kernels import launch

    if launch.chip(device).capability < 80:
        pytest.skip("no TF32 before sm_80")
    q, k, v = (torch.randn(1, 2, 256, 64, device=device) for _ in range(3))
    exact, _ = reference.attention(q.double(), k.double(), v.double())

    def error() -> float:
        with backend("triton"):
            return (F.attention(q, k, v).double() - exact).abs().max().item()

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        in_float32 = error()
        torch.backends.cuda.matmul.allow_tf32 = True
        in_tf32 = error()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert in_float32 < 1e-5
    assert 5 * in_float32 < in_tf32 < 1e-2
