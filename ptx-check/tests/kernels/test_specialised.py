"""Warp-specialised kernels in Gluon: right under every schedule, and each planted fault noticed for what it is."""

import pytest
import torch
from gluon_kernels import descriptor, product, stored
from spoiling import kinds, replaced
from triton.experimental.gluon import language as gl

from ptx_check import executed

LAYOUT = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
SEEDS = [None, 1]


def stored_of(shape, box, dtype=torch.float16, **options):
    """A tensor, what tiles that follow each other in its last but one direction make of zeros, and the machine."""
    x = torch.randint(-40, 40, shape).to(dtype)
    with executed("sm_90", raising=False, **options) as machine:
        y = torch.zeros(shape, dtype=dtype)
        stored[1,](descriptor(x, list(box)), descriptor(y, list(box)), 5, LAYOUT, num_warps=4)
    return x, y, machine


def products_of(*, registers=True, fault="", columns=64, depth=320, **options):
    a, b = torch.randn(128, depth).bfloat16(), torch.randn(depth, columns).bfloat16()
    with executed("sm_90", raising=False, **options) as machine:
        c = torch.empty(128, columns)
        given = descriptor(a, [64, 64]), descriptor(b, [64, 64]), c, columns, depth, registers, 160, 24, fault
        product[1, columns // 64](*given, num_warps=4)
    return a.float() @ b.float(), c, machine


MAPS = [
    ((80, 32), (16, 32), torch.float16),
    ((3, 70, 40), (2, 8, 64), torch.bfloat16),
    ((2, 3, 30, 20), (1, 2, 8, 16), torch.float32),
    ((2, 2, 3, 30, 24), (2, 1, 2, 4, 32), torch.bfloat16),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("shape", "box", "dtype"), MAPS, ids=str)
def test_tiles_of_maps_of_every_rank_and_swizzle(shape, box, dtype):
    x, y, machine = stored_of(shape, box, dtype)
    assert not machine.faults
    assert not machine.notes
    tiles = (*(slice(1, 1 + n) for n in box[:-2]), slice(5 * box[-2]), slice(box[-1]))
    wanted = torch.zeros_like(x)
    wanted[tiles] = x[tiles]
    assert torch.equal(y, wanted)


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"seed": 2}, {"seed": 3}, {"checks": False}], ids=str)
@pytest.mark.parametrize("registers", [True, False])
def test_a_producer_and_two_consumers_multiply_under_every_schedule_and_without_checks(registers, options):
    wanted, c, machine = products_of(registers=registers, columns=128, **options)
    assert not machine.faults
    torch.testing.assert_close(c, wanted, rtol=1e-5, atol=1e-4)


PRODUCTS = {
    "no wait for empty": (True, "race"),
    "one arrival for two": (True, "race or deadlock"),
    "arrival before the products": (True, "race"),
    "one scratch for two": (False, "race"),
    "no wait for full": (True, "unwritten"),
    "more bytes than come": (True, "deadlock"),
    "no arrival": (True, "deadlock"),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "registers", "kind"), [(f, *of) for f, of in PRODUCTS.items()])
def test_faults_of_products_are_noticed(fault, registers, kind, seed):
    *_, machine = products_of(registers=registers, fault=fault, seed=seed)
    assert kinds(machine).intersection(kind.split(" or ")), machine.faults


def fenced_at_first_alone(ptx: str) -> str:
    """Behind the mbarriers' initialisation."""
    first, fence, rest = ptx.partition("fence.proxy.async.shared::cta;")
    return first + fence + replaced(r"fence\.proxy\.async[^;]*;")(rest)


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
    x, y, machine = stored_of(*MAPS[0], rewrite=rewrite, seed=seed)
    assert kinds(machine) == found
    assert torch.equal(y, x)
