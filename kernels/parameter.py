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
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


class _Kind:
    """Type that an annotation names while a kernel compiles."""

    __triton_builtin__ = True  # a kernel may name no other global of Python's


Pointer: Any = _Kind()  # to elements of the dtype that the call computes from
ResidualPointer: Any = _Kind()  # to elements of the residual stream's dtype, which may be another
ParameterPointer: Any = _Kind()  # to elements of the dtype of a model's parameters, float32 as a rule
MaskPointer: Any = _Kind()  # to uint8 (not zero: may attend) or to the call's dtype (added to the scores)
Float32Pointer: Any = _Kind()
Int64Pointer: Any = _Kind()
Int32Pointer: Any = _Kind()
Int8Pointer: Any = _Kind()
BoolPointer: Any = _Kind()
Pointers: Any = _Kind()  # a tuple of Pointer
TensorMap: Any = _Kind()  # of elements of the call's dtype: a tensor_map.Mapped
Int64Pointers: Any = _Kind()  # a tuple of Int64Pointer, each of which may be None
Size: Any = _Kind()  # a whole number of a model, mostly a multiple of 16: Triton compiles a kernel of its own for it
Stride: Any = _Kind()  # elements between neighbours, likewise; may need 64 bits
Strides: Any = _Kind()  # a tuple of such, or of such tuples
# A whole number that changes from batch to batch or layer to layer. Triton would compile a kernel anew whenever it
# becomes 1 or a multiple of 16, and knowing that would make it no faster.
Varying: Any = _Kind()
Varyings: Any = _Kind()  # a tuple of such, of any length
Real: Any = _Kind()  # a Python float
VaryingOrNone: Any = _Kind()  # None: Triton compiles a kernel without what needs it
RealOrNone: Any = _Kind()

CONSTANT = ("tl.constexpr", "gl.constexpr")
"""What a parameter that is no argument is annotated."""


class Shape(NamedTuple):
    """The shape of a matrix."""

    M: Varying
    N: Size


def kinds_of(kernel: Any) -> dict[str, Any]:
    """Parameter -> the name of its annotation, for those that have one; for a NamedTuple one that holds those names.

    Raises TypeError where Python has read the annotations.
    """
    function = getattr(kernel, "fn", kernel)
    if not all(isinstance(kind, str) for kind in function.__annotations__.values()):
        raise TypeError(f"{function.__module__}: a kernel's file needs `from __future__ import annotations`")
    return {name: _kind(kind, function.__globals__) for name, kind in function.__annotations__.items()}


def _kind(name: str, scope: dict[str, Any]) -> Any:
    group = scope.get(name)
    if not (isinstance(group, type) and issubclass(group, tuple)):
        return name
    within = vars(sys.modules[group.__module__])
    return group(*(_kind(kind.__forward_arg__, within) for kind in group.__annotations__.values()))


def each_of(kinds: Iterable[tuple[str, Any]], within: str = "") -> list[tuple[str, str, str]]:
    """(path, name, kind) of parameters, with those of its fields in place of a NamedTuple's: shape_M, M, Varying."""
    leaves = []
    for name, kind in kinds:
        path = f"{within}{name}"
        leaves += [(path, name, kind)] if isinstance(kind, str) else each_of(zip(kind._fields, kind), f"{path}_")
    return leaves
