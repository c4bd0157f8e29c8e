"""Features of the language that are about memory that programs share, and random numbers, the rest."""

import torch
import triton
import triton.language as tl
from language import EXACT, FEATURES, POINTERS, WHOLE, Feature, feature
from language_memory import _uniforms, _words
from torch import Tensor

# ------------------------------------------------------------------------------------------------------------ atomics


def _folded(function, first: int):
    """What four programs leave, one after the other, of 128 places that begin with a number."""

    def wanted(x: Tensor, y: Tensor) -> Tensor:
        held = torch.full((128,), first, dtype=x.dtype)
        for row in x.view(4, 128):
            held = function(held, row)
        return held

    return wanted


@feature(lambda x, y: x.view(4, 128)[0] & 0xFF, shape=(128,), **WHOLE | {"dtype": torch.int32}, **POINTERS)
def _atomic_and(x, y, out, spare):
    i = tl.arange(0, 128)
    tl.atomic_xchg(spare + i, tl.load(x + i))
    tl.debug_barrier()
    tl.atomic_and(spare + i, 0xFF)
    tl.debug_barrier()
    tl.store(out + i, tl.atomic_and(spare + i, -1))


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
UNSIGNED = {"dtype": torch.int32, "low": 0, "high": 99}
HALF = {"dtype": torch.float16, "tolerance": 1e-2, "since": 70}
BFLOAT = {"dtype": torch.bfloat16, "tolerance": 3e-2, "since": 90}
BY_FOUR = {
    "atomic_or": ("atomic_or", tl.int32, _folded(torch.bitwise_or, 0), SIGNED, {}),
    "atomic_xor": ("atomic_xor", tl.int32, _folded(torch.bitwise_xor, 0), SIGNED, {}),
    "atomic_min": ("atomic_min", tl.int32, _folded(torch.minimum, 0), SIGNED, {}),
    "atomic_max_of_uint32": ("atomic_max", tl.uint32, _folded(torch.maximum, 0), UNSIGNED, {}),
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


@feature(lambda x, y: torch.tensor([0, 5, 5, 5]), shape=(4,), grid=4, **POINTERS, **WHOLE)
def _atomic_cas_of_int64(x, y, out, spare):
    held = spare.to(tl.pointer_type(tl.int64), bitcast=True)
    zero, five = tl.zeros((), tl.int64), tl.full((), 5, tl.int64)
    tl.store(out + tl.program_id(0), tl.atomic_cas(held, zero, five, sem="acq_rel"))


@feature(lambda x, y: x.view(4, 128)[3], shape=(128,), **POINTERS, **EXACT)
def _atomic_xchg_of_float32(x, y, out, spare):
    i = tl.arange(0, 128)
    held = spare.to(tl.pointer_type(tl.float32), bitcast=True) + i
    tl.atomic_xchg(held, tl.load(x + 384 + i), scope="cta")
    tl.debug_barrier()
    tl.store(out + i, tl.atomic_xchg(held, 0.0))


# ----------------------------------------------------------------------------------------------------- random numbers


def _sum_of_words(x: Tensor, y: Tensor) -> Tensor:
    return sum(word.int().long() * (place + 1) for place, word in enumerate(_words()))


@feature(_sum_of_words, **POINTERS, **EXACT)
def _randint4x(x, y, out, spare):
    i = tl.arange(0, 512)
    a, b, c, d = tl.randint4x(5, i)
    a, b = a.to(tl.int32, bitcast=True).to(tl.int64), b.to(tl.int32, bitcast=True).to(tl.int64)
    c, d = c.to(tl.int32, bitcast=True).to(tl.int64), d.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(out + i, a + 2 * b + 3 * c + 4 * d)


def _normals(x: Tensor, y: Tensor) -> Tensor:
    u, v, s, t = _uniforms()
    turn = 6.283185307179586
    one, two = (-2 * u.clamp(min=1e-7).log()).sqrt(), (-2 * s.clamp(min=1e-7).log()).sqrt()
    return one * (turn * v).cos() + one * (turn * v).sin() + two * (turn * t).cos() + two * (turn * t).sin()


@feature(_normals, tolerance=1e-4, **POINTERS)
def _randn4x(x, y, out, spare):
    i = tl.arange(0, 512)
    a, b, c, d = tl.randn4x(5, i)
    tl.store(out + i, a + b + c + d)
