"""Small warp-specialised kernels in Gluon for sm_90, with faults to be planted in them by name."""

# ruff: noqa: RUF005 (Triton compiles no starred list)

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Their names before Triton 3.9.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _load_tiles(source, slots, full, empty, count):
    for i in range(count):
        slot, phase = i % 2, i // 2 & 1
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), source.block_type.nbytes)
        place = [1] * (len(source.block_type.shape) - 2) + [i * source.block_type.shape[-2], 0]
        _load(source, place, full.index(slot), slots.index(slot))


@gluon.jit
def _store_tiles(slots, full, empty, scratch, target, count, LAYOUT: gl.constexpr):
    ROWS: gl.constexpr = slots.numel // slots.shape[0] // slots.shape[-1]
    COLUMNS: gl.constexpr = slots.shape[-1]
    for i in range(count):
        slot, phase = i % 2, i // 2 & 1
        mbarrier.wait(full.index(slot), phase)
        tile = slots.index(slot).reshape([ROWS, COLUMNS]).load(LAYOUT)
        mbarrier.arrive(empty.index(slot))
        tma.store_wait(0)
        scratch.reshape([ROWS, COLUMNS]).store(tile)
        fence_async_shared()
        _store(target, [1] * (len(target.block_type.shape) - 2) + [i * target.block_type.shape[-2], 0], scratch)
    tma.store_wait(0)


@gluon.jit
def stored(source, target, count, LAYOUT: gl.constexpr):
    """Tiles of a tensor of any rank, one below the other from place 1 of the other directions on, from one to the other
    through threads and one tile of memory."""
    slots = gl.allocate_shared_memory(source.dtype, [2] + source.block_type.shape, source.layout)
    scratch = gl.allocate_shared_memory(target.dtype, target.block_type.shape, target.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_store_tiles, (slots, full, empty, scratch, target, count, LAYOUT)),
            (_load_tiles, (source, slots, full, empty, count)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _load_operands(a, b, a_slots, b_slots, full, empty, K, FAULT: gl.constexpr):
    row, column = gl.program_id(0) * 128, gl.program_id(1) * b.block_type.shape[1]
    for i in range(K // 64):
        slot, phase = i % 2, i // 2 & 1
        if FAULT != "no wait for empty":
            mbarrier.wait(empty.index(slot), phase ^ 1)
        bytes: gl.constexpr = 2 * a.block_type.nbytes + b.block_type.nbytes
        mbarrier.expect(full.index(slot), bytes * 2 if FAULT == "more bytes than come" else bytes)
        for half in gl.static_range(2):
            to = a_slots.index(slot * 2 + half)
            _load(a, [row + 64 * half, i * 64], full.index(slot), to)
        _load(b, [i * 64, column], full.index(slot), b_slots.index(slot))


@gluon.jit
def _multiply(
    a_slots, b_slots, full, empty, scratch, out, N, K, HALF: gl.constexpr, REGISTERS: gl.constexpr, FAULT: gl.constexpr
):
    COLUMNS: gl.constexpr = b_slots.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    for i in range(K // 64):
        slot, phase = i % 2, i // 2 & 1
        if FAULT != "no wait for full":
            mbarrier.wait(full.index(slot), phase)
        left = a_slots.index(slot * 2 + HALF)
        if REGISTERS:
            left = left.load(gl.DotOperandLayout(0, SUMS, 2))
        else:
            doubled = left.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
            left = scratch.index(0 if FAULT == "one scratch for two" else HALF)
            left.store(doubled)
            fence_async_shared()
        total = warpgroup_mma(left, b_slots.index(slot), total, is_async=True)
        if FAULT != "arrival before the products":
            total = warpgroup_mma_wait(0, [total])
        if FAULT != "no arrival":
            mbarrier.arrive(empty.index(slot))
        if FAULT == "arrival before the products":
            total = warpgroup_mma_wait(0, [total])
    rows = gl.program_id(0) * 128 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    columns = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))
    gl.store(out + rows[:, None] * N + columns[None, :], total)


@gluon.jit
def product(
    a, b, out, N, K, REGISTERS: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCER: gl.constexpr, FAULT: gl.constexpr
):
    """a b, float32, by a producer and two consumers of 64 rows; a from registers, or through scratch memory."""
    a_slots = gl.allocate_shared_memory(a.dtype, [4] + a.block_type.shape, a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [2] + b.block_type.shape, b.layout)
    scratch = gl.allocate_shared_memory(a.dtype, [2] + a.block_type.shape, a.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 if FAULT == "one arrival for two" else 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (a_slots, b_slots, full, empty, scratch, out, N, K, 0, REGISTERS, FAULT)),
            (_multiply, (a_slots, b_slots, full, empty, scratch, out, N, K, 1, REGISTERS, FAULT)),
            (_load_operands, (a, b, a_slots, b_slots, full, empty, K, FAULT)),
        ],
        [4, 1],
        [CONSUMERS, PRODUCER],
    )


def descriptor(x: torch.Tensor, box: list[int]) -> TensorDescriptor:
    kind = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(box, kind)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
