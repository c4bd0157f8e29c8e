"""Features of the language that are about memory and programs, and random numbers."""

import torch
import triton.language as tl
from language import DOUBLE, EXACT, POINTERS, WHOLE, M, N, feature
from torch import Tensor


@feature(lambda x, y: x + y, **POINTERS, **EXACT)
def _cache_hints(x, y, out, spare):
    i = tl.arange(0, 512)
    a = tl.load(x + i, cache_modifier=".cg", eviction_policy="evict_first")
    b = tl.load(y + i, cache_modifier=".ca", eviction_policy="evict_last")
    tl.store(out + i, a + b, cache_modifier=".cs", eviction_policy="evict_first")


@feature(lambda x, y: x * 2, **POINTERS, **EXACT)
def _volatile(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i, volatile=True) * 2)


@feature(lambda x, y: torch.arange(M * N), grid=4, **WHOLE, **POINTERS)
def _places_from_a_counter(x, y, out, spare):
    i = tl.arange(0, 128) + tl.atomic_add(spare, 128)
    tl.store(out + i, i)


@feature(lambda x, y: x.view(4, -1).cumsum(0) - x.view(4, -1), grid=4, **WHOLE, **POINTERS)
def _atomic_add_with_result(x, y, out, spare):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + i, tl.atomic_add(spare + tl.arange(0, 128), tl.load(x + i)))


@feature(lambda x, y: x.view(4, -1).cummax(0).values.roll(1, 0).index_fill(0, torch.tensor([0]), 0), grid=4,
         dtype=torch.int32, low=0, high=99, **EXACT, **POINTERS)  # fmt: skip
def _atomic_max_with_result(x, y, out, spare):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + i, tl.atomic_max(spare + tl.arange(0, 128), tl.load(x + i)))


@feature(lambda x, y: x.view(4, -1).roll(1, 0).index_fill(0, torch.tensor([0]), 0), grid=4, **WHOLE, **POINTERS)
def _atomic_xchg(x, y, out, spare):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + i, tl.atomic_xchg(spare + tl.arange(0, 128), tl.load(x + i)))


@feature(lambda x, y: torch.tensor([0, 7, 7, 7]), shape=(4,), grid=4, **WHOLE, **POINTERS)
def _atomic_cas(x, y, out, spare):
    tl.store(out + tl.program_id(0), tl.atomic_cas(spare, 0, 7))


@feature(lambda x, y: x.view(4, -1).sum(0), shape=(128,), grid=4, tolerance=1e-4, **POINTERS)
def _a_lock(x, y, out, spare):
    i = tl.arange(0, 128)
    while tl.atomic_cas(spare, 0, 1) == 1:
        pass
    held = tl.load(spare + 1)
    before = tl.load(out + i, mask=(i < 128) & (held > 0), other=0.0)
    tl.store(out + i, before + tl.load(x + tl.program_id(0) * 128 + i))
    tl.store(spare + 1, held + 1)
    tl.debug_barrier()
    tl.atomic_xchg(spare, 0)


@feature(lambda x, y: x.view(4, -1).sum(), shape=(1,), grid=4, tolerance=1e-4, **POINTERS)
def _the_last_program_adds_up(x, y, out, spare):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(y + tl.program_id(0), tl.sum(tl.load(x + i)))
    tl.debug_barrier()
    if tl.atomic_add(spare, 1) == 3:
        tl.store(out, tl.sum(tl.load(y + tl.arange(0, 4))))


@feature(lambda x, y: x[0], shape=(N,), **POINTERS, **EXACT)
def _atomic_max_of_float(x, y, out, spare):
    i = tl.arange(0, 32)
    zeros = (spare + i).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.atomic_max(zeros, tl.load(x + i))
    tl.debug_barrier()
    tl.store(out + i, tl.minimum(tl.atomic_min(zeros, tl.load(x + i)), tl.load(x + i)))


@feature(lambda x, y: x.view(4, -1).cumsum(0) - x.view(4, -1), grid=4, **POINTERS, **DOUBLE)
def _atomic_add_of_float64(x, y, out, spare):
    i = tl.arange(0, 128)
    sums = (spare + 2 * i).to(tl.pointer_type(tl.float64), bitcast=True)
    x += tl.program_id(0) * 128
    tl.store(out + tl.program_id(0) * 128 + i, tl.atomic_add(sums, tl.load(x + i)))


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


def _uniforms() -> list[Tensor]:
    return [torch.where(word < 0, -word - 1, word).float() * 4.6566127342e-10 for word in _words()]


def _normal(x, y):
    u, v, *_ = _uniforms()
    return (-2 * u.clamp(min=1e-7).log()).sqrt() * torch.cos(6.283185307179586 * v)


@feature(lambda x, y: _words()[0], dtype=torch.int32, tolerance=0.0, **POINTERS)
def _randint(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.randint(5, i).to(tl.int32, bitcast=True))


@feature(lambda x, y: _uniforms()[0], **POINTERS)
def _rand(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.rand(5, i))


@feature(_normal, tolerance=1e-4, **POINTERS)
def _randn(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.randn(5, i))


@feature(lambda x, y: x.cumsum(0), **POINTERS)
def _a_loop(x, y, out, spare):
    i, total = tl.arange(0, 32), tl.zeros((32,), tl.float32)
    for row in range(16):
        total += tl.load(x + row * 32 + i)
        tl.store(out + row * 32 + i, total)


@feature(lambda x, y: x.clamp(min=0).sum(0), shape=(N,), **POINTERS)
def _a_pipelined_loop(x, y, out, spare):
    i, total = tl.arange(0, 32), tl.zeros((32,), tl.float32)
    for row in tl.range(0, 16, num_stages=3):
        total += tl.maximum(tl.load(x + row * 32 + i), 0.0)
    tl.store(out + i, total)


@feature(lambda x, y: x * 3, **POINTERS)
def _inline_assembly(x, y, out, spare):
    i = tl.arange(0, 512)
    tl.store(
        out + i, tl.inline_asm_elementwise("mul.f32 $0, $1, 0f40400000;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
    )
