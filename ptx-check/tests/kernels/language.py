"""What a test of one feature of Triton's language is: a function of two tiles (M, N), or a kernel of pointers, and what
torch says of the same numbers."""

from __future__ import annotations

import linecache
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
    """Triton's, of tiles x and y; or of pointers x, y, out and spare, 1,024 zeros of int32."""
    wanted: Callable[[Tensor, Tensor], Tensor]
    """torch's, of the same two tensors."""
    dtype: torch.dtype = torch.float32
    low: float = -4.0
    """Numbers lie between low and high."""
    high: float = 4.0
    of_pointers: bool = False
    constants: dict = field(default_factory=dict)
    """Further arguments of a function of pointers."""
    tolerance: float = 1e-5
    """Of the largest number."""
    shape: tuple[int, ...] = (M, N)
    """Of the result."""
    since: int = 60
    """The first chip that the compiler has it for."""
    refused: tuple[str, ...] = ()
    """Chips for which it compiles to instructions that the machine refuses."""
    grid: int | tuple[int, ...] = 1

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


def formula(name: str, of_triton: str, wanted: Callable[[Tensor, Tensor], Tensor], **options) -> None:
    """Notes a formula of tiles x and y as a feature. Triton reads a function's source: linecache has it."""
    source = f"def _{name}(x, y):\n    return {of_triton}\n"
    file = f"<{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {"__name__": __name__, "tl": tl, "libdevice": libdevice}
    exec(compile(source, file, "exec"), names)
    feature(wanted, **options)(names[f"_{name}"])


@triton.jit
def _on_tiles(x, y, out, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, F: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + tl.arange(0, SIZE), tl.reshape(F(tl.load(x + i), tl.load(y + i)), (SIZE,)))


EXACT = {"tolerance": 0.0}
WHOLE = {"dtype": torch.int32, "low": -100, "high": 100, "tolerance": 0.0}
POSITIVE = {"low": 0.1}
HALF = {"dtype": torch.float16, "tolerance": 1e-2}
DOUBLE = {"dtype": torch.float64, "tolerance": 1e-12}
POINTERS = {"of_pointers": True}
