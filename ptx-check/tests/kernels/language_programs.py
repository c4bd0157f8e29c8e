"""Features of the language that are about programs: their numbers, control flow, pointers, memory that they share.
Every atomic operation is in test_atomics.py, what orders programs in test_order_of_programs.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from language import EXACT, FEATURES, HALF, POINTERS, WHOLE, Feature, M, feature

# ---------------------------------------------------------------------------------------------- programs, control flow


@feature(lambda x, y: torch.arange(8).repeat_interleave(64), grid=(2, 2, 2), **POINTERS, **WHOLE)
def _three_axes(x, y, out, spare):
    place = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place * 64 + tl.arange(0, 64), tl.zeros((64,), tl.int64) + place)


@feature(lambda x, y: 2 * x, grid=(2, 2), since=90, constants={"num_ctas": 2}, **POINTERS, **EXACT)
def _programs_that_two_processors_share(x, y, out, spare):
    i = (tl.program_id(0) * 2 + tl.program_id(1)) * 128 + tl.arange(0, 128)
    tl.store(out + i, tl.load(x + i) * 2)


@feature(lambda x, y: torch.tensor([8, 16, 3, 19]), shape=(4,), grid=4, **POINTERS, **WHOLE)
def _while(x, y, out, spare):
    n = tl.program_id(0) + 6
    steps = 0
    while n != 1:
        n = tl.where(n % 2 == 0, n // 2, 3 * n + 1)
        steps += 1
    tl.store(out + tl.program_id(0), steps.to(tl.int64))


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


# ------------------------------------------------------------------------------------------------- atomic operations


@triton.jit
def _four_programs(
    x, y, out, spare, NAME: tl.constexpr, OF: tl.constexpr, STEP: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr
):  # fmt: skip
    """Four programs change the same 128 places of a type, every STEP-th; the last one stores what they hold."""
    i = tl.arange(0, 128)
    held = spare.to(tl.pointer_type(OF), bitcast=True) + i
    getattr(tl, NAME)(held, tl.load(x + tl.program_id(0) * 128 + i).to(OF), mask=i % STEP == 0, sem=SEM)
    tl.debug_barrier()
    if tl.atomic_add(spare + 1000, 1, sem="acq_rel", scope=SCOPE) == 3:
        tl.store(out + i, tl.load(held).to(out.dtype.element_ty))


for name, of, wanted, options, constants in (
    ("atomic_min", tl.int32, lambda x, y: x.view(4, 128).amin(0).clamp(max=0), {}, {}),
    ("atomic_max", tl.uint32, lambda x, y: x.view(4, 128).amax(0), {"low": 0}, {}),
    ("atomic_add", tl.float16, lambda x, y: x.float().view(4, 128).sum(0).half(), HALF | {"since": 70}, {}),
    ("atomic_add", tl.int64, lambda x, y: x.long().view(4, 128).sum(0), {}, {"SEM": "relaxed", "SCOPE": "sys"}),
    (
        "atomic_add", tl.int32, lambda x, y: torch.where(torch.arange(128) % 2 == 0, x.view(4, 128).sum(0), 0).int(),
        {}, {"STEP": 2},
    ),
):  # fmt: skip
    constants = {"NAME": name, "OF": of, "STEP": 1, "SEM": None, "SCOPE": None, **constants}
    of_four = {"shape": (128,), "grid": 4, "of_pointers": True, "constants": constants}
    FEATURES.append(Feature(f"{name}_of_{of.name}", _four_programs, wanted, **{**WHOLE, **options}, **of_four))
