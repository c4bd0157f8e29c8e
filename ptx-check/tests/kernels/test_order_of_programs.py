"""Programs that atomic operations order: locks, flags, the last one that finishes; and what does not order them."""

import pytest
import torch
import triton
import triton.language as tl

from ptx_check import FaultyKernel, Unsupported, executed

CHIPS = ["sm_60", "sm_80", "sm_90"]


@triton.jit
def _added_up_under_a_lock(x, total, lock, N: tl.constexpr, SEM: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.arange(0, N)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total + i, tl.load(total + i) + tl.load(x + tl.program_id(0) * N + i))
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem=SEM)


@triton.jit
def _last_adds_up(x, parts, out, counter, N: tl.constexpr, P: tl.constexpr, SEM: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(parts + pid, tl.sum(tl.load(x + pid * N + tl.arange(0, N))))
    if tl.atomic_add(counter, 1, sem=SEM) == P - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, P))))
        tl.store(counter, 0)


def lock(chip: str, sem: str, barrier: bool = True) -> None:
    x, total = torch.randn(5, 256), torch.zeros(256)
    with executed(chip):
        _added_up_under_a_lock[(5,)](x, total, torch.zeros(1, dtype=torch.int32), N=256, SEM=sem, BARRIER=barrier)
    torch.testing.assert_close(total, x.sum(0))


def last(chip: str, sem: str) -> None:
    x, out, counter = torch.randn(8, 64), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with executed(chip):
        _last_adds_up[(8,)](x, torch.empty(8), out, counter, N=64, P=8, SEM=sem)
    torch.testing.assert_close(out[0], x.sum())
    assert counter.item() == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("way", "sem"), [(lock, "release"), (last, "acq_rel")])
def test_a_lock_orders_programs_and_the_last_one_reads_what_the_others_stored(way, sem, chip):
    way(chip, sem)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (lock, ("relaxed",)),
        (lock, ("release", False)),  # before the program's other threads have stored
        (last, ("relaxed",)),
        (last, ("acquire",)),
        (last, ("release",)),
    ],
)
def test_what_tells_nobody_or_is_told_nothing_orders_nothing(way, words):
    with pytest.raises(FaultyKernel, match="programs: "):
        way("sm_80", *words)


@triton.jit
def _wait_for_the_next(out, flags, LAST: tl.constexpr):
    pid = tl.program_id(0)
    if pid != LAST:
        while tl.atomic_add(flags + pid + 1, 0) == 0:
            pass
    before = tl.load(out + pid + 1)
    tl.store(out + pid, before + 1)
    tl.atomic_add(flags + pid, 1)


def test_programs_that_wait_for_later_ones_take_turns_and_for_ever_is_told():
    out, flags = torch.zeros(7), torch.zeros(6, dtype=torch.int32)
    with executed("sm_80"):
        _wait_for_the_next[(6,)](out, flags, LAST=5)
    assert out.tolist() == [6, 5, 4, 3, 2, 1, 0]
    with pytest.raises(Unsupported, match="wait for each other"), executed("sm_80"):
        _wait_for_the_next[(2,)](torch.zeros(4), torch.zeros(4, dtype=torch.int32), LAST=7)
