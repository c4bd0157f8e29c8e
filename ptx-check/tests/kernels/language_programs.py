"""Features of the language that are about programs: their numbers, control flow, constants, pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from language import EXACT, POINTERS, WHOLE, M, N, feature

# ---------------------------------------------------------------------------------------------- programs, control flow


@feature(lambda x, y: torch.arange(8).repeat_interleave(64), grid=(2, 2, 2), **POINTERS, **WHOLE)
def _three_axes(x, y, out, spare):
    place = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place * 64 + tl.arange(0, 64), tl.zeros((64,), tl.int64) + place)


@feature(lambda x, y: torch.where(torch.arange(M)[:, None] % 2 == 0, x, -x), grid=M, **POINTERS, **EXACT)
def _if_else(x, y, out, spare):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    if tl.program_id(0) % 2 == 0:
        a = tl.load(x + i)
    else:
        a = -tl.load(x + i)
    tl.store(out + i, a)


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


@feature(lambda x, y: (x.half().float() @ y.half().float().T) * 4, shape=(M, M), tolerance=1e-3, **POINTERS)
def _products_in_a_loop(x, y, out, spare):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    total = tl.zeros((16, 16), tl.float32)
    for _ in tl.range(0, 4, disallow_acc_multi_buffer=True):
        a, b = tl.load(x + i * 32 + j).to(tl.float16), tl.load(y + i * 32 + j).to(tl.float16)
        total = tl.dot(a, tl.trans(b), total)
    tl.store(out + i * 16 + tl.arange(0, 16)[None, :], total)


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


@feature(lambda x, y: x.clone().index_fill_(1, torch.arange(24, 32), 0), **POINTERS, **EXACT)
def _descriptors(x, y, out, spare):
    source = tl.make_tensor_descriptor(x, [16, 24], [32, 1], [16, 32])
    target = tl.make_tensor_descriptor(out, [16, 32], [32, 1], [16, 32])
    target.store([0, 0], source.load([0, 0]))


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
