"""Features of the language that are about memory that programs share. Every operation is in test_atomics.py, what
orders programs in test_order_of_programs.py."""

import torch
import triton
import triton.language as tl
from language import EXACT, FEATURES, POINTERS, WHOLE, Feature, N, feature
from torch import Tensor


@triton.jit
def _with_results(x, y, out, spare, NAME: tl.constexpr):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + i, getattr(tl, NAME)(spare + tl.arange(0, 128), tl.load(x + i)))


def _before(rows: Tensor) -> Tensor:
    """What each program finds: zeros, then what the one before left."""
    return rows.roll(1, 0).index_fill(0, torch.tensor([0]), 0)


for name, wanted in (
    ("atomic_add", lambda x, y: _before(x.view(4, -1).cumsum(0))),
    ("atomic_max", lambda x, y: _before(x.view(4, -1).clamp(min=0).cummax(0).values)),
    ("atomic_xchg", lambda x, y: _before(x.view(4, -1))),
):
    found = {"grid": 4, "constants": {"NAME": name}, **WHOLE, **POINTERS}
    FEATURES.append(Feature(f"{name}_with_result", _with_results, wanted, **found))


@feature(lambda x, y: x[0], shape=(N,), **POINTERS, **EXACT)
def _atomic_max_of_float(x, y, out, spare):
    i = tl.arange(0, 32)
    zeros = (spare + i).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.atomic_max(zeros, tl.load(x + i))
    tl.debug_barrier()
    tl.store(out + i, tl.minimum(tl.atomic_min(zeros, tl.load(x + i)), tl.load(x + i)))


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


def _sum(x: Tensor, y: Tensor) -> Tensor:
    return x.view(4, 128).sum(0)


SIGNED = {"dtype": torch.int32, "low": -100, "high": 100}
HALF = {"dtype": torch.float16, "tolerance": 1e-2, "since": 70}
BFLOAT = {"dtype": torch.bfloat16, "tolerance": 3e-2, "since": 90}
BY_FOUR = {
    "atomic_min": ("atomic_min", tl.int32, lambda x, y: x.view(4, 128).amin(0).clamp(max=0), SIGNED, {}),
    "atomic_max_of_uint32": ("atomic_max", tl.uint32, lambda x, y: x.view(4, 128).amax(0), SIGNED | {"low": 0}, {}),
    "atomic_add_of_float32": ("atomic_add", tl.float32, _sum, {"tolerance": 1e-4}, {}),
    "atomic_add_of_half": ("atomic_add", tl.float16, lambda x, y: _sum(x.float(), y).half(), HALF, {}),
    "atomic_add_of_bfloat16": ("atomic_add", tl.bfloat16, lambda x, y: _sum(x.float(), y).bfloat16(), BFLOAT, {}),
    "atomic_add_of_int64": (
        "atomic_add", tl.int64, lambda x, y: _sum(x.long(), y), SIGNED, {"SEM": "relaxed", "SCOPE": "sys"}
    ),
    "atomic_add_with_a_mask": (
        "atomic_add", tl.int32, lambda x, y: torch.where(torch.arange(128) % 2 == 0, _sum(x, y), 0).int(), SIGNED,
        {"STEP": 2},
    ),
}  # fmt: skip
for name, (operation, of, wanted, options, constants) in BY_FOUR.items():
    constants = {"NAME": operation, "OF": of, "STEP": 1, "SEM": None, "SCOPE": None, **constants}
    of_four = {"shape": (128,), "grid": 4, "of_pointers": True, "constants": constants}
    FEATURES.append(Feature(name, _four_programs, wanted, **{"tolerance": 0.0, **options}, **of_four))
