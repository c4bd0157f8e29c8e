"""Warp-specialised kernels in Gluon: right under every schedule, and each planted fault noticed for what it is."""

import pytest
import torch
from gluon_kernels import descriptor, doubled, product, stored
from spoiling import kinds, replaced
from triton.experimental.gluon import language as gl

from ptx_check import executed

LAYOUT = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
SEEDS = [None, 1]


def doubled_of(shape, box, dtype=torch.float16, start=0, fault="", tiles=5, **options):
    """Twice the tiles of a tensor, as they follow each other in its last but one direction, and the machine."""
    x = torch.randint(-40, 40, shape).to(dtype)
    with executed("sm_90", raising=False, **options) as machine:
        y = torch.full((tiles * torch.Size(box[:-1]).numel(), box[-1]), float("nan"), dtype=dtype)
        doubled[1,](descriptor(x, list(box)), y, tiles, start, LAYOUT, fault, num_warps=4)
    return x, y, machine


def products_of(*, registers=True, fault="", columns=64, depth=320, **options):
    a, b = torch.randn(128, depth).bfloat16(), torch.randn(depth, columns).bfloat16()
    with executed("sm_90", raising=False, **options) as machine:
        c = torch.empty(128, columns)
        given = descriptor(a, [64, 64]), descriptor(b, [64, 64]), c, columns, depth, registers, 160, 24, fault
        product[1, columns // 64](*given, num_warps=4)
    return a.float() @ b.float(), c, machine


MAPS = [
    ((70, 40), (16, 32), torch.float16, 0),
    ((70, 16), (16, 16), torch.float16, -3),
    ((3, 70, 40), (2, 8, 64), torch.bfloat16, 0),
    ((2, 3, 30, 20), (1, 2, 8, 16), torch.float32, -3),
    ((2, 1, 3, 30, 24), (2, 1, 2, 4, 32), torch.bfloat16, -3),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("shape", "box", "dtype", "start"), MAPS, ids=str)
def test_tiles_of_maps_of_every_rank_and_swizzle_with_zeros_outside(shape, box, dtype, start):
    x, y, machine = doubled_of(shape, box, dtype, start)
    assert not machine.faults
    assert not machine.notes
    for i, tile in enumerate(y.reshape(5, *box)):
        first = [start] * len(box)
        first[-2] += i * box[-2]
        assert torch.equal(tile, 2 * inside(x, first, box))


def inside(x, first, box):
    """A tile of x that begins at `first`, zero where x has nothing."""
    places = torch.meshgrid(*(torch.arange(f, f + n) for f, n in zip(first, box)), indexing="ij")
    there = torch.stack([(at >= 0) & (at < n) for at, n in zip(places, x.shape)]).all(0)
    return torch.where(there, x[tuple(at.clamp(0, n - 1) for at, n in zip(places, x.shape))], 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"seed": 2}, {"seed": 3}, {"checks": False}], ids=str)
@pytest.mark.parametrize("registers", [True, False])
def test_a_producer_and_two_consumers_multiply_under_every_schedule_and_without_checks(registers, options):
    wanted, c, machine = products_of(registers=registers, columns=128, **options)
    assert not machine.faults
    torch.testing.assert_close(c, wanted, rtol=1e-5, atol=1e-4)


COPIES = {
    "no wait for empty": "race",
    "wrong phase of empty": "deadlock",
    "more bytes than come": "deadlock",
    "no wait for full": "unwritten",
    "wrong phase of full": "unwritten or deadlock",
    "no arrival": "deadlock",
    "arrivals that never come": "deadlock",
    "no fence": "fence",
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "kind"), COPIES.items())
def test_faults_of_copies_are_noticed(fault, kind, seed):
    *_, machine = doubled_of((70, 40), (16, 32), fault=fault, seed=seed)
    assert kinds(machine).intersection(kind.split(" or ")), machine.faults


PRODUCTS = {
    "no wait for empty": (True, "race"),
    "one arrival for two": (True, "race or deadlock"),
    "arrival before the products": (True, "race"),
    "one scratch for two": (False, "race"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "registers", "kind"), [(f, *of) for f, of in PRODUCTS.items()])
def test_faults_of_products_are_noticed(fault, registers, kind, seed):
    *_, machine = products_of(registers=registers, fault=fault, seed=seed)
    assert kinds(machine).intersection(kind.split(" or ")), machine.faults


def fenced_at_first_alone(ptx: str) -> str:
    """Behind the mbarriers' initialisation."""
    first, fence, rest = ptx.partition("fence.proxy.async.shared::cta;")
    return first + fence + replaced(r"fence\.proxy\.async[^;]*;")(rest)


SPOILT = {
    "a consumer's own barriers": (replaced(r"bar\.sync\s+0, 128;"), "race"),
    "a barrier of more threads": (replaced(r"bar\.sync(\s+)0, 128;", r"bar.sync\g<1>0, 160;"), "deadlock"),
    "no fence behind stores": (fenced_at_first_alone, "fence"),
    "no wait for products": (replaced(r"wgmma\.wait_group[^;]*;"), "unwritten"),
    "registers that nobody gives back": (replaced(r"setmaxnreg\.dec[^;]*;"), "deadlock"),
    "arrival of every thread": (replaced(r"@%p\d+ (mbarrier\.arrive\.shared)", r"\1"), "divergence"),
    "another barrier for one team": (replaced(r"barrier\.sync\s+1;", "barrier.sync 2;", 1), "deadlock"),
}


@pytest.mark.parametrize(("rewrite", "kind"), SPOILT.values(), ids=SPOILT)
def test_what_is_spoilt_is_noticed(rewrite, kind):
    *_, machine = products_of(registers=False, rewrite=rewrite)
    assert kind in kinds(machine), machine.faults


STORED = {
    "right": (None, set()),
    "no fence": (fenced_at_first_alone, {"fence"}),
    "no wait for stores": (replaced(r"cp\.async\.bulk\.wait_group[^;]*;"), {"race"}),
    "no barrier behind the wait": (replaced(r"(wait_group\.read\s+0;\s*)bar\.sync\s+0, 128;", r"\1"), {"race"}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rewrite", "found"), STORED.values(), ids=STORED)
def test_tiles_are_stored_from_memory_that_is_written_again(rewrite, found, seed):
    x = torch.randint(-40, 40, (80, 32)).half()
    with executed("sm_90", raising=False, seed=seed, rewrite=rewrite) as machine:
        y = torch.empty_like(x)
        stored[1,](descriptor(x, [16, 32]), descriptor(y, [16, 32]), 5, LAYOUT, num_warps=4)
    assert kinds(machine) == found
    assert torch.equal(y, x)
