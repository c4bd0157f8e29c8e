"""What kernels of other people have and ours have not: atomic operations, and configurations to choose among."""

import pytest
import torch
import triton
import triton.language as tl

from fasttfm.kernels.proof.ptx import FaultyKernel, Unsupported, executed


@triton.jit
def _add_up(x, positions, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.atomic_add(out + tl.load(positions + i), tl.load(x + i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("chip", ["sm_60", "sm_75", "sm_80", "sm_90", "sm_120"])
def test_sums_by_atomic_operations(chip, dtype):
    x, positions = torch.randint(-8, 9, (512,)).to(dtype), torch.randint(0, 20, (512,))
    out = torch.zeros(20, dtype=dtype)
    with executed(chip):
        _add_up[(2,)](x, positions, out, N=256)
    assert torch.equal(out, torch.zeros(20, dtype=dtype).index_add(0, positions, x))


@triton.jit
def _count(out, counter):
    position = tl.atomic_add(counter, 1)
    tl.store(out + position, position)


def test_an_atomic_operation_whose_result_is_used_is_refused():
    """Such results order programs, which nothing here models: a guess would be reported as a race, or not."""
    with pytest.raises(Unsupported, match=r"whose result is used .* test_what_others_use\.py:"), executed("sm_80"):
        _count[(4,)](torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


@triton.autotune([triton.Config({"N": n}) for n in (16, 32, 64)], key=["count"])
@triton.jit
def _doubled(x, out, count, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    inside = (i < count) | (N == 32)  # so one of the configurations goes too far
    tl.store(out + i, 2 * tl.load(x + i, mask=inside), mask=inside)


def test_every_configuration_of_an_autotuner_is_executed():
    x = torch.arange(64.0)
    with executed("sm_80") as machine:
        _doubled[lambda chosen: (triton.cdiv(64, chosen["N"]),)](x, out := torch.empty(64), 64)
    assert torch.equal(out, 2 * x)
    assert {done.grid[0] for done in machine.launches} == {4, 2, 1}
    with pytest.raises(FaultyKernel, match="bounds"), executed("sm_80"):
        _doubled[lambda chosen: (triton.cdiv(40, chosen["N"]),)](x[:40].clone(), torch.empty(40), 40)
