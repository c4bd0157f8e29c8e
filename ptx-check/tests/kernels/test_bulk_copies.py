"""Bulk copies of tiles (TMA): tensor descriptors on the chips that have them."""

import pytest
import torch
import triton
import triton.language as tl
from spoiling import WAIT, kinds, replaced
from triton.tools.tensor_descriptor import TensorDescriptor

from ptx_check import executed

CHIPS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def doubled(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    target = tl.make_tensor_descriptor(y, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([i, j], source.load([i, j]) * 2)


def doubled_of(x, tile, chip, **options):
    with executed(chip, **options) as machine:
        y = torch.empty_like(x)
        grid = [triton.cdiv(size, edge) for size, edge in zip(x.shape, tile, strict=True)]
        doubled[tuple(grid)](x, y, *x.shape, *tile)
    return y, machine


@pytest.mark.sample(4)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("dtype", "tile"),
    [(torch.float16, (32, 64)), (torch.float32, (16, 16)), (torch.int8, (8, 32)), (torch.bfloat16, (16, 256))],
    ids=str,
)
def test_tiles_go_through_shared_memory_and_stop_at_the_tensors_edge(chip, dtype, tile):
    x = torch.randint(-40, 40, (50, 144)).to(dtype)
    y, machine = doubled_of(x, tile, chip)
    assert torch.equal(y, x * 2)
    assert not machine.notes


def test_tiles_without_checks_and_of_a_sample_of_programs_and_of_odd_rows():
    x = torch.randint(-40, 40, (64, 64)).half()
    assert torch.equal(doubled_of(x, (16, 16), "sm_90", checks=False)[0], x * 2)
    y, machine = doubled_of(x, (16, 16), "sm_90", programs=4)
    known = machine.known(y)
    assert known.sum() == 4 * 16 * 16
    assert torch.equal(y[known], 2 * x[known])
    assert "alignment" in kinds(doubled_of(torch.zeros(16, 33), (16, 16), "sm_90", raising=False)[1])


@triton.jit
def product(x, y, z, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a = tl.make_tensor_descriptor(x, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b = tl.make_tensor_descriptor(y, shape=[K, N], strides=[N, 1], block_shape=[BK, BN])
    c = tl.make_tensor_descriptor(z, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([i, k]), b.load([k, j]), total)
    c.store([i, j], total.to(z.dtype.element_ty))


def products_of(chip, stages=3, **options):
    a, b = (torch.randint(-3, 4, shape).half() for shape in ((100, 192), (192, 136)))
    with executed(chip, raising=False, **options) as machine:
        c = torch.empty(100, 136, dtype=torch.float16)
        product[(2, 3)](a, b, c, 100, 136, 192, 64, 64, 32, num_stages=stages)
    return a, b, c, machine


@pytest.mark.sample(2)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("stages", [1, 3])
def test_products_of_tiles(chip, stages):
    a, b, c, machine = products_of(chip, stages)
    assert not machine.faults
    assert torch.equal(c, (a.float() @ b.float()).half())


SPOILT = {
    "no wait for the mbarrier": (replaced(WAIT), "unwritten"),
    "more bytes than come": (replaced(r"(expect_tx[^;]*), 8192", r"\1, 16384"), "deadlock"),
    "no mbarrier.init": (replaced(r"@%p\d+ mbarrier\.init[^;]*;"), "unwritten"),
    "no fence.proxy.async": (replaced(r"fence\.proxy\.async[^;]*;"), "fence"),
    "a copy by every thread": (replaced(r"@%p\d+ (cp\.async\.bulk\.tensor)", r"\1"), "divergence"),
    "no wait for products": (replaced(r"wgmma\.wait_group\.sync\.aligned 1;"), "race"),
    "no barriers": (replaced(r"bar\.sync[^;]*;"), "race"),
    "no map": (replaced(r"@%p\d+ tensormap\.cp_fenceproxy[^;]*;"), "unwritten"),
}


@pytest.mark.parametrize(("rewrite", "kind"), SPOILT.values(), ids=SPOILT)
def test_what_is_spoilt_is_noticed(rewrite, kind):
    machine = products_of("sm_90", rewrite=rewrite)[3]
    assert kind in kinds(machine), machine.faults


@triton.jit
def twice(x, y, N: tl.constexpr):
    target = tl.make_tensor_descriptor(y, [2 * N, N], [N, 1], [N, N])
    i = tl.arange(0, N)
    tile = tl.load(x + i[:, None] * N + i[None, :])
    target.store([0, 0], tile)
    target.store([N, 0], tile * 2)


@pytest.mark.parametrize("rewrite", [None, replaced(r"cp\.async\.bulk\.wait_group\.read\s+0;")])
def test_a_tile_is_not_overwritten_while_it_is_stored(rewrite):
    with executed("sm_90", raising=False, rewrite=rewrite) as machine:
        x, y = torch.randn(32, 32), torch.empty(64, 32)
        twice[(1,)](x, y, 32)
    assert torch.equal(y, torch.cat([x, 2 * x]))
    assert kinds(machine) == ({"race"} if rewrite else set())


# ------------------------------------------------------------------------------------------- descriptors of the host


@triton.jit
def halved_by_the_hosts(source, target, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([i, j], (source.load([i, j]) / 2).to(target.dtype))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_descriptor_of_the_host_may_round_to_tf32(wrapped):
    x = torch.randn(16, 32)
    x[0, 0] = float("inf")
    with executed("sm_90"):
        y = torch.empty_like(x)
        of = triton.reinterpret(x.view(torch.int32), tl.float32) if wrapped else x
        source = TensorDescriptor(of, list(x.shape), list(x.stride()), [16, 32], round_f32_to_tf32=not wrapped)
        halved_by_the_hosts[1, 1](source, TensorDescriptor.from_tensor(y, [16, 32]), 16, 32)
    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)
    rounded[0, 0] = float("inf")
    assert torch.equal(y, (x if wrapped else rounded) / 2)


@triton.jit
def planes(sources, y, D: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, SIZE * N)
    for number in tl.static_range(2):
        tl.store(y + number * SIZE * N + i, sources[number].load([1, D, -D]).reshape(SIZE * N))


@pytest.mark.sample(2)
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_what_lies_outside_of_a_descriptor_of_the_host_is_filled(chip, padding):
    x = torch.randn(3, 20, 32)
    with executed(chip):
        y = torch.empty(2, 2, 32, 32)
        sources = tuple(TensorDescriptor.from_tensor(part, [2, 32, 32], padding=padding) for part in (x[1:], x[:2]))
        planes[(1,)](sources, y, 8, 64, 32)
    wanted = torch.full((2, 2, 32, 32), float("nan") if padding == "nan" else 0.0)
    wanted[0, 0, :12, 8:], wanted[1, 0, :12, 8:] = x[2, 8:, :24], x[1, 8:, :24]
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)


@triton.jit
def reduced(x, y, M, N: tl.constexpr, OPERATION: tl.constexpr):
    target = tl.make_tensor_descriptor(y, [M, N], [N, 1], [N, N])
    i = tl.arange(0, N)
    tile = tl.load(x + tl.program_id(0) * N * N + i[:, None] * N + i[None, :])
    getattr(target, OPERATION)([0, 0], tile)


@pytest.mark.sample(7)
@pytest.mark.parametrize("chip", ["sm_80", *CHIPS])
@pytest.mark.parametrize(
    ("operation", "dtype", "function"),
    [
        ("atomic_add", torch.float32, torch.add),
        ("atomic_add", torch.float16, torch.add),
        ("atomic_min", torch.int32, torch.minimum),
        ("atomic_max", torch.int32, torch.maximum),
        ("atomic_and", torch.int32, torch.bitwise_and),
        ("atomic_or", torch.int32, torch.bitwise_or),
        ("atomic_xor", torch.int32, torch.bitwise_xor),
    ],
)
def test_sums_into_a_tensor_by_tiles(chip, operation, dtype, function):
    x, before = torch.randint(-40, 40, (2, 32, 32)).to(dtype), torch.randint(-40, 40, (20, 32)).to(dtype)
    with executed(chip):
        reduced[(2,)](x, y := before.clone(), 20, 32, operation)
    assert torch.equal(y, function(function(before, x[0, :20]), x[1, :20]))
