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
    with pytest.raises(FaultyKernel, match="bounds"):
        _grids(x[:40].clone(), 40)
    assert set(_grids(x, 47, configs=1)[1]) == {3}
    assert set(_grids(x, 47, configs=2)[1]) == {3, 2}
    with pytest.raises(ValueError, match="at least 1"):
        _grids(x, 47, configs=0)


def test_configurations_are_chosen_anew_for_every_chip():
    """Not what was found on another chip, in another process or by another stopwatch; and nothing of it stays."""
    for chip in ("sm_80", "sm_90") * 2:
        grids = _grids(torch.arange(64.0), 60, chip)[1]
        assert set(grids) == {4, 2, 1}
        assert len(grids) == 3 + 2
    assert not _chosen.cache
    assert _chosen.do_bench is _never


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
def _through_pointers(sources, targets, n, FAR: tl.constexpr, N: tl.constexpr):
    group, i = tl.program_id(0), tl.arange(0, N)
    source = tl.load(sources + group).to(tl.pointer_type(tl.float32))
    target = tl.load(targets + group).to(tl.pointer_type(tl.float32))
    tl.store(target + i, tl.load(source + i, mask=i < n) * 2, mask=i < (n + FAR))


@pytest.mark.sample(1)
@pytest.mark.parametrize("programs", [None, 2])
def test_memory_whose_addresses_a_kernel_loads(programs):
    """Groups of tensors of their own sizes, whose addresses lie in one more; others' memory is out of bounds."""
    with executed("sm_80", programs=programs, raising=False) as machine:
        x, y = ([torch.randn(40, device="cuda") for _ in range(3)] for _ in range(2))
        given = [torch.tensor([each.data_ptr() for each in tensors], device="cuda") for tensors in (x, y)]
        _through_pointers[(3,)](*given, 40, FAR=0, N=64)
        for source, target in zip(x[::2], y[::2], strict=True):
            assert torch.equal(target, 2 * source)
        assert not machine.faults
        _through_pointers[(3,)](*given, 40, FAR=1, N=64)
        assert {fault.kind for fault in machine.faults} == {"bounds"}
        _through_pointers[(3,)](given[0], given[1] + 4096, 40, FAR=0, N=64)
    assert {fault.kind for fault in machine.faults} == {"bounds"}
