"""triton.jit with less host time per launch: a Launch looks its compiled kernel up once.

At every launch Triton binds all arguments, computes the specialization of each and formats the constants as a string to
look up the compiled kernel. A Launch does so at its first call only, by a short key: the dtypes of the pointers, the
integers that Triton specializes on, and the constants. On a miss Triton compiles the kernel with one fixed number in
place of every Varying, also inside tuples, where it would otherwise specialize on the value.
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
"""Fuse a * b + c into one instruction. From Triton 3.10 on this is opt-in (3.9 warns); without it kernels would differ
from the tested and budgeted ones in instructions and last bits."""

LARGEST = (1 << 31) - 1
"""Largest integer argument of a kernel, except strides."""

_CACHED = 4096
"""Most cached kernels per function: each new sequence length has new strides."""

_BOUNDED = ("Varying", "VaryingOrNone", "Varyings", "Size")
_OR_NONE = ("VaryingOrNone", "RealOrNone")
_NEUTRAL = 7
"""An integer that Triton does not specialize on: neither 1 nor a multiple of 16."""

_runtime = triton.knobs.runtime


def jit(function: Callable[..., Any]) -> Any:
    """Decorator for kernels that the host launches; functions that only kernels call take @triton.jit.

    Launch as function[grid](*arguments, **constants): pointers, numbers and NamedTuples of them by position, then the
    tl.constexpr parameters by name. Triton does not specialize on an integer annotated Varying (parameter.py). Integers
    must fit 32 bits, except a Stride.
    """
    return InterpretedKernel(function) if triton.knobs.runtime.interpret else Kernel(function)


def _kinds(kernel: Any) -> dict[str, Any]:
    """Return kinds_of() without the constants."""
    return {name: kind for name, kind in kinds_of(kernel).items() if kind not in CONSTANT}


def _key(kernel: Any, arguments: tuple, constants: dict[str, Any]) -> tuple | None:
    """Return the cache key: everything that Triton specializes on, and the device of the first pointer.

    None if an address is not a multiple of 16. Raises ValueError for an integer that does not fit 32 bits.
    """
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
        if kind in _BOUNDED and value is not None:
            for number in value if kind == "Varyings" else (value,):
                if not -LARGEST - 1 <= number <= LARGEST:
                    family = kernel.fn.__module__.removeprefix("fasttfm.kernels.")
                    what = f"{family}: {name} is {number:,}"
                    raise ValueError(f"{what}; kernels take 32-bit integers, at most {LARGEST:,}")
    return None if addresses % 16 else (device, *key, *constants, *constants.values())


def _leaves(kinds: Iterable[tuple[str, Any]], values: Iterable[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and value of each argument, with NamedTuples flattened."""
    for (name, kind), value in zip(kinds, values):
        if isinstance(kind, str):
            yield name, kind, value
        else:
            yield from _leaves(zip(kind._fields, kind), value)


def typed(kind: Any, argument: Any) -> Any:
    """Convert plain tuples to the NamedTuples that the kernel declares."""
    return type(kind)(*map(typed, kind, argument)) if isinstance(kind, tuple) else argument


def _neutral(kind: Any, argument: Any) -> Any:
    """Replace every Varying by _NEUTRAL, and tensor maps by descriptors, for compilation."""
    if isinstance(kind, tuple):
        return type(kind)(*map(_neutral, kind, argument))
    if kind == "Varyings":
        return (_NEUTRAL,) * len(argument)
    if kind == "TensorMap":
        return argument.described()
    return _NEUTRAL if kind == "Varying" or (kind == "VaryingOrNone" and argument is not None) else argument


def starter(run: Any, grid: tuple[int, ...], compiled: Any) -> tuple[Callable[..., Any], tuple, tuple]:
    """Return the C function behind a Triton launcher, and its arguments before and after the stream, without hooks and
    without the last one, the tuple of kernel arguments.

    A launcher allocates scratch memory if the kernel needs any, then calls that C function. The order of arguments
    depends on the vendor and is recorded from a copy of the launcher. A launcher that allocates is returned itself.
    """
    fixed = compiled.function, compiled.packed_metadata, None, None, None
    # scratch memory, also of Triton's sanitizer, is allocated at each launch
    allocates = any(getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"))
    if allocates or not hasattr(run, "launch"):
        return (lambda *all: run(*all[:-1], *all[-1])), grid, fixed
    calls: list[tuple] = []
    copied, stream = copy.copy(run), object()
    copied.launch = lambda *all: calls.append(all)
    copied(*grid, stream, *fixed)
    (order,) = calls
    place = next(n for n, argument in enumerate(order) if argument is stream)
    return run.launch, order[:place], order[place + 1 : -1]


class Launch:
    """A kernel with its grid and constants; calling it with arguments launches it.

    The first call looks up or compiles the kernel; later calls only launch it. So every call must pass the same dtypes,
    sizes and 16-byte alignment, None in the same places, and integers in range. Plain tuples may replace NamedTuples,
    which are slower to construct. Triton's hooks are read at each call. An empty grid launches nothing.
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
        except AttributeError:  # a plain function instead of a HookChain, or None
            hooked = True
        if hooked:
            compiled = self._compiled
            launch_metadata = compiled.launch_metadata(self.grid, stream, *arguments, *self._values)
            fixed = compiled.function, compiled.packed_metadata, launch_metadata, enter, leave
            run(*self.grid, stream, *fixed, *arguments, *self._values)
        else:
            self._start(*self._before, stream, *self._after, (*arguments, *self._values))

    def _first(self, arguments: tuple) -> None:
        kernel = self.kernel
        if 0 in self.grid:
            return
        arguments = tuple(map(typed, kernel.kinds.values(), arguments))
        if triton.knobs.runtime.interpret:
            kernel.start(self.grid, arguments, self.constants)
        elif (cached := kernel.compiled(self.grid, arguments, self.constants)) is not None:
            self._compiled, self._values = compiled, _ = cached
            active = triton.runtime.driver.active
            self._device, self._stream = active.get_current_device(), active.get_current_stream
            run = compiled.run  # loads the kernel
            self._start, self._before, self._after = starter(run, self.grid, compiled)
            self._run = run  # last: other threads launch as soon as it is set
            self(*arguments)


class InterpretedKernel(InterpretedFunction):
    """A kernel decorated with `jit`, run by Triton's interpreter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.kinds = _kinds(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.start(grid, arguments, constants)

    def start(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        """Interpret the kernel. Raises ValueError for an integer that does not fit 32 bits."""
        _key(self, arguments, constants)
        super().__getitem__(grid)(*arguments, **constants)


class Kernel(JITFunction):
    """A kernel decorated with `jit`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._launched: dict[tuple | None, tuple[CompiledKernel, tuple]] = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self.kinds = _kinds(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: Launch(self, grid, constants)(*arguments)

    def compiled(self, grid: tuple, arguments: tuple, constants: dict[str, Any]) -> tuple[CompiledKernel, tuple] | None:
        """Return the compiled kernel, cached or compiled now, and the values of its constants; None if a hook prevents
        compilation. Raises ValueError for an integer that does not fit 32 bits."""
        key = _key(self, arguments, constants)
        if (cached := self._launched.get(key)) is not None:
            return cached
        neutral = map(_neutral, self.kinds.values(), arguments)
        compiled = self.run(*neutral, grid=grid, warmup=True, **constants, **OPTIONS)
        if compiled is None:
            return None
        if not isinstance(compiled, CompiledKernel):  # a future of asynchronous compilation
            compiled = compiled.result()
        cached = compiled, tuple(constants[name] for name in self._constants)
        if key is not None:
            if len(self._launched) >= _CACHED:
                self._launched.clear()
            self._launched[key] = cached
        return cached
