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

_runtime = triton.knobs.runtime


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that is launched, as @triton.jit does; what only kernels call takes @triton.jit itself.

    It is launched as function[grid](*arguments, **constants): pointers, numbers and NamedTuples of them by position,
    and what is annotated tl.constexpr, the last parameters, by name. Triton specialises on no integer that parameter.py
    calls Varying; one that does not fit 32 bits is refused, unless it is a Stride.
    """
    return InterpretedKernel(function) if triton.knobs.runtime.interpret else Kernel(function)


def _kinds(kernel: Any) -> dict[str, Any]:
    """kinds_of() without the constants."""
    return {name: kind for name, kind in kinds_of(kernel).items() if kind != "tl.constexpr"}


def _key_of(kernel: Any) -> Callable[[tuple, dict[str, Any]], tuple | None]:
    """(arguments, constants) -> all that Triton may compile a kernel anew for, the first pointer's device among it;
    None where that is more than this looks at, addresses that do not divide by 16.

    It is written out for the kernel, because every launch asks. Raises ValueError for a number that does not fit.
    """
    kinds = _kinds(kernel)
    leaves = each_of(kinds.items())
    of = {ending: [n for n, _, kind in leaves if kind.endswith(ending)] for ending in ("Pointer", "Pointers")}
    bounded = [(variable, name, kind) for variable, name, kind in leaves if kind in _BOUNDED]
    within = f"{-LARGEST - 1} <= {{}} <= {LARGEST}".format
    fits = [f"({n} is None or {within(n)})" if kind in _OR_NONE else within(n) for n, _, kind in bounded]
    key = [f"{of['Pointer'][0]}.get_device()" if of["Pointer"] else f"{of['Pointers'][0]}[0].get_device()"]
    key += [n for n, _, kind in leaves if kind in ("Size", "Stride", "Strides")]
    key += [f"{n} is None" for n, _, kind in leaves if kind in _OR_NONE]
    key += [f"None if {n} is None else {n}.dtype" for n in of["Pointer"]]
    lines = [
        f"{', '.join(_target(*each) for each in kinds.items())}, = arguments",
        f"if not ({' and '.join(fits) or True}): refuse([{', '.join(f'({name!r}, {n})' for n, name, _ in bounded)}])",
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
    lines += ["if addresses % 16: return None", f"return ({', '.join(key)}, *several, *constants, *constants.values())"]

    def refuse(numbers: list[tuple[str, int | None]]) -> None:
        name, value = next((n, v) for n, v in numbers if v is not None and not -LARGEST - 1 <= v <= LARGEST)
        family = kernel.fn.__module__.removeprefix("fasttfm.kernels.")
        raise ValueError(f"{family}: {name} is {value:,}, and a kernel takes 32-bit numbers: at most {LARGEST:,}")

    scope: dict[str, Any] = {"refuse": refuse}
    exec("def key(arguments, constants):\n    " + "\n    ".join(lines), scope)
    return scope["key"]


def _target(name: str, kind: Any) -> str:
    """Left side of the assignment to the variables that each_of() names."""
    if isinstance(kind, str):
        return name
    return f"({', '.join(_target(f'{name}_{field}', each) for field, each in zip(kind._fields, kind))},)"


def _typed(kind: Any, argument: Any) -> Any:
    """The argument with NamedTuples where a kernel declares them."""
    return type(kind)(*map(_typed, kind, argument)) if isinstance(kind, tuple) else argument


def _neutral(kind: Any, argument: Any) -> Any:
    """The argument with one and the same number for every Varying."""
    if isinstance(kind, tuple):
        return type(kind)(*map(_neutral, kind, argument))
    if kind == "Varyings":
        return (_NEUTRAL,) * len(argument)
    return _NEUTRAL if kind == "Varying" or (kind == "VaryingOrNone" and argument is not None) else argument


class Launch:
    """A kernel at one grid with its constants: what a call starts with its arguments.

    The first call has Triton compile the kernel, for arguments like these; later ones look nothing up. So every call
    must give arguments of the same dtypes, alignment to 16 bytes and sizes, None in the same places, and numbers that
    fit. A plain tuple does for a NamedTuple, which Python makes more slowly. Triton's hooks are read at each call.
    """

    __slots__ = (
        "_compiled",
        "_device",
        "_function",
        "_packed",
        "_run",
        "_stream",
        "_values",
        "constants",
        "grid",
        "kernel",
    )

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.constants = kernel, (*grid, 1, 1)[:3], constants
        self._run: Any = None

    def __call__(self, *arguments: Any) -> None:
        run = self._run
        if run is None:
            self._first(arguments)
            return
        stream = self._stream(self._device)
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        if enter.calls or leave.calls:
            told = self._compiled.launch_metadata(self.grid, stream, *arguments, *self._values)
            run(*self.grid, stream, self._function, self._packed, told, enter, leave, *arguments, *self._values)
        else:
            run(*self.grid, stream, self._function, self._packed, None, None, None, *arguments, *self._values)

    def _first(self, arguments: tuple) -> None:
        kernel = self.kernel
        arguments = tuple(map(_typed, _kinds(kernel).values(), arguments))
        if triton.knobs.runtime.interpret:
            kernel.start(self.grid, arguments, self.constants)
        elif (known := kernel.compiled(self.grid, arguments, self.constants)) is not None:
            self._compiled, self._values = compiled, _ = known
            self._function, self._packed = compiled.function, compiled.packed_metadata
            active = triton.runtime.driver.active
            self._device, self._stream = active.get_current_device(), active.get_current_stream
            self._run = compiled.run  # last: another thread that sees it reads the rest
            self(*arguments)


class InterpretedKernel(InterpretedFunction):
    """Result of `jit` while Triton interprets kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._key = _key_of(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.start(grid, arguments, constants)

    def start(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        """Interpret the kernel. Raises ValueError for a number that does not fit."""
        self._key(arguments, constants)
        super().__getitem__(grid)(*arguments, **constants)


class Kernel(JITFunction):
    """Result of `jit`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._launched: dict[tuple | None, tuple[CompiledKernel, tuple]] = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self._key = _key_of(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: Launch(self, grid, constants)(*arguments)

    def compiled(self, grid: tuple, arguments: tuple, constants: dict[str, Any]) -> tuple[CompiledKernel, tuple] | None:
        """The kernel that Triton compiles, or has compiled, for arguments like these, and the values of its constants;
        None where a hook keeps it from that. Raises ValueError for a number that does not fit."""
        key = self._key(arguments, constants)
        if (known := self._launched.get(key)) is not None:
            return known
        neutral = map(_neutral, _kinds(self).values(), arguments)
        compiled = self.run(*neutral, grid=grid, warmup=True, **constants, **OPTIONS)
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
