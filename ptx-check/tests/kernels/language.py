"""What a test of one feature of Triton's language is: a function of two tiles (M, N), or a kernel of pointers, and what
torch says of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from ptx_check import executed

M, N = 16, 32
CHIPS = ("sm_60", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Feature:
    name: str
    function: Callable | str
    """Triton's, of tiles x and y; or of pointers x, y, out and spare, 1,024 zeros of int32; or the name of one of
    Triton's own, of one tile or of two."""
    wanted: Callable[[Tensor, Tensor], Tensor]
    """torch's, of the same two tensors."""
    dtype: torch.dtype = torch.float32
    low: float = -4.0
    """Numbers lie between low and high."""
    high: float = 4.0
    of_pointers: bool = False
    constants: dict = field(default_factory=dict)
    """Further arguments of a function of pointers."""
    operands: int = 2
    """Tiles that a function takes that is named."""
    tolerance: float = 1e-5
    """Of the largest number."""
    shape: tuple[int, ...] = (M, N)
    """Of the result."""
    since: int = 60
    """The first chip that the compiler has it for."""
    without: tuple[str, ...] = ()
    """Chips that the compiler does not have it for."""
    refused: tuple[str, ...] = ()
    """Chips for which it compiles to instructions that the machine refuses."""
    grid: int | tuple[int, ...] = 1

    def compiles(self, chip: str) -> bool:
        return int(chip[3:]) >= self.since and chip not in self.without

    def inputs(self) -> tuple[Tensor, Tensor]:
        if self.dtype.is_floating_point:
            x, y = torch.rand(2, M, N, dtype=torch.float64) * (self.high - self.low) + self.low
        else:
            x, y = torch.randint(int(self.low), int(self.high), (2, M, N))
        return x.to(self.dtype), y.to(self.dtype)

    def check(self, chip: str) -> None:
        """Raises FaultyKernel, Unsupported, or AssertionError for wrong numbers."""
        x, y = self.inputs()
        wanted = self.wanted(x.clone(), y.clone()).reshape(self.shape)
        with executed(chip):
            out = torch.empty(self.shape, dtype=wanted.dtype)
            if isinstance(self.function, str):
                home, _, name = self.function.partition(".")
                shape = {"M": M, "N": N, "SIZE": out.numel()}
                _by_name[(1,)](x, y, out, **shape, OF_TL=home == "tl", NAME=name, OPERANDS=self.operands)
            elif self.of_pointers:
                self.function[self.grid if isinstance(self.grid, tuple) else (self.grid,)](
                    x, y, out, torch.zeros(1024, dtype=torch.int32), **self.constants
                )
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


def named(table: dict[str, tuple[str, Callable, dict]], operands: int) -> None:
    """Note a table's features: name -> Triton's own function, torch's of as many tensors, and options."""
    for name, (function, wanted, options) in table.items():
        of_both = (lambda x, y, f=wanted: f(x)) if operands == 1 else wanted
        FEATURES.append(Feature(name, function, of_both, operands=operands, **options))


@triton.jit
def _by_name(
    x, y, out, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    OF_TL: tl.constexpr, NAME: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    if OF_TL and OPERANDS == 1:
        z = getattr(tl, NAME)(tl.load(x + i))
    elif OF_TL:
        z = getattr(tl, NAME)(tl.load(x + i), tl.load(y + i))
    elif OPERANDS == 1:
        z = getattr(libdevice, NAME)(tl.load(x + i))
    else:
        z = getattr(libdevice, NAME)(tl.load(x + i), tl.load(y + i))
    tl.store(out + tl.arange(0, SIZE), tl.reshape(z, (SIZE,)))


@triton.jit
def _on_tiles(x, y, out, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, F: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + tl.arange(0, SIZE), tl.reshape(F(tl.load(x + i), tl.load(y + i)), (SIZE,)))


EXACT = {"tolerance": 0.0}
WHOLE = {"dtype": torch.int32, "low": -100, "high": 100, "tolerance": 0.0}
POSITIVE = {"low": 0.1}
HALF = {"dtype": torch.float16, "tolerance": 1e-2}
BFLOAT = {"dtype": torch.bfloat16, "tolerance": 1e-2}
DOUBLE = {"dtype": torch.float64, "tolerance": 1e-12}
POINTERS = {"of_pointers": True}
