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

What is one thing is one parameter: a NamedTuple whose fields are declared likewise. jit.py reads here which integers
Triton must not specialise on and which must fit 32 bits, compile_case.py what the compile matrix compiles a kernel for.
To Triton and to a type checker these annotations mean nothing. They are read by name, so that a kernel file needs
`from __future__ import annotations`.
"""

from __future__ import annotations

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
    Pointer = _Kind()
    """To elements of the dtype that the call computes from."""
    ResidualPointer = _Kind()
    """To elements of the residual stream's dtype, which may be another."""
    ParameterPointer = _Kind()
    """To elements of the dtype of a model's parameters, float32 as a rule."""
    Float32Pointer = _Kind()
    Int64Pointer = _Kind()
    Int64Pointers = _Kind()
    """A tuple of such, of which each may be None."""
    Int32Pointer = _Kind()
    Int8Pointer = _Kind()
    MaskPointer = _Kind()
    """To uint8 (not zero: may attend) or to elements of the call's dtype (added to the scores)."""
    Pointers = _Kind()
    """A tuple of pointers."""
    Varyings = _Kind()
    """A tuple of such, of any length."""
    Size = _Kind()
    """A whole number of a model, most often a multiple of 16, for which Triton compiles a kernel of its own."""
    Stride = _Kind()
    """Elements between neighbours, likewise; may need 64 bits."""
    Strides = _Kind()
    """A tuple of such, or of such tuples."""
    Varying = _Kind()
    """A whole number that changes from batch to batch or layer to layer. Triton would compile a kernel anew whenever it
    becomes 1 or a multiple of 16, and knowing that would make it no faster."""
    Real = _Kind()
    """A Python float."""
    VaryingOrNone = _Kind()
    RealOrNone = _Kind()
    """Such a number, or None, for which Triton compiles a kernel without what needs it."""

NOTATION = {
    "Pointer": "*{dtype}",
    "ResidualPointer": "*{residual}",
    "ParameterPointer": "*{parameter}",
    "Float32Pointer": "*fp32",
    "Int64Pointer": "*i64",
    "Int32Pointer": "*i32",
    "Int8Pointer": "*i8",
    "Size": "i32:16",
    "Stride": "i32:16",
    "Varying": "i32",
    "Real": "fp32",
    "VaryingOrNone": "i32",
    "RealOrNone": "fp32",
}
"""How compile_case.py writes an argument for such a parameter."""


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
    return group(*(kind.__forward_arg__ for kind in group.__annotations__.values()))


def each_of(kinds: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(name, kind) of parameters, with those of its fields in place of a NamedTuple's."""
    return [
        leaf for name, kind in kinds for leaf in ([(name, kind)] if isinstance(kind, str) else zip(kind._fields, kind))
    ]
