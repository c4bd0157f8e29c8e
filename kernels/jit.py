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
from triton.runtime.jit import JITFunction

OPTIONS = {"enable_fp_fusion": True}
"""a * b + c may become one instruction. Triton 3.9 warns that 3.10 will do so only where it is asked to: kernels would
then run with other instructions and other last bits than those that are tested and held against the budgets."""

_MOST = 4096
"""Compiled kernels that are remembered: batches of ever new lengths have ever new strides."""


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """As @triton.jit, for a function that is launched; what only kernels call takes @triton.jit itself.

    It is launched as function[grid](*arguments, **constants): pointers and numbers by position, and what is annotated
    tl.constexpr, the last parameters, by name.
    """
    if function is None:
        return lambda function: jit(function, do_not_specialize=do_not_specialize)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, do_not_specialize=do_not_specialize)
    return Kernel(function, do_not_specialize)


class Kernel(JITFunction):
    """What `jit` makes of a function."""

    def __init__(self, function: Callable[..., Any], do_not_specialize: Sequence[str]) -> None:
        super().__init__(function, do_not_specialize=do_not_specialize)
        self._launched: dict[tuple, tuple[CompiledKernel, tuple]] = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self._pointers: Callable[[tuple], tuple] | None = None
        self._integers: Callable[[tuple], tuple] | None = None
        self._varying: Callable[[tuple], tuple] = tuple

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
                if len(self._launched) >= _MOST:
                    self._launched.clear()
                self._launched[key] = compiled, tuple(constants[name] for name in self._constants)

        return launch

    def _key(self, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
        """All that Triton may compile another kernel for; None where that is more than this looks at."""
        if self._pointers is None or self._integers is None:
            self._sort(arguments)
        assert self._pointers is not None
        assert self._integers is not None
        addresses = 0
        key: list[Any] = [*self._integers(arguments), *constants, *constants.values()]
        for pointer in self._pointers(arguments):
            if pointer is None:
                key.append(None)
            elif isinstance(pointer, tuple):
                return None
            else:
                addresses |= pointer.data_ptr()
                key.append(pointer.dtype)
        if addresses % 16 or max(self._varying(arguments), default=0) >= 1 << 31:  # Triton wants to know which
            return None
        key.append(arguments[0].get_device())
        return tuple(key)

    def _sort(self, arguments: tuple) -> None:
        """Finds out, at the first launch, which arguments are pointers and which integers count."""
        pointers = [i for i, a in enumerate(arguments) if a is None or isinstance(a, (torch.Tensor, tuple))]
        integers = [i for i, a in enumerate(arguments) if isinstance(a, int)]
        varying = [i for i in integers if self.params[i].do_not_specialize]
        self._varying = _picker(varying)
        self._pointers, self._integers = _picker(pointers), _picker([i for i in integers if i not in varying])


def _picker(places: Sequence[int]) -> Callable[[tuple], tuple]:
    """arguments -> those at the places."""
    if not places:
        return lambda arguments: ()
    if len(places) == 1:
        return lambda arguments: (arguments[places[0]],)
    return itemgetter(*places)
