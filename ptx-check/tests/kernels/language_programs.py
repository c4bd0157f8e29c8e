"""Features of the language that are about programs: their numbers, control flow, pointers, random numbers."""

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


@feature(lambda x, y: torch.tensor([8, 16, 3, 19]), shape=(4,), grid=4, **POINTERS, **WHOLE)
def _while(x, y, out, spare):
    n = tl.program_id(0) + 6
    steps = 0
    while n != 1:
        n = tl.where(n % 2 == 0, n // 2, 3 * n + 1)
        steps += 1
    tl.store(out + tl.program_id(0), steps.to(tl.int64))


@feature(lambda x, y: x.clamp(min=0).sum(0), shape=(N,), **POINTERS)
def _a_pipelined_loop(x, y, out, spare):
    i, total = tl.arange(0, 32), tl.zeros((32,), tl.float32)
    for row in tl.range(0, 16, num_stages=3):
        total += tl.maximum(tl.load(x + row * 32 + i), 0.0)
    tl.store(out + i, total)


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


@feature(lambda x, y: 2 * (x + y), **POINTERS, **EXACT)
def _hints_to_caches(x, y, out, spare):
    i = tl.arange(0, 512)
    a = tl.load(x + i, cache_modifier=".cg", eviction_policy="evict_first") + tl.load(x + i, cache_modifier=".cv")
    b = tl.load(y + i, cache_modifier=".ca", eviction_policy="evict_last") + tl.load(y + i, volatile=True)
    tl.store(out + i, a + b, mask=i < 256, cache_modifier=".wt")
    tl.store(out + i, a + b, mask=i >= 256, cache_modifier=".cs", eviction_policy="evict_last")


@feature(lambda x, y: x & ~y, dtype=torch.bool, low=0, high=2, **POINTERS, **EXACT)
def _bools(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i) & (tl.load(y + i) == 0))


@feature(lambda x, y: (x + y) * (x - y), **POINTERS)
def _assembly_with_two_results(x, y, out, spare):
    i = tl.arange(0, 512)
    a, b = tl.inline_asm_elementwise(
        "add.f32 $0, $2, $3; sub.f32 $1, $2, $3;", "=f,=f,f,f", [tl.load(x + i), tl.load(y + i)],
        (tl.float32, tl.float32), True, 1,
    )  # fmt: skip
    tl.store(out + i, a * b)


# ----------------------------------------------------------------------------------------------------- random numbers


def _words() -> list[Tensor]:
    """Philox4x32-10 of seed 5 and these counters."""
    words = [torch.arange(M * N), *(torch.zeros(M * N, dtype=torch.int64) for _ in range(3))]
    keys = [5, 0]
    for _ in range(10):
        a, b = ([word * factor >> 32 & 0xFFFFFFFF, word * factor & 0xFFFFFFFF]
                for word, factor in ((words[0], 0xD2511F53), (words[2], 0xCD9E8D57)))  # fmt: skip
        words = [b[0] ^ words[1] ^ keys[0], b[1], a[0] ^ words[3] ^ keys[1], a[1]]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [(word ^ 1 << 31) - (1 << 31) for word in words]


def _sum_of_words(x: Tensor, y: Tensor) -> Tensor:
    return sum(word.int().long() * (place + 1) for place, word in enumerate(_words()))


@feature(_sum_of_words, **POINTERS, **EXACT)
def _randint4x(x, y, out, spare):
    i = tl.arange(0, 512)
    a, b, c, d = tl.randint4x(5, i)
    a, b = a.to(tl.int32, bitcast=True).to(tl.int64), b.to(tl.int32, bitcast=True).to(tl.int64)
    c, d = c.to(tl.int32, bitcast=True).to(tl.int64), d.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(out + i, a + 2 * b + 3 * c + 4 * d)
