"""triton.jit for kernels that are launched: the same kernel, found again in less of the host's time.

At every launch Triton binds all arguments, asks of each what it specialises on and writes the constants out as text to
look the compiled kernel up. Here a launch is a value that is made once and asks nothing when it is called. The first
call looks for the kernel by what decides: the pointers' dtypes, the integers that Triton specialises on as they are,
and the constants. Triton itself is only asked for what is not found so: it compiles for the same arguments with one and
the same number for every Varying, also in tuples, where Triton would otherwise specialise on whatever it sees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import triton
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from fasttfm.kernels.parameter import CONSTANT, kinds_of

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
    return {name: kind for name, kind in kinds_of(kernel).items() if kind not in CONSTANT}


def _key(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
    """All that Triton may compile a kernel anew for, the first pointer's device among it; None where that is more than
    this looks at, addresses that do not divide by 16. Raises ValueError for a number that does not fit."""
    key: list[Any] = []
    addresses, device = 0, None
    for name, kind, value in _leaves(kernel.kinds.items(), arguments):
        if kind.endswith(("Pointer", "Pointers")):
            pointers = value if kind.endswith("s") else (value,)
            key.append(tuple([None if x is None else x.dtype for x in pointers]))
            for x in pointers:
                if x is not None:
                    addresses |= x.data_ptr()
                    device = x.get_device() if device is None else device
        elif kind == "TensorMap":
            key.append((value.base.dtype, value.block))
            addresses |= value.base.data_ptr()
            device = value.base.get_device() if device is None else device
        elif kind in ("Size", "Stride", "Strides"):
            key.append(value)
        elif kind in _OR_NONE:
            key.append(value is None)
        if kind in _BOUNDED and value is not None and not -LARGEST - 1 <= value <= LARGEST:
            family = kernel.fn.__module__.removeprefix("fasttfm.kernels.")
            raise ValueError(f"{family}: {name} is {value:,}, and a kernel takes 32-bit numbers: at most {LARGEST:,}")
    return None if addresses % 16 else (device, *key, *constants, *constants.values())


def _leaves(kinds: Iterable[tuple[str, Any]], values: Iterable[Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and value of each argument, with those of its fields in place of a NamedTuple's."""
    for (name, kind), value in zip(kinds, values):
        if isinstance(kind, str):
            yield name, kind, value
        else:
            yield from _leaves(zip(kind._fields, kind), value)


def _typed(kind: Any, argument: Any) -> Any:
    """The argument with NamedTuples where a kernel declares them."""
    return type(kind)(*map(_typed, kind, argument)) if isinstance(kind, tuple) else argument


def _neutral(kind: Any, argument: Any) -> Any:
    """The argument as Triton compiles for it: with one and the same number for every Varying."""
    if isinstance(kind, tuple):
        return type(kind)(*map(_neutral, kind, argument))
    if kind == "Varyings":
        return (_NEUTRAL,) * len(argument)
    if kind == "TensorMap":
        return argument.described()
    return _NEUTRAL if kind == "Varying" or (kind == "VaryingOrNone" and argument is not None) else argument


def starter(run: Any, grid: tuple[int, ...], compiled: Any) -> tuple[Callable[..., Any], tuple, tuple]:
    """The function of C in which a launcher of Triton ends, and what it is given before the stream and after it, the
    tuple of the kernel's arguments last; without hooks.

    A launcher allocates scratch memory, where a kernel needs any, and hands everything to that function, in an order of
    its own for each vendor. A copy of it shows the order. Without such a function the launcher itself is started.
    """
    given = compiled.function, compiled.packed_metadata, None, None, None
    # memory for scratch, and for Triton's sanitizer, is another one at each launch
    own = any(getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"))
    if own or not hasattr(run, "launch"):
        return (lambda *all: run(*all[:-1], *all[-1])), grid, given
    shown: list[tuple] = []
    copied, stream = copy.copy(run), object()
    copied.launch = lambda *all: shown.append(all)
    copied(*grid, stream, *given)
    (order,) = shown
    place = next(n for n, each in enumerate(order) if each is stream)
    return run.launch, order[:place], order[place + 1 : -1]


class Launch:
    """A kernel at one grid with its constants: what a call starts with its arguments.

    The first call has Triton compile the kernel, for arguments like these; later ones look nothing up. So every call
    must give arguments of the same dtypes, alignment to 16 bytes and sizes, None in the same places, and numbers that
    fit. A plain tuple does for a NamedTuple, which Python makes more slowly. Triton's hooks are read at each call.
    Where the grid is of no program, nothing is started.
    """

    __slots__ = (
        "_after", "_before", "_compiled", "_device", "_run", "_start", "_stream", "_values", "constants", "grid",
        "kernel"
    )  # fmt: skip

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
        try:
            hooked = enter.calls or leave.calls
        except AttributeError:  # a function in place of a chain of them, or None
            hooked = True
        if hooked:
            compiled = self._compiled
            told = compiled.launch_metadata(self.grid, stream, *arguments, *self._values)
            given = compiled.function, compiled.packed_metadata, told, enter, leave, *arguments, *self._values
            run(*self.grid, stream, *given)
        else:
            self._start(*self._before, stream, *self._after, (*arguments, *self._values))

    def _first(self, arguments: tuple) -> None:
        kernel = self.kernel
        if 0 in self.grid:
            return
        arguments = tuple(map(_typed, kernel.kinds.values(), arguments))
        if triton.knobs.runtime.interpret:
            kernel.start(self.grid, arguments, self.constants)
        elif (known := kernel.compiled(self.grid, arguments, self.constants)) is not None:
            self._compiled, self._values = compiled, _ = known
            active = triton.runtime.driver.active
            self._device, self._stream = active.get_current_device(), active.get_current_stream
            run = compiled.run  # which loads the kernel
            self._start, self._before, self._after = starter(run, self.grid, compiled)
            self._run = run  # last: another thread launches as soon as it sees it
            self(*arguments)


class InterpretedKernel(InterpretedFunction):
    """Result of `jit` while Triton interprets kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.kinds = _kinds(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.start(grid, arguments, constants)

    def start(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        """Interpret the kernel. Raises ValueError for a number that does not fit."""
        _key(self, arguments, constants)
        super().__getitem__(grid)(*arguments, **constants)


class Kernel(JITFunction):
    """Result of `jit`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._launched: dict[tuple | None, tuple[CompiledKernel, tuple]] = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self.kinds = _kinds(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: Launch(self, grid, constants)(*arguments)

    def compiled(self, grid: tuple, arguments: tuple, constants: dict[str, Any]) -> tuple[CompiledKernel, tuple] | None:
        """The kernel that Triton compiles, or has compiled, for arguments like these, and the values of its constants;
        None where a hook keeps it from that. Raises ValueError for a number that does not fit."""
        key = _key(self, arguments, constants)
        if (known := self._launched.get(key)) is not None:
            return known
        neutral = map(_neutral, self.kinds.values(), arguments)
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
