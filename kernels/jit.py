"""triton.jit for kernels that are launched: the same kernel, found again in less of the host's time.

At every launch Triton binds all arguments, asks of each what it specialises on and writes the constants out as text to
look the compiled kernel up. Here the key is a tuple of what decides: the pointers' dtypes, the integers that Triton
specialises on as they are, and the constants. Whatever that does not cover goes Triton's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from fasttfm.kernels.parameter import kinds_of

OPTIONS = {"enable_fp_fusion": True}
"""a * b + c may become one instruction. Triton 3.9 warns that 3.10 will do so only where it is asked to: kernels would
then run with other instructions and other last bits than those that are tested and held against the budgets."""

LARGEST = (1 << 31) - 1
"""Largest whole number that a kernel takes, but for strides."""

_REMEMBERED = 4096
"""Compiled kernels that are remembered: batches of ever new lengths have ever new strides."""


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """As @triton.jit, for a function that is launched; what only kernels call takes @triton.jit itself.

    It is launched as function[grid](*arguments, **constants): pointers and numbers by position, and what is annotated
    tl.constexpr, the last parameters, by name. Triton specialises on no integer that parameter.py calls Varying; one
    that does not fit 32 bits is refused, unless it is a Stride.
    """
    if function is None:
        return lambda function: jit(function, do_not_specialize=do_not_specialize)
    varying = [*do_not_specialize, *(name for name, kind in kinds_of(function).items() if kind == "Varying")]
    if triton.knobs.runtime.interpret:
        return InterpretedKernel(function, do_not_specialize=varying)
    return Kernel(function, varying)


class InterpretedKernel(InterpretedFunction):
    """What `jit` makes of a function while Triton interprets kernels."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._counts = _counts(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        run = super().__getitem__(grid)

        def launch(*arguments: Any, **constants: Any) -> None:
            refuse_large(self, arguments, self._counts)
            run(*arguments, **constants)

        return launch


class Kernel(JITFunction):
    """What `jit` makes of a function."""

    def __init__(self, function: Callable[..., Any], do_not_specialize: Sequence[str]) -> None:
        super().__init__(function, do_not_specialize=do_not_specialize)
        self._launched: dict[tuple | None, tuple[CompiledKernel, tuple]] = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self._counts = _counts(self)
        self._pointers: Callable[[tuple], tuple] | None = None
        self._integers: Callable[[tuple], tuple] | None = None
        self._bounded: Callable[[tuple], tuple] = tuple

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            key = self._key(arguments, constants)
            known = self._launched.get(key)
            if known is not None:
                compiled, values = known
                compiled[(*grid, 1, 1)[:3]](*arguments, *values)
                return
            compiled = self.run(*arguments, grid=grid, warmup=False, **constants, **OPTIONS)
            if key is not None and isinstance(compiled, CompiledKernel):  # and not a promise of one
                if len(self._launched) >= _REMEMBERED:
                    self._launched.clear()
                self._launched[key] = compiled, tuple(constants[name] for name in self._constants)

        return launch

    def _key(self, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
        """All that Triton may compile another kernel for; None where that is more than this looks at."""
        if self._pointers is None or self._integers is None:
            self._sort(arguments)
        assert self._pointers is not None
        assert self._integers is not None
        addresses, device = 0, -1
        key: list[Any] = [*self._integers(arguments), *constants, *constants.values()]
        for pointer in self._pointers(arguments):
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
        bounded = self._bounded(arguments)
        if bounded and (max(bounded) > LARGEST or min(bounded) < -LARGEST - 1):
            refuse_large(self, arguments, self._counts)
            return None
        if addresses % 16:  # Triton wants to know which
            return None
        key.append(device)
        return tuple(key)

    def _sort(self, arguments: tuple) -> None:
        """Finds out, at the first launch, which arguments are pointers and which integers count, tuples of them too."""
        kinds = kinds_of(self)
        pointers, integers, varying = [], [], []
        for index, (name, argument) in enumerate(zip(self.arg_names, arguments)):
            first = _first(argument)
            if first is None or isinstance(first, torch.Tensor):
                pointers.append(index)
            elif self.params[index].do_not_specialize or kinds.get(name) == "Varyings":
                if isinstance(argument, int):  # what a tuple holds is for the launch function to look at
                    varying.append(index)
            elif isinstance(first, int):
                integers.append(index)
        self._bounded = _picker(sorted({*varying, *self._counts}))
        self._pointers, self._integers = _picker(pointers), _picker(integers)


def _first(argument: Any) -> Any:
    """The argument, or the first thing in a tuple of such."""
    while isinstance(argument, tuple) and argument:
        argument = argument[0]
    return argument


def _counts(kernel: Any) -> list[int]:
    """Places of the whole numbers that must fit 32 bits."""
    kinds = kinds_of(kernel)
    return [index for index, name in enumerate(kernel.arg_names) if kinds.get(name) in ("Varying", "Size")]


def refuse_large(kernel: Any, arguments: Sequence[Any], indices: Sequence[int]) -> None:
    """Raises ValueError for the first argument at the places that does not fit."""
    for index in indices:
        name, value = kernel.arg_names[index], arguments[index]
        if not -LARGEST - 1 <= value <= LARGEST:
            family = kernel.fn.__module__.removeprefix("fasttfm.kernels.")
            raise ValueError(f"{family}: {name} is {value:,}, and a kernel takes 32-bit numbers: at most {LARGEST:,}")


def _picker(indices: Sequence[int]) -> Callable[[tuple], tuple]:
    """arguments -> those at the places."""
    if not indices:
        return lambda arguments: ()
    if len(indices) == 1:
        return lambda arguments: (arguments[indices[0]],)
    return itemgetter(*indices)
