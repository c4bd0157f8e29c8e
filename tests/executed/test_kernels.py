"""The PTX of every kernel family, forward and backward, executed on a CPU and held against reference.py.

Tiles are those that ship for each chip. `make test` takes every problem once, chips and dtypes in turn; `make executed`
every problem on every chip in every dtype.
"""

import pytest
import torch
from conftest import CHIPS
from executing import CPU, check, solve
from gpu.problems import PROBLEMS, _attention

from fasttfm.functional import backend
from fasttfm.kernels.proof.ptx import executed

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LONGEST = 600
"""Keys of a row in `make test`."""

SHORT = [p for p in PROBLEMS if p.keys <= _LONGEST and "9000" not in str(p)]
TURNS = [(p, CHIPS[i % 4], list(DTYPES)[(i + i // 4) % 3]) for i, p in enumerate(SHORT)]
REST = [
    (p, chip, dtype)
    for p in PROBLEMS
    for chip in CHIPS
    for dtype in DTYPES
    if (p, chip, dtype) not in TURNS and p.keys < 9000
]


def cases(which):
    return pytest.mark.parametrize(
        ("problem", "chip", "dtype"), which, ids=[f"{chip} {dtype} {p}" for p, chip, dtype in which]
    )


@cases(TURNS)
def test_a_kernel_computes_what_the_reference_does_and_nothing_forbidden(problem, chip, dtype):
    check(problem, chip, DTYPES[dtype])


@pytest.mark.executed
@cases(REST)
def test_every_kernel_on_every_chip(problem, chip, dtype):
    check(problem, chip, DTYPES[dtype])


@pytest.mark.executed
@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=str)
def test_a_chip_that_takes_the_instructions_of_sm_80(problem):
    if problem.keys < 9000:
        check(problem, "sm_120", torch.bfloat16)


@pytest.mark.parametrize("keys", [16, 30])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_boolean_mask_with_dropout_over_short_rows(keys, dtype):
    """Triton up to 3.7 multiplies 16-deep tiles wrongly when an 8-bit load leads to them (triton#11691)."""
    check(_attention(1, 1, keys, keys, 64, 64, mask="bool", p=0.1), "sm_80", DTYPES[dtype])


def test_two_runs_give_the_same_bits():
    problem = SHORT[0]
    inputs = problem.inputs(CPU, torch.bfloat16)
    runs = []
    for _ in range(2):
        with executed("sm_80"), backend("triton"):
            runs.append(solve(problem.ours, inputs))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
