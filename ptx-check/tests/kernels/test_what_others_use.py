"""What kernels of other people have and ours have not: configurations to choose among, arguments of other kinds, memory
by address, atomic sums of bfloat16."""

import pytest
import torch
import triton
import triton.language as tl

from ptx_check import FaultyKernel, executed


@triton.jit
def _add_up(x, positions, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.atomic_add(out + tl.load(positions + i), tl.load(x + i))


@pytest.mark.sample(2)
@pytest.mark.parametrize("chip", ["sm_60", "sm_80", "sm_90"])
@pytest.mark.parametrize("count", [20, 19])
def test_sums_of_bfloat16_of_several_programs(chip, count):
    """Before sm_90 the compiler loops over cas of words of two numbers, the last of which ends behind a tensor of odd
    length."""
    x, positions = torch.randint(-2, 3, (512,)).bfloat16(), torch.randint(0, count, (512,))
    positions[0] = count - 1
    with executed(chip):
        out = torch.zeros(count, dtype=torch.bfloat16)
        _add_up[(2,)](x, positions, out, N=256)
    assert torch.equal(out, torch.zeros(count).index_add(0, positions, x.float()).bfloat16())


def _never(call, quantiles):
    raise AssertionError("a stopwatch for devices")


@triton.jit
def _doubled(x, out, count, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    inside = (i < count) | (N == 32)  # so one of the configurations goes too far
    tl.store(out + i, 2 * tl.load(x + i, mask=inside), mask=inside)


_chosen = triton.autotune(
    [triton.Config({"N": n}) for n in (16, 32, 64)], key=["count"], cache_results=True, do_bench=_never
)(_doubled)


def _grids(x, count, chip="sm_80", **options):
    with executed(chip, **options) as machine:
        for _ in range(2):
            _chosen[lambda chosen: (triton.cdiv(count, chosen["N"]),)](x, out := torch.empty(64), count)
    return out, [done.grid[0] for done in machine.launches]


def test_every_configuration_of_an_autotuner_is_executed_or_the_first_ones():
    x = torch.arange(64.0)
    out, grids = _grids(x, 64)
    assert torch.equal(out, 2 * x)
    assert set(grids) == {4, 2, 1}
    assert not _chosen.cache, "on another chip, or by another stopwatch, it is chosen anew"
    assert _chosen.do_bench is _never
    with pytest.raises(FaultyKernel, match="bounds"):
        _grids(x[:40].clone(), 40)
    assert set(_grids(x, 47, configs=1)[1]) == {3}
    assert set(_grids(x, 47, configs=2)[1]) == {3, 2}
    with pytest.raises(ValueError, match="at least 1"):
        _grids(x, 47, configs=0)


@triton.jit
def _with_halves(x, out, a: tl.float16, b: tl.bfloat16, c: tl.float64):
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, tl.load(x).to(tl.float32))


def test_numbers_of_16_and_64_bits_and_bytes_given_as_another_type():
    eight = torch.full((16,), 1.25).to(torch.float8_e5m2)
    with executed("sm_80"):
        out = torch.empty(4)
        _with_halves[(1,)](triton.reinterpret(eight.view(torch.uint8), tl.float8e5), out, -1.1, 1e30, 2.5)
    assert out.tolist() == [torch.tensor(-1.1).half().item(), torch.tensor(1e30).bfloat16().item(), 2.5, 1.25]


@triton.jit
def _doubled_in_place(places, n, N: tl.constexpr):
    x, i = tl.load(places + tl.program_id(0)).to(tl.pointer_type(tl.float32)), tl.arange(0, N)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"programs": 2}, {"machine_code": True}, {"machine_code": "compare"}], ids=str)
def test_memory_whose_addresses_a_kernel_loads(options):
    """Tensors whose addresses lie in one more, the same for every order of machine code; others' are out of bounds."""
    with executed("sm_90", raising=False, **options) as machine:
        x = [torch.randn(40, device="cuda") for _ in range(3)]
        wanted, places = [2 * each for each in x], torch.tensor([each.data_ptr() for each in x], device="cuda")
        _doubled_in_place[(3,)](places, 40, N=64)
        assert not machine.faults
        assert torch.equal(x[0], wanted[0])
        assert torch.equal(x[2], wanted[2])
        _doubled_in_place[(3,)](places, 41, N=64)
    assert {fault.kind for fault in machine.faults} == {"bounds"}
