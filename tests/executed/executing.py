"""Runs a problem of tests/gpu/problems.py by executing PTX and compares it with the reference by the rule of
accuracy.py."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in (".", "kernels")]

from accuracy import assert_as_accurate  # noqa: E402
from attention_once import append, decode  # noqa: E402, F401
from gpu.problems import Problem, in_double, solve  # noqa: E402

from fasttfm.functional import backend  # noqa: E402
from fasttfm.kernels.proof.executed import executed  # noqa: E402
from ptx_check import Machine  # noqa: E402

CHIPS = ("sm_60", "sm_75", "sm_80", "sm_90")
"""The chips whose PTX the tests of this folder execute, besides sm_100 and sm_120."""
CPU = torch.device("cpu")


def solving(problem: Problem, dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
    """A function that solves a problem by our operators, on inputs drawn now."""
    return functools.partial(solve, problem.ours, problem.inputs(CPU, dtype))


def check(problem: Problem, chip: str, dtype: torch.dtype) -> Machine:
    """Raises FaultyKernel for a fault of a kernel, AssertionError for wrong numbers."""
    inputs = problem.inputs(CPU, dtype)
    with executed(chip) as machine, backend("triton"):
        ours = solve(problem.ours, inputs)
    assert machine.launches or (not problem.dropout and "residual_add" in str(problem)), "no kernel was launched"
    exact = solve(problem.theirs, in_double(inputs))
    plain = solve(problem.theirs, inputs)
    largest = max(x.abs().max().item() for x in exact)
    for position, (results, true, same) in enumerate(zip(ours, exact, plain, strict=True)):
        assert_as_accurate(results, same, true, f"result {position}", largest=largest)
    return machine
