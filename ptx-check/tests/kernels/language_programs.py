"""Features of the language that are about programs: their numbers, control flow, constants, pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from language import EXACT, POINTERS, WHOLE, M, N, feature
from torch import Tensor

# ---------------------------------------------------------------------------------------------- programs, control flow


@feature(lambda x, y: torch.arange(8).repeat_interleave(64), grid=(2, 2, 2), **POINTERS, **WHOLE)
def _three_axes(x, y, out, spare):
    place = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place * 64 + tl.arange(0, 64), tl.zeros((64,), tl.int64) + place)


def _swizzled(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(M, N, dtype=torch.int64)
    for i in range(M):
        for j in range(N):
            place = i % 4 * N + j
            out[i, j] = (i // 4 * 4 + place % 4) * 100 + place // 4
    return out


@feature(_swizzled, **POINTERS, **WHOLE)
def _swizzle2d(x, y, out, spare):
    i, j = tl.arange(0, 16)[:, None] + tl.zeros((16, 32), tl.int32), tl.arange(0, 32)[None, :]
    a, b = tl.swizzle2d(i, j, 16, 32, 4)
    tl.store(out + i * 32 + j, (a * 100 + b).to(tl.int64))


@feature(lambda x, y: torch.where(torch.arange(M)[:, None] % 2 == 0, x, -x), grid=M, **POINTERS, **EXACT)
def _if_else(x, y, out, spare):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    if tl.program_id(0) % 2 == 0:
        a = tl.load(x + i)
    else:
        a = -tl.load(x + i)
    tl.store(out + i, a)


@feature(lambda x, y: x * torch.where(torch.arange(M) > 7, 2.0, 3.0)[:, None], grid=M, **POINTERS, **EXACT)
def _choice_of_numbers(x, y, out, spare):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(out + i, tl.load(x + i) * (2.0 if tl.program_id(0) > 7 else 3.0))


@feature(lambda x, y: x[0], shape=(N,), grid=4, **POINTERS, **EXACT)
def _early_return(x, y, out, spare):
    if tl.program_id(0) > 0:
        return
    i = tl.arange(0, 32)
    tl.store(out + i, tl.load(x + i))


@feature(lambda x, y: torch.tensor([8, 16, 3, 19]), shape=(4,), grid=4, **POINTERS, **WHOLE)
def _while(x, y, out, spare):
    n = tl.program_id(0) + 6
    steps = 0
    while n != 1:
        n = tl.where(n % 2 == 0, n // 2, 3 * n + 1)
        steps += 1
    tl.store(out + tl.program_id(0), steps.to(tl.int64))


@feature(lambda x, y: torch.tensor([10]), shape=(1,), **POINTERS, **WHOLE)
def _condition(x, y, out, spare):
    n = tl.load(spare)
    while tl.condition(n < 10, disable_licm=True):
        n += 1
    tl.store(out, n.to(tl.int64))


@feature(lambda x, y: x.sum(0) + x[::2].sum(0), shape=(N,), **POINTERS)
def _nested_loops(x, y, out, spare):
    i, total = tl.arange(0, 32), tl.zeros((32,), tl.float32)
    for first in range(2):
        for row in range(0, 16, first + 1):
            total += tl.load(x + row * 32 + i)
    tl.store(out + i, total)


@feature(lambda x, y: x.flip(0), **POINTERS, **EXACT)
def _range_downwards(x, y, out, spare):
    i = tl.arange(0, 32)
    for row in range(15, -1, -1):
        tl.store(out + (15 - row) * 32 + i, tl.load(x + row * 32 + i))


@feature(lambda x, y: x + 6, **POINTERS, **EXACT | {"tolerance": 1e-6})
def _static_range(x, y, out, spare):
    i = tl.arange(0, 512)
    a = tl.load(x + i)
    for step in tl.static_range(1, 4):
        a += step
    tl.store(out + i, a)


@feature(lambda x, y: x.sum(0), shape=(N,), **POINTERS)
def _unrolled_loop(x, y, out, spare):
    i, total = tl.arange(0, 32), tl.zeros((32,), tl.float32)
    for row in tl.range(0, 16, loop_unroll_factor=4):
        total += tl.load(x + row * 32 + i)
    tl.store(out + i, total)


@feature(lambda x, y: x * 2, **POINTERS, **EXACT)
def _flattened_loops(x, y, out, spare):
    i = tl.arange(0, 32)
    for block in tl.range(0, 4, flatten=True):
        for row in range(4):
            j = (block * 4 + row) * 32 + i
            tl.store(out + j, tl.load(x + j) * 2)


@feature(lambda x, y: (x.half().float() @ y.half().float().T) * 4, shape=(M, M), tolerance=1e-3, **POINTERS)
def _products_in_a_loop(x, y, out, spare):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    total = tl.zeros((16, 16), tl.float32)
    for _ in tl.range(0, 4, disallow_acc_multi_buffer=True):
        a, b = tl.load(x + i * 32 + j).to(tl.float16), tl.load(y + i * 32 + j).to(tl.float16)
        total = tl.dot(a, tl.trans(b), total)
    tl.store(out + i * 16 + tl.arange(0, 16)[None, :], total)


@triton.constexpr_function
def _halved(n):
    return n // 2


FACTOR = tl.constexpr(3.0)


@feature(lambda x, y: x * 3 + 256, **POINTERS)
def _constants(x, y, out, spare):
    SIZE: tl.constexpr = 512
    tl.static_assert(SIZE == 512, "a constant")
    i = tl.arange(0, SIZE)
    if SIZE > 100:
        tl.store(out + i, tl.load(x + i) * FACTOR + _halved(SIZE))


@triton.jit
def _swapped(pair, by: tl.constexpr = 2):
    return pair[1] * by, pair[0] + by


@feature(lambda x, y: 2 * y - (x + 2), **POINTERS)
def _tuples(x, y, out, spare):
    i = tl.arange(0, 512)
    pair = (tl.load(x + i), tl.load(y + i))
    a, b = _swapped(pair)
    tl.store(out + i, a - b)


@triton.jit(noinline=True)
def _scaled(a, n):
    if n == 7:
        return a
    return a * n


@triton.jit(noinline=True)
def _at_most(a, row, most):
    return tl.minimum(_scaled(a, row), most), row * 2


@feature(lambda x, y: torch.where(torch.arange(M) == 7, x.sum(1), x.sum(1) * torch.arange(M)).clamp(max=20.0)
         + 2 * torch.arange(M), shape=(M,), grid=M, **POINTERS)  # fmt: skip
def _functions_that_are_called(x, y, out, spare):
    row = tl.program_id(0)
    least, twice = _at_most(tl.sum(tl.load(x + row * 32 + tl.arange(0, 32))), row, 20.0)
    tl.store(out + row, least + twice)


@feature(lambda x, y: x.cumsum(0)[-1] + y.amax(0), shape=(N,), **POINTERS)
def _tuples_through_a_loop(x, y, out, spare):
    i = tl.arange(0, 32)
    state = (tl.zeros((32,), tl.float32), tl.full((32,), float("-inf"), tl.float32))
    for row in range(16):
        state = (state[0] + tl.load(x + row * 32 + i), tl.maximum(state[1], tl.load(y + row * 32 + i)))
    tl.store(out + i, state[0] + state[1])


@feature(lambda x, y: x, **POINTERS, **EXACT)
def _checks_and_prints(x, y, out, spare):
    i = tl.arange(0, 512)
    a = tl.load(x + i)
    tl.static_print("a tile of", i.shape[0])
    tl.device_assert(a < 100, "too large")
    tl.store(out + i, a)


# ----------------------------------------------------------------------------------------------------------- pointers


@feature(lambda x, y: torch.where(torch.arange(M * N).view(M, N) < 300, x, -1.0), **POINTERS, **EXACT)
def _mask_and_other(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i, mask=i < 300, other=-1.0))


@feature(lambda x, y: torch.where(torch.arange(M * N).view(M, N) % 3 == 0, x, y), **POINTERS, **EXACT)
def _masked_stores(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i), mask=i % 3 == 0)
    tl.store(out + i, tl.load(y + i), mask=i % 3 != 0)


@feature(lambda x, y: x[0, :4] + y[0, 0], shape=(4,), grid=4, **POINTERS, **EXACT)
def _numbers_in_memory(x, y, out, spare):
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)) + tl.load(y))


@feature(lambda x, y: x.flatten()[torch.arange(M * N) * 7 % 512], **POINTERS, **EXACT)
def _table_lookup(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i * 7 % 512))


@feature(lambda x, y: x.flatten()[torch.arange(M * N) ^ 37], **POINTERS, **EXACT)
def _scattered_stores(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + (i ^ 37), tl.load(x + i))


@feature(lambda x, y: x + y, **POINTERS, **EXACT)
def _further_modifiers(x, y, out, spare):
    i = tl.arange(0, 512)
    a = tl.load(x + i, cache_modifier=".cv") + tl.load(y + i, eviction_policy="evict_last")
    tl.store(out + i, a, mask=i < 256, cache_modifier=".wt")
    tl.store(out + i, a, mask=i >= 256, cache_modifier=".cg", eviction_policy="evict_last")


@feature(lambda x, y: x & ~y, dtype=torch.bool, low=0, high=2, **POINTERS, **EXACT)
def _bools(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i) & (tl.load(y + i) == 0))


@feature(lambda x, y: x.view(torch.int32), **POINTERS, **EXACT)
def _pointer_of_another_type(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + i))


@feature(lambda x, y: x * 2, **POINTERS, **EXACT)
def _pointers_that_walk(x, y, out, spare):
    i = tl.arange(0, 64)
    source, target = x + i, out + i
    for _ in range(8):
        tl.store(target, tl.load(source) * 2)
        source += 64
        target += 64


@feature(lambda x, y: x * 2, **POINTERS, **EXACT)
def _places_of_64_bits(x, y, out, spare):
    i = tl.program_id(0).to(tl.int64) * 512 + tl.max_constancy(tl.arange(0, 512), 1).to(tl.int64)
    tl.store(out + i, tl.load(x + i) * 2)


@feature(lambda x, y: torch.nn.functional.pad(x, (-24, 8)), shape=(M, 16), **POINTERS, **EXACT)
def _block_pointer_past_the_end(x, y, out, spare):
    source = tl.make_block_ptr(x, (16, 32), (32, 1), (0, 24), (16, 16), (1, 0))
    target = tl.make_block_ptr(out, (16, 16), (16, 1), (0, 0), (16, 16), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="zero"))


@feature(lambda x, y: x.T.contiguous(), shape=(N, M), **POINTERS, **EXACT)
def _block_pointer_of_columns(x, y, out, spare):
    source = tl.make_block_ptr(x, (32, 16), (1, 32), (0, 0), (16, 16), (0, 1))
    target = tl.make_block_ptr(out, (32, 16), (16, 1), (0, 0), (16, 16), (1, 0))
    for _ in range(2):
        tl.store(target, tl.load(source), boundary_check=(0,))
        source, target = tl.advance(source, (16, 0)), tl.advance(target, (16, 0))


@feature(lambda x, y: x.clone().index_fill_(1, torch.arange(24, 32), 0), **POINTERS, **EXACT)
def _descriptors(x, y, out, spare):
    source = tl.make_tensor_descriptor(x, [16, 24], [32, 1], [16, 32])
    target = tl.make_tensor_descriptor(out, [16, 32], [32, 1], [16, 32])
    target.store([0, 0], source.load([0, 0]))


@feature(lambda x, y: x * 2, grid=2, **POINTERS, **EXACT)
def _descriptor_functions(x, y, out, spare):
    source = tl.make_tensor_descriptor(x, [16, 32], [32, 1], [8, 32])
    target = tl.make_tensor_descriptor(out, [16, 32], [32, 1], [8, 32])
    row = tl.program_id(0) * 8
    tl.store_tensor_descriptor(target, [row, 0], tl.load_tensor_descriptor(source, [row, 0]) * 2)


@feature(lambda x, y: x + 1, **POINTERS, **EXACT | {"tolerance": 1e-6})
def _assembly_of_pairs(x, y, out, spare):
    i = tl.arange(0, 512)
    a = tl.inline_asm_elementwise(
        "add.f32 $0, $2, 0f3F800000; add.f32 $1, $3, 0f3F800000;", "=f,=f,f,f", [tl.load(x + i)], tl.float32, True, 2
    )
    tl.store(out + i, a)


@feature(lambda x, y: (x + y) * (x - y), **POINTERS)
def _assembly_with_two_results(x, y, out, spare):
    i = tl.arange(0, 512)
    a, b = tl.inline_asm_elementwise(
        "add.f32 $0, $2, $3; sub.f32 $1, $2, $3;", "=f,=f,f,f", [tl.load(x + i), tl.load(y + i)],
        (tl.float32, tl.float32), True, 1,
    )  # fmt: skip
    tl.store(out + i, a * b)
