"""Types of kernel parameters, declared by annotations:

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

Related arguments form one parameter: a NamedTuple with annotated fields, which may be NamedTuples too. From the
annotations, jit.py decides which integers Triton must not specialize on and which must fit 32 bits, and
proof/compile_case.py which arguments the compile matrix uses. Triton and type checkers ignore them. They are read by
name, so kernel files need `from __future__ import annotations`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


class _Kind:
    """Placeholder value of an annotation's name."""

    __triton_builtin__ = True  # lets Triton accept it as a global of a kernel


Pointer: Any = _Kind()  # to elements of the dtype of the call
ResidualPointer: Any = _Kind()  # to elements of the dtype of the residual stream
ParameterPointer: Any = _Kind()  # to elements of the dtype of the parameters, usually float32
MaskPointer: Any = _Kind()  # to uint8 (nonzero: may attend) or to the dtype of the call (added to the scores)
Float32Pointer: Any = _Kind()
Int64Pointer: Any = _Kind()
Int32Pointer: Any = _Kind()
Int8Pointer: Any = _Kind()
BoolPointer: Any = _Kind()
Pointers: Any = _Kind()  # a tuple of Pointer
TensorMap: Any = _Kind()  # a tensor_map.Mapped of the dtype of the call
Int64Pointers: Any = _Kind()  # a tuple of Int64Pointer or None
Size: Any = _Kind()  # a dimension of the model, usually a multiple of 16: Triton specializes on it
Stride: Any = _Kind()  # a stride in elements, specialized like Size; may need 64 bits
Strides: Any = _Kind()  # a tuple of Stride, or of such tuples
# An integer that changes between batches or layers. Specialized, the kernel would be recompiled when it becomes 1 or a
# multiple of 16, and be no faster.
Varying: Any = _Kind()
Varyings: Any = _Kind()  # a tuple of Varying, of any length
Real: Any = _Kind()  # a Python float
VaryingOrNone: Any = _Kind()  # None: Triton compiles the kernel without the code that needs it
RealOrNone: Any = _Kind()

CONSTANT = ("tl.constexpr", "gl.constexpr")
"""Annotations of compile-time constants."""


class Shape(NamedTuple):
    """The shape of a matrix."""

    M: Varying
    N: Size


def kinds_of(kernel: Any) -> dict[str, Any]:
    """Return annotated parameter -> name of its annotation; for a NamedTuple, an instance with the names as fields.

    Raises TypeError if the annotations have been evaluated.
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
    """Return (path, name, kind) of parameters, with NamedTuples flattened: shape_M, M, Varying."""
    leaves = []
    for name, kind in kinds:
        path = f"{within}{name}"
        leaves += [(path, name, kind)] if isinstance(kind, str) else each_of(zip(kind._fields, kind), f"{path}_")
    return leaves
