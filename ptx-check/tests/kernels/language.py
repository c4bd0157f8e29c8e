"""Features of Triton's language that no test of single instructions holds: functions of two tiles (M, N), or kernels of
pointers, and what torch says of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ptx_check import executed

M, N = 16, 32
CHIPS = ("sm_60", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Feature:
    name: str
    function: Callable
    """Triton's, of tiles x and y; or of pointers x, y and out."""
    wanted: Callable[[Tensor, Tensor], Tensor]
    """torch's, of the same two tensors."""
    dtype: torch.dtype = torch.float32
    low: float = -4.0
    """Numbers lie between low and high."""
    high: float = 4.0
    of_pointers: bool = False
    options: dict = field(default_factory=dict)
    """Of the launch of a function of pointers."""
    tolerance: float = 1e-5
    """Of the largest number."""
    shape: tuple[int, ...] = (M, N)
    """Of the result."""
    since: int = 60
    """The first chip that the compiler has it for."""
    grid: tuple[int, ...] = (1,)

    def compiles(self, chip: str) -> bool:
        return int(chip[3:]) >= self.since

    def inputs(self) -> tuple[Tensor, Tensor]:
        if self.dtype.is_floating_point:
            x, y = torch.rand(2, M, N, dtype=torch.float64) * (self.high - self.low) + self.low
        else:
            x, y = torch.randint(int(self.low), int(self.high), (2, M, N))
        return x.to(self.dtype), y.to(self.dtype)

    def check(self, chip: str, **options) -> None:
        """Raises FaultyKernel, Unsupported, or AssertionError for wrong numbers."""
        x, y = self.inputs()
        wanted = self.wanted(x.clone(), y.clone()).reshape(self.shape)
        with executed(chip, **options):
            out = torch.empty(self.shape, dtype=wanted.dtype)
            if self.of_pointers:
                self.function[self.grid](x, y, out, **self.options)
            else:
                _on_tiles[(1,)](x, y, out, M=M, N=N, SIZE=out.numel(), F=self.function)
        error = (out.double() - wanted.double()).abs().max().item()
        assert error <= self.tolerance * max(1.0, wanted.double().abs().max().item()), f"wrong by {error:.3e}"


FEATURES: list[Feature] = []


def feature(wanted: Callable[[Tensor, Tensor], Tensor], **options) -> Callable:
    """Notes a function as a feature."""

    def note(function: Callable) -> Callable:
        name = function.__name__.removeprefix("_")
        FEATURES.append(Feature(name, triton.jit(function), wanted, **options))
        return function

    return note


@triton.jit
def _on_tiles(x, y, out, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, F: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + tl.arange(0, SIZE), tl.reshape(F(tl.load(x + i), tl.load(y + i)), (SIZE,)))


EXACT = {"tolerance": 0.0}
WHOLE = {"dtype": torch.int32, "low": -100, "high": 100, "tolerance": 0.0}
POINTERS = {"of_pointers": True}
INT8 = {"dtype": torch.int8, "low": -128, "high": 128, "tolerance": 0.0}

# ------------------------------------------------------------------------------------------------ functions and casts


@feature(lambda x, y: x.sin() + y.cos() + (x * 0.3).tan() + y.atan())
def _circular_functions(x, y):
    return tl.sin(x) + tl.cos(y) + libdevice.tan(x * 0.3) + libdevice.atan(y)


@feature(lambda x, y: torch.sin(1e6 * x), tolerance=1e-4)
def _sin_of_large_numbers(x, y):
    return tl.sin(1e6 * x)


@feature(lambda x, y: x.exp() * y.exp2() + x.log() + y.log1p(), dtype=torch.float64, tolerance=1e-12, low=0.1)
def _functions_of_float64(x, y):
    return tl.exp(x) * tl.exp2(y) + tl.log(x) + libdevice.log1p(y)


@feature(lambda x, y: x.long() * 2**33 // y.long(), **WHOLE | {"low": 1})
def _division_of_64_bits(x, y):
    return (x.to(tl.int64) << 33) // y.to(tl.int64)


@feature(lambda x, y: x.half().float() + y.bfloat16().float(), **INT8)
def _of_int8(x, y):
    return x.to(tl.float16).to(tl.float32) + y.to(tl.bfloat16).to(tl.float32)


@feature(lambda x, y: x.to(torch.float8_e4m3fn).float(), since=89, **EXACT)
def _to_fp8_e4m3(x, y):
    return x.to(tl.float8e4nv).to(tl.float32)


@feature(lambda x, y: x.half() / 8, **INT8 | {"low": -14, "high": 15})
def _fp8_e4b15(x, y):
    return (x.to(tl.float16) * 0.125).to(tl.float8e4b15).to(tl.float16)


# ---------------------------------------------------------------------------------------- reductions, scans, sorting


@feature(lambda x, y: x.max(1).values + 100 * x.max(1).indices + y.argmin(1), shape=(M,))
def _max_with_indices(x, y):
    most, where = tl.max(x, 1, return_indices=True)
    return most + 100 * where + tl.argmin(y, 1)


@feature(lambda x, y: x.topk(8, 1).values, shape=(M, 8), **EXACT)
def _topk(x, y):
    return tl.topk(x, 8)


@feature(lambda x, y: torch.bincount(x[x < 40], minlength=64).int(),
         shape=(64,), dtype=torch.int32, low=0, high=64, **EXACT)  # fmt: skip
def _histogram_with_a_mask(x, y):
    flat = tl.ravel(x)
    return tl.histogram(flat, 64, mask=flat < 40)


# ---------------------------------------------------------------------------------------------- programs, control flow


@feature(lambda x, y: torch.arange(8).repeat_interleave(64), grid=(2, 2, 2), **POINTERS, **WHOLE)
def _three_axes(x, y, out):
    place = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place * 64 + tl.arange(0, 64), tl.zeros((64,), tl.int64) + place)


@feature(lambda x, y: 2 * x, grid=(2, 2), since=90, options={"num_ctas": 2}, **POINTERS, **EXACT)
def _programs_that_two_processors_share(x, y, out):
    i = (tl.program_id(0) * 2 + tl.program_id(1)) * 128 + tl.arange(0, 128)
    tl.store(out + i, tl.load(x + i) * 2)


@triton.jit(noinline=True)
def _scaled(a, n):
    if n == 7:
        return a
    return a * n


@triton.jit(noinline=True)
def _at_most(a, row, most):
    return tl.minimum(_scaled(a, row), most), row * 2


@feature(lambda x, y: torch.where(torch.arange(M) == 7, x.sum(1), x.sum(1) * torch.arange(M)).clamp(max=20.0)
         + 2 * torch.arange(M), shape=(M,), grid=(M,), **POINTERS)  # fmt: skip
def _functions_that_are_called(x, y, out):
    row = tl.program_id(0)
    least, twice = _at_most(tl.sum(tl.load(x + row * 32 + tl.arange(0, 32))), row, 20.0)
    tl.store(out + row, least + twice)


# ----------------------------------------------------------------------------------------------------------- pointers


@feature(lambda x, y: 2 * (x + y), **POINTERS, **EXACT)
def _hints_to_caches(x, y, out):
    i = tl.arange(0, 512)
    a = tl.load(x + i, cache_modifier=".cg", eviction_policy="evict_first") + tl.load(x + i, cache_modifier=".cv")
    b = tl.load(y + i, cache_modifier=".ca", eviction_policy="evict_last") + tl.load(y + i, volatile=True)
    tl.store(out + i, a + b, mask=i < 256, cache_modifier=".wt")
    tl.store(out + i, a + b, mask=i >= 256, cache_modifier=".cs", eviction_policy="evict_last")
