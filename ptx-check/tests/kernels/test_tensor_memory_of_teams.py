"""Products of sm_100 in warp-specialised kernels: right under every schedule, and each planted fault noticed."""

import pytest
import torch
from gluon_kernels import descriptor
from spoiling import kinds, replaced, without_lines
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ptx_check import executed

_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.9


@gluon.jit
def _copy(a, b, a_slots, b_slots, full, empty, count, FAULT: gl.constexpr):
    for i in range(count):
        if FAULT != "no wait for empty":
            mbarrier.wait(empty, i & 1 ^ 1)
        mbarrier.expect(full, 2 * a.block_type.nbytes + b.block_type.nbytes)
        _load(a, [0, 64 * i], full, a_slots.index(0))
        _load(a, [128, 64 * i], full, a_slots.index(1))
        _load(b, [64 * i, 0], full, b_slots)


@gluon.jit
def _multiply(slots, full, empty, memory, out, count, WORKER: gl.constexpr, FAULT: gl.constexpr):
    a_slots, b_slots = slots
    once, left, twice, ends = memory
    L: gl.constexpr = get_tmem_reg_layout(gl.float32, (128, 64), TensorMemoryLayout([128, 64], 1), 4)
    OTHER: gl.constexpr = FAULT == "a wait for the other's product"
    once, left, twice = once.index(WORKER), left.index(WORKER), twice.index(WORKER)
    made, added = ends.index(WORKER), ends.index(2 + WORKER)
    for i in range(count):
        mbarrier.wait(full, i & 1)
        tcgen05_mma(a_slots.index(WORKER), b_slots, once, use_acc=False, mbarriers=[made])
        mbarrier.wait(ends.index(1 - WORKER) if OTHER else made, i & 1)
        values = once.load(L)
        left.store(values.to(gl.float16))  # its last reader is done: `made` ends all that was issued before
        if FAULT == "arrival before the products":
            tcgen05_mma(left, b_slots, twice, use_acc=i > 0, mbarriers=[added])
            mbarrier.arrive(empty)
        else:
            tcgen05_mma(left, b_slots, twice, use_acc=i > 0, mbarriers=[added, empty])
        if FAULT == "a store to what a product reads":
            left.store(values.to(gl.float16))
    if FAULT != "no wait for the last":
        mbarrier.wait(added, count & 1 ^ 1)
    rows, columns = 128 * WORKER + gl.arange(0, 128, gl.SliceLayout(1, L)), gl.arange(0, 64, gl.SliceLayout(0, L))
    gl.store(out + rows[:, None] * 64 + columns[None, :], twice.load(L))


@gluon.jit
def products(a, b, out, count, FAULT: gl.constexpr):
    """The sum of (A B) B over tiles A (256, 64), B (64, 64), by a producer and two workers of 128 rows."""
    a_slots = gl.allocate_shared_memory(a.dtype, [2, 128, 64], a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [64, 64], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=2)
    for i in gl.static_range(4):
        mbarrier.init(ends.index(i), count=1)
    fence_async_shared()
    LAYOUT: gl.constexpr = TensorMemoryLayout([128, 64], 1)
    once = allocate_tensor_memory(gl.float32, [2, 128, 64], LAYOUT)
    left = allocate_tensor_memory(gl.float16, [2, 128, 64], LAYOUT)
    twice = allocate_tensor_memory(gl.float32, [2, 128, 64], LAYOUT)
    slots, memory = (a_slots, b_slots), (once, left, twice, ends)
    gl.warp_specialize(
        [
            (_multiply, (slots, full, empty, memory, out, count, 0, FAULT)),
            (_multiply, (slots, full, empty, memory, out, count, 1, FAULT)),
            (_copy, (a, b, a_slots, b_slots, full, empty, count, FAULT)),
        ],
        [4, 1],
        [160, 24],
    )


def run(fault="", tiles=3, **options):
    """The products and their machine, and the exact ones: sums of small whole numbers."""
    a, b = (torch.randint(-2, 3, shape).half() for shape in ((256, 64 * tiles), (64 * tiles, 64)))
    with executed("sm_100", raising=False, **options) as machine:
        out = torch.full((256, 64), float("nan"))
        products[(1,)](descriptor(a, [128, 64]), descriptor(b, [64, 64]), out, tiles, fault, num_warps=4)
    parts = zip(a.float().split(64, 1), b.float().split(64))
    return out, machine, sum(((left @ right) @ right for left, right in parts), torch.zeros(256, 64))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_products_of_teams_are_right_under_every_schedule(seed):
    out, machine, wanted = run(seed=seed)
    assert not machine.faults
    assert not machine.notes
    assert torch.equal(out, wanted)


FAULTS = {
    "no wait for empty": "race",
    "a wait for the other's product": "unwritten",
    "a store to what a product reads": "unwritten",
    "arrival before the products": "race",
    "no wait for the last": "unwritten",
}
MUTATIONS = {
    "no barriers of a team": (without_lines(r"bar\.sync"), "race"),
    "the lanes of another warp": (replaced(r"shl\.b32(\s+%r\d+, %r\d+), 21;", r"shl.b32\1, 22;"), "bounds"),
}


@pytest.mark.parametrize(("fault", "told"), FAULTS.items(), ids=FAULTS)
def test_planted_faults_are_noticed(fault, told):
    assert told in kinds(run(fault)[1])


@pytest.mark.parametrize(("rewrite", "told"), MUTATIONS.values(), ids=MUTATIONS)
def test_what_is_taken_out_is_noticed(rewrite, told):
    assert told in kinds(run(rewrite=rewrite)[1])
