"""triton.jit for kernels that are launched: the same kernel, found again in less of the host's time.

At every launch Triton binds all arguments, asks of each what it specialises on and writes the constants out as text to
look the compiled kernel up. Here the key is a tuple of what decides: the pointers' dtypes, the integers that Triton
specialises on as they are, and the constants. Triton itself is only asked for what the key does not know: it compiles
for the same arguments with one and the same number for every Varying, also in tuples, where Triton would otherwise
specialise on whatever it sees.
"""

from __future__ import annotations

from collections.abc import Callable
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

_BOUNDED = ("Varying", "VaryingOrNone", "Size")
_OR_NONE = ("VaryingOrNone", "RealOrNone")
_NEUTRAL = 7
"""A number that Triton does not specialise on: not 1, and no multiple of 16."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that is launched, as @triton.jit does; what only kernels call takes @triton.jit itself.

    It is launched as function[grid](*arguments, **constants): pointers, numbers and NamedTuples of them by position,
    and what is annotated tl.constexpr, the last parameters, by name. Triton specialises on no integer that parameter.py
    calls Varying; one that does not fit 32 bits is refused, unless it is a Stride.
    """
    return InterpretedKernel(function) if triton.knobs.runtime.interpret else Kernel(function)


class _Parameters:
    """Parameters of a kernel, but for its constants."""

    def __init__(self, kernel: Any) -> None:
        self.kinds = [(name, kind) for name, kind in kinds_of(kernel).items() if kind != "tl.constexpr"]
        self.family = kernel.fn.__module__.removeprefix("fasttfm.kernels.")

    def key(self) -> Callable[[tuple, dict[str, Any]], tuple | None]:
        """(arguments, constants) -> all that Triton may compile another kernel for, the first pointer's device among
        it; None where that is more than this looks at, addresses that do not divide by 16. Raises as refuse_large().

        It is written out for the kernel, because every launch asks.
        """
        leaves = [leaf for name, kind in self.kinds for leaf in _variables(name, kind)]
        of = {ending: [name for name, kind in leaves if kind.endswith(ending)] for ending in ("Pointer", "Pointers")}
        within = {n: f"{-LARGEST - 1} <= {n} <= {LARGEST}" for n, kind in leaves if kind in _BOUNDED}
        within |= {n: f"({n} is None or {within[n]})" for n, kind in leaves if kind == "VaryingOrNone"}
        bounded = " and ".join(within.values()) or True
        key = [f"{of['Pointer'][0]}.get_device()" if of["Pointer"] else f"{of['Pointers'][0]}[0].get_device()"]
        key += [name for name, kind in leaves if kind in ("Size", "Stride", "Strides")]
        key += [f"{name} is None" for name, kind in leaves if kind in _OR_NONE]
        key += [f"None if {name} is None else {name}.dtype" for name in of["Pointer"]]
        lines = [
            f"{', '.join(_target(*each) for each in self.kinds)}, = arguments",
            f"if not ({bounded}): refuse(arguments)",
            f"addresses = {' | '.join(f'(0 if {n} is None else {n}.data_ptr())' for n in of['Pointer']) or 0}",
            "several = []",
        ]
        for name in of["Pointers"]:
            lines += [
                f"several.append(len({name}))",
                f"for pointer in {name}:",
                "    several.append(None if pointer is None else pointer.dtype)",
                "    if pointer is not None: addresses |= pointer.data_ptr()",
            ]
        lines += [
            "if addresses % 16: return None",
            f"return ({', '.join(key)}, *several, *constants, *constants.values())",
        ]
        scope: dict[str, Any] = {"refuse": self.refuse_large}
        exec("def key(arguments, constants):\n    " + "\n    ".join(lines), scope)
        return scope["key"]

    def neutral(self, arguments: tuple) -> list:
        """The arguments with one and the same number for every Varying."""
        return [_neutral(kind, argument) for (_, kind), argument in zip(self.kinds, arguments)]

    def refuse_large(self, arguments: tuple) -> None:
        """Raises ValueError for the first argument, or field of one, that does not fit 32 bits."""
        values = [leaf for (_, kind), argument in zip(self.kinds, arguments) for leaf in _leaves(kind, argument)]
        for (name, kind), value in zip(each_of(self.kinds), values):
            if kind in _BOUNDED and value is not None and not -LARGEST - 1 <= value <= LARGEST:
                reason = f"a kernel takes 32-bit numbers: at most {LARGEST:,}"
                raise ValueError(f"{self.family}: {name} is {value:,}, and {reason}")


def _variables(name: str, kind: Any) -> list[tuple[str, str]]:
    """(variable, kind) of a parameter, or of each field of a NamedTuple."""
    if isinstance(kind, str):
        return [(name, kind)]
    return [leaf for field, each in zip(kind._fields, kind) for leaf in _variables(f"{name}_{field}", each)]


def _target(name: str, kind: Any) -> str:
    """Left side of the assignment to the variables."""
    if isinstance(kind, str):
        return name
    return f"({', '.join(_target(f'{name}_{field}', each) for field, each in zip(kind._fields, kind))},)"


def _leaves(kind: Any, argument: Any) -> list:
    """The argument, or the leaves of each field of a NamedTuple."""
    return [argument] if isinstance(kind, str) else [leaf for pair in zip(kind, argument) for leaf in _leaves(*pair)]


def _neutral(kind: Any, argument: Any) -> Any:
    if isinstance(kind, tuple):
        return type(kind)(*map(_neutral, kind, argument))
    if kind == "Varyings":
        return (_NEUTRAL,) * len(argument)
    return _NEUTRAL if kind == "Varying" or (kind == "VaryingOrNone" and argument is not None) else argument


class InterpretedKernel(InterpretedFunction):
    """Result of `jit` while Triton interprets kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._parameters = _Parameters(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        run = super().__getitem__(grid)

        def launch(*arguments: Any, **constants: Any) -> None:
            self._parameters.refuse_large(arguments)
            run(*arguments, **constants)

        return launch


class Kernel(JITFunction):
    """Result of `jit`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._launched: dict[tuple | None, tuple[CompiledKernel, tuple]] = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self._parameters = _Parameters(self)
        self._key = self._parameters.key()

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
