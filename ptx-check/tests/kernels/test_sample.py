"""Launches of which a sample of the programs is executed."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ptx_check import FaultyKernel, executed
from ptx_check.sample import chosen

N = 64


@triton.jit
def doubled(x, y, TOO_FAR: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N + TOO_FAR)
    tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def turned(x, y, N: tl.constexpr):
    program = tl.program_id(0)
    from_ = (program + 1) % tl.num_programs(0)
    tl.store(y + program * N + tl.arange(0, N), tl.load(x + from_ * N + tl.arange(0, N)))


@triton.jit
def counted(x, order, TICKETS: tl.constexpr):
    place = tl.atomic_add(x, 1)
    if TICKETS:
        tl.store(order + tl.program_id(0), place)


@triton.jit
def exchanged(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.atomic_xchg(x + i, 0.0, sem="relaxed"))


@pytest.mark.parametrize("total", [1, 2, 5, 100, 4097])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 64])
def test_the_first_and_the_last_run_and_neighbours_between_them(total, most):
    numbers = chosen(total, most)
    assert len(numbers) <= most
    assert (np.diff(numbers) > 0).all()
    assert numbers[0] == 0
    assert numbers[-1] == total - 1 or most == 1
    if most >= 4 and total > most:
        assert (np.diff(numbers) == 1).sum() >= most // 2
    assert len(chosen(total, None)) == total


@pytest.mark.parametrize("checks", [True, False])
def test_results_are_known_where_programs_of_the_sample_wrote(checks):
    x = torch.randn(100 * N)
    with executed("sm_80", programs=4, checks=checks) as machine:
        y = torch.empty_like(x)
        doubled[(100,)](x, y, TOO_FAR=0, N=N)
        torch.testing.assert_close(y, 2 * x)
        torch.testing.assert_close(y.double(), 2 * x.double())
        assert torch.allclose(y, 2 * x)
        assert not (y == 2 * x).all()
        assert not machine.differing
        with pytest.raises(AssertionError):
            torch.testing.assert_close(y, 3 * x)
        assert machine.differing
        machine.differing = False
        assert not torch.allclose(y, 3 * x)
        assert machine.differing
        doubled[(100,)](x, zeros := torch.zeros(100 * N), TOO_FAR=0, N=N)
    known = machine.known(y)
    assert known.view(100, N).all(1).nonzero().flatten().tolist() == [0, 1, 98, 99]
    assert known.sum() == 4 * N
    torch.testing.assert_close(y[known], 2 * x[known])
    assert machine.known(zeros).sum() == 4 * N
    assert machine.known(x).all()
    assert machine.launches[0].left_out == 96


def test_neighbours_that_write_the_same_place_are_found_and_the_sample_has_a_program_at_least():
    x, y = torch.randn(100 * N + 2), torch.empty(100 * N + 2)
    with pytest.raises(FaultyKernel, match="programs"), executed("sm_80", programs=4):
        doubled[(100,)](x, y, TOO_FAR=N, N=N)
    with pytest.raises(ValueError, match=r"executed\(programs=0\) must be at least 1"), executed("sm_80", programs=0):
        pass


def test_what_comes_of_missing_results_is_neither_a_fault_nor_known():
    x = torch.randn(100 * N)
    with executed("sm_80", programs=4) as machine:
        y, z, plain = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        doubled[(100,)](x, y, TOO_FAR=0, N=N)
        assert not machine.known(y + 1).any()
        plain.copy_(y)
        assert torch.equal(machine.known(plain), machine.known(y))
        turned[(100,)](y, z, N=N)  # 1 reads what 2 has not written, so this launch is not told apart by program
        assert not machine.known(z).any()
        y.copy_(2 * x)
        assert machine.known(y).all()
        turned[(100,)](y, z, N=N)
        assert machine.known(z).sum() == 4 * N
    assert not machine.faults


@pytest.mark.parametrize("machine_code", [False, True])
def test_missing_results_that_an_atomic_operation_reads_are_not_known(machine_code):
    with executed("sm_90", programs=4, machine_code=machine_code) as machine:
        y, old = torch.empty(100 * N), torch.zeros(N)
        doubled[(100,)](torch.randn(100 * N), y, TOO_FAR=0, N=N)
        exchanged[(1,)](y[10 * N :], old, N=N)
    assert not machine.known(old).any()


def test_sums_of_all_programs_are_not_known_and_tickets_are_drawn_by_all():
    with executed("sm_80", programs=4) as machine:
        total, order = torch.zeros(1, dtype=torch.int32), torch.empty(100, dtype=torch.int32)
        counted[(100,)](total, order, TICKETS=False)
        assert not machine.known(total).any()
        total.zero_()
        counted[(100,)](total, order, TICKETS=True)
        assert machine.launches[-1].left_out == 0
    assert machine.known(order).all()
    assert order.sort().values.tolist() == list(range(100))
