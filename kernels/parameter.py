"""Types of a kernel's parameters, said where they are declared:

    class Shape(NamedTuple):
        M: Varying
        N: Size

    @jit
    def _forward(
        x: Pointer,  # (M, N)
        mean: Float32Pointer,  # (M,) out
        dropout: Dropout,
        shape: Shape,
        ROWS: tl.constexpr,
    ):

What is one thing is one parameter: a NamedTuple whose fields are declared likewise, or are such tuples. jit.py reads
here which integers Triton must not specialise on and which must fit 32 bits, proof/compile_case.py what the compile
matrix compiles a kernel for. To Triton and to a type checker these annotations mean nothing. They are read by name, so
that a kernel file needs `from __future__ import annotations`.

    Pointer           to elements of the dtype that the call computes from
    ResidualPointer   to elements of the residual stream's dtype, which may be another
    ParameterPointer  to elements of the dtype of a model's parameters, float32 as a rule
    MaskPointer       to uint8 (not zero: may attend) or to elements of the call's dtype (added to the scores)
    Float32Pointer, Int64Pointer, Int32Pointer, Int8Pointer
    Pointers, Int64Pointers  tuples of such; each of the latter may be None
    Size              a whole number of a model, most often a multiple of 16: Triton compiles a kernel of its own for it
    Stride            elements between neighbours, likewise; may need 64 bits
    Strides           a tuple of such, or of such tuples
    Varying           a whole number that changes from batch to batch or layer to layer. Triton would compile a kernel
                      anew whenever it becomes 1 or a multiple of 16, and knowing that would make it no faster
    Varyings          a tuple of such, of any length
    Real              a Python float
    VaryingOrNone, RealOrNone  or None, for which Triton compiles a kernel without what needs it
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias


class _Kind:
    """Type that an annotation names while a kernel compiles."""

    __triton_builtin__ = True  # a kernel may name no other global of Python's


if TYPE_CHECKING:
    Pointer: TypeAlias = Any
    ResidualPointer: TypeAlias = Any
    ParameterPointer: TypeAlias = Any
    Float32Pointer: TypeAlias = Any
    Int64Pointer: TypeAlias = Any
    Int32Pointer: TypeAlias = Any
    Int8Pointer: TypeAlias = Any
    Int64Pointers: TypeAlias = Any
    Pointers: TypeAlias = Any
    Varyings: TypeAlias = Any
    Size: TypeAlias = Any
    Stride: TypeAlias = Any
    Strides: TypeAlias = Any
    Varying: TypeAlias = Any
    Real: TypeAlias = Any
    VaryingOrNone: TypeAlias = Any
    RealOrNone: TypeAlias = Any
    MaskPointer: TypeAlias = Any
else:
    Pointer = ResidualPointer = ParameterPointer = MaskPointer = _Kind()
    Float32Pointer = Int64Pointer = Int32Pointer = Int8Pointer = Pointers = Int64Pointers = _Kind()
    Size = Stride = Strides = Varying = Varyings = Real = VaryingOrNone = RealOrNone = _Kind()


class Shape(NamedTuple):
    """The shape of a matrix."""

    M: Varying
    N: Size


def kinds_of(kernel: Any) -> dict[str, Any]:
    """Parameter -> the name of its annotation, for those that have one; for a NamedTuple one that holds those names."""
    function = getattr(kernel, "fn", kernel)
    return {name: _kind(str(kind), function.__globals__) for name, kind in function.__annotations__.items()}


def _kind(name: str, scope: dict[str, Any]) -> Any:
    group = scope.get(name)
    if not (isinstance(group, type) and issubclass(group, tuple)):
        return name
    within = vars(sys.modules[group.__module__])
    return group(*(_kind(kind.__forward_arg__, within) for kind in group.__annotations__.values()))


def each_of(kinds: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(name, kind) of parameters, with those of its fields in place of a NamedTuple's."""
    return [
        leaf
        for name, kind in kinds
        for leaf in ([(name, kind)] if isinstance(kind, str) else each_of(zip(kind._fields, kind)))
    ]
