"""What kernels of other people have and ours have not: atomic operations, and configurations to choose among."""

import pytest
import torch
import triton
import triton.language as tl

from ptx_check import FaultyKernel, executed


@triton.jit
def _add_up(x, positions, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.atomic_add(out + tl.load(positions + i), tl.load(x + i))


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("chip", ["sm_60", "sm_75", "sm_80", "sm_90", "sm_120"])
def test_sums_by_atomic_operations(chip, dtype):
    x, positions = torch.randint(-8, 9, (512,)).to(dtype), torch.randint(0, 20, (512,))
    out = torch.zeros(20, dtype=dtype)
    with executed(chip):
        _add_up[(2,)](x, positions, out, N=256)
    assert torch.equal(out, torch.zeros(20, dtype=dtype).index_add(0, positions, x))


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


@triton.jit
def _count(out, counter):
    position = tl.atomic_add(counter, 1)
    tl.store(out + position, position)


def test_a_counter_gives_every_program_a_place_of_its_own():
    with executed("sm_80"):
        _count[(4,)](out := torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert out.tolist() == [0, 1, 2, 3]


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


@pytest.mark.parametrize(("configs", "grids"), [(1, {3}), (2, {3, 2})])
def test_the_first_configurations_of_an_autotuner(configs, grids):
    x = torch.arange(64.0)
    with executed("sm_80", configs=configs) as machine:
        _doubled[lambda chosen: (triton.cdiv(47, chosen["N"]),)](x, torch.empty(64), 47)
    assert {done.grid[0] for done in machine.launches} == grids


def _never(call, quantiles):
    raise AssertionError("a stopwatch for devices")


_chosen = triton.autotune(
    [triton.Config({"N": n}) for n in (16, 32)], key=["count"], cache_results=True, do_bench=_never
)(_doubled.fn)


def test_configurations_are_chosen_anew_for_every_chip():
    """Not what was found on another chip, in another process or by another stopwatch; and nothing of it stays."""
    x = torch.arange(32.0)
    for _ in range(2):
        for chip in ("sm_80", "sm_90"):
            with executed(chip) as machine:
                for _ in range(2):
                    _chosen[lambda chosen: (triton.cdiv(30, chosen["N"]),)](x, torch.empty(32), 30)
            assert {done.grid[0] for done in machine.launches} == {2, 1}
            assert machine.launches
            assert len(machine.launches) == 2 + 2
    assert not _chosen.cache
    assert _chosen.do_bench is _never


def test_no_configuration_at_all_is_refused():
    with pytest.raises(ValueError, match="at least 1"), executed("sm_80", configs=0):
        pass


@triton.jit
def _widened(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


def test_bytes_that_are_given_as_another_type():
    x = torch.randn(64).to(torch.float8_e5m2)
    with executed("sm_80"):
        out = torch.empty(64)
        _widened[(1,)](triton.reinterpret(x.view(torch.uint8), tl.float8e5), out, N=64)
    assert torch.equal(out, x.float())


@triton.jit
def _with_halves(out, a: tl.float16, b: tl.bfloat16, c: tl.float64):
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)


def test_numbers_of_16_and_64_bits_that_a_kernel_is_given():
    with executed("sm_80"):
        out = torch.empty(3)
        _with_halves[(1,)](out, -1.1, 1e30, 2.5)
    assert out.tolist() == [torch.tensor(-1.1).half().item(), torch.tensor(1e30).bfloat16().item(), 2.5]


@triton.jit
def _through_pointers(sources, targets, n, FAR: tl.constexpr, N: tl.constexpr):
    group, i = tl.program_id(0), tl.arange(0, N)
    source = tl.load(sources + group).to(tl.pointer_type(tl.float32))
    target = tl.load(targets + group).to(tl.pointer_type(tl.float32))
    tl.store(target + i, tl.load(source + i, mask=i < n) * 2, mask=i < (n + FAR))


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


@triton.jit
def _kept(x, out, count, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.where(i < count, tl.load(x + i), 0.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("chip", ["sm_60", "sm_80", "sm_90"])
def test_a_load_that_where_discards_is_no_fault(chip):
    with executed(chip):
        x, out = torch.empty(128), torch.empty(128)
        x[:50] = 1
        _kept[(1,)](x, out, 50, N=128)
        assert out.sum() == 50
        with pytest.raises(FaultyKernel, match=r"unwritten: .* stored in global memory"):
            _kept[(1,)](x, out, 51, N=128)


@triton.jit
def _ignored(labels, out, ignore_index, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.where(tl.load(labels + i) == ignore_index, 1, 0))


def test_a_negative_number_is_compared_with_labels_of_64_bits():
    labels, out = torch.tensor([5, -100] * 32), torch.zeros(64, dtype=torch.int32)
    with executed("sm_80"):
        _ignored[(1,)](labels, out, -100, N=64)
    assert out.tolist() == [0, 1] * 32


@triton.jit
def _product(a, b, out, N: tl.constexpr, TURNED: tl.constexpr):
    i, j = tl.arange(0, N), tl.arange(0, N)
    offsets = i[:, None] * N + j[None, :]
    right = tl.load(b + offsets)
    tl.store(out + offsets, tl.dot(tl.load(a + offsets), tl.trans(right) if TURNED else right))


@pytest.mark.sample(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_products_of_float32(chip, turned):
    a, b = (torch.randint(-3, 4, (64, 64)).float() for _ in range(2))
    out = torch.empty(64, 64)
    with executed(chip):
        _product[(1,)](a, b, out, N=64, TURNED=turned)
    assert torch.equal(out, a @ (b.T if turned else b))
