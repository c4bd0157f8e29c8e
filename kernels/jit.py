"""triton.jit for kernels that are launched: the same kernel, found again in less of the host's time.

At every launch Triton binds all arguments, asks of each what it specialises on and writes the constants out as text to
look the compiled kernel up. Here the key is a tuple of what decides: the pointers' dtypes, the integers that Triton
specialises on as they are, and the constants. Triton itself is only asked for what the key does not know: it compiles
for the same arguments with one and the same number for every Varying, also in tuples, where Triton would otherwise
specialise on whatever it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import triton
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from fasttfm.kernels.parameter import each_of, kinds_of

OPTIONS = {"enable_fp_fusion": True}
"""a * b + c may become one instruction. Triton 3.9 warns that 3.10 will do so only where it is asked to: kernels would
then run with other instructions and other last bits than those that are tested and held against the budgets."""

LARGEST = (1 << 31) - 1
"""Largest whole number that a kernel takes, but for strides."""

_REMEMBERED = 4096
"""Compiled kernels that are remembered: batches of ever new lengths have ever new strides."""

_NEUTRAL = 7
"""A number that Triton does not specialise on: not 1, and no multiple of 16."""


def jit(function: Callable[..., Any]) -> Any:
    """As @triton.jit, for a function that is launched; what only kernels call takes @triton.jit itself.

    It is launched as function[grid](*arguments, **constants): pointers, numbers and NamedTuples of them by position,
    and what is annotated tl.constexpr, the last parameters, by name. Triton specialises on no integer that parameter.py
    calls Varying; one that does not fit 32 bits is refused, unless it is a Stride.
    """
    return InterpretedKernel(function) if triton.knobs.runtime.interpret else Kernel(function)


class _Parameters:
    """What a kernel's parameters are, but for its constants."""

    def __init__(self, kernel: Any) -> None:
        self.kinds = [(name, kind) for name, kind in kinds_of(kernel).items() if kind != "tl.constexpr"]
        self.groups = [i for i, (_, kind) in reversed([*enumerate(self.kinds)]) if isinstance(kind, tuple)]
        """Places of NamedTuples, the last one first."""
        self.each = each_of(self.kinds)
        self.pointers = self._picker("Pointer", "Pointers")
        self.specialised = self._picker("Size", "Stride", "Strides")
        self.bounded = self._picker("Varying", "Size")
        self.family = kernel.fn.__module__.removeprefix("fasttfm.kernels.")

    def _picker(self, *kinds: str) -> Callable[[Sequence], tuple]:
        """flat arguments -> those whose kind ends so."""
        indices = [i for i, (_, kind) in enumerate(self.each) if kind.endswith(kinds)]
        if len(indices) > 1:
            return itemgetter(*indices)
        return lambda arguments: tuple([arguments[index] for index in indices])

    def flat(self, arguments: tuple) -> list:
        """The arguments with what a NamedTuple holds in its place."""
        values = list(arguments)
        for index in self.groups:
            values[index : index + 1] = values[index]
        return values

    def neutral(self, arguments: tuple) -> list:
        """The arguments with one and the same number for every Varying."""
        return [_neutral(kind, argument) for (_, kind), argument in zip(self.kinds, arguments)]

    def refuse_large(self, values: list) -> None:
        """Raises ValueError for the first of the flat arguments that does not fit 32 bits."""
        bounded = self.bounded(values)
        if not bounded or (max(bounded) <= LARGEST and min(bounded) >= -LARGEST - 1):
            return
        for (name, kind), value in zip(self.each, values):
            if kind in ("Varying", "Size") and not -LARGEST - 1 <= value <= LARGEST:
                reason = f"a kernel takes 32-bit numbers: at most {LARGEST:,}"
                raise ValueError(f"{self.family}: {name} is {value:,}, and {reason}")


def _neutral(kind: Any, argument: Any) -> Any:
    if isinstance(kind, tuple):
        return type(kind)(*map(_neutral, kind, argument))
    if kind == "Varyings":
        return (_NEUTRAL,) * len(argument)
    return _NEUTRAL if kind == "Varying" else argument


class InterpretedKernel(InterpretedFunction):
    """What `jit` makes of a function while Triton interprets kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._parameters = _Parameters(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        run = super().__getitem__(grid)

        def launch(*arguments: Any, **constants: Any) -> None:
            self._parameters.refuse_large(self._parameters.flat(arguments))
            run(*arguments, **constants)

        return launch


class Kernel(JITFunction):
    """What `jit` makes of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._launched: dict[tuple | None, tuple[CompiledKernel, tuple]] = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self._parameters = _Parameters(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            key = self._key(arguments, constants)
            known = self._launched.get(key) or self._compiled(key, grid, arguments, constants)
            if known is not None:
                compiled, values = known
                compiled[(*grid, 1, 1)[:3]](*arguments, *values)

        return launch

    def _compiled(self, key: tuple | None, grid: tuple, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
        """The kernel that Triton compiles, or has compiled, and its constants; None where a hook keeps it from that."""
        compiled = self.run(*self._parameters.neutral(arguments), grid=grid, warmup=True, **constants, **OPTIONS)
        if compiled is None:
            return None
        if not isinstance(compiled, CompiledKernel):  # but a promise of one
            compiled = compiled.result()
        known = compiled, tuple(constants[name] for name in self._constants)
        if key is not None:
            if len(self._launched) >= _REMEMBERED:
                self._launched.clear()
            self._launched[key] = known
        return known

    def _key(self, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
        """All that Triton may compile another kernel for; None where that is more than this looks at."""
        parameters = self._parameters
        values = parameters.flat(arguments)
        parameters.refuse_large(values)
        addresses, device = 0, -1
        key: list[Any] = [*parameters.specialised(values), *constants, *constants.values()]
        for pointer in parameters.pointers(values):
            several = isinstance(pointer, tuple)
            if several:
                key.append(len(pointer))
            for each in pointer if several else (pointer,):
                if each is None:
                    key.append(None)
                else:
                    addresses |= each.data_ptr()
                    key.append(each.dtype)
                    device = each.get_device()
        if addresses % 16:  # Triton wants to know which
            return None
        key.append(device)
        return tuple(key)
