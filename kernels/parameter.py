"""What a kernel's parameters are, said where they are declared:

    @jit
    def _forward(
        x: Pointer,  # (M, N)
        mean: Float32Pointer,  # (M,) out
        seed: Int64Pointer,  # (1,), or None: no dropout
        site: Varying,
        M: Varying,
        N: Size,
        ROWS: tl.constexpr,
    ):

jit.py reads here which integers Triton must not specialise on and which must fit 32 bits, compile_case.py what the
compile matrix compiles a kernel for. To Triton and to a type checker these annotations mean nothing. They are read by
name, so that a kernel file needs `from __future__ import annotations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias


class _Kind:
    """What an annotation names while a kernel compiles."""

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
    Varying: TypeAlias = Any
    Real: TypeAlias = Any
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
    """A tuple of integers of which none is 1 or divides by 16."""
    Size = _Kind()
    """A whole number of a model, most often a multiple of 16, for which Triton compiles a kernel of its own."""
    Stride = _Kind()
    """Elements between neighbours, likewise; may need 64 bits."""
    Varying = _Kind()
    """A whole number that changes from batch to batch or layer to layer. Triton would compile a kernel anew whenever it
    becomes 1 or a multiple of 16, and knowing that would make it no faster."""
    Real = _Kind()
    """A Python float."""

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
}
"""How compile_case.py writes an argument for such a parameter."""


def kinds_of(kernel: Any) -> dict[str, str]:
    """Parameter -> the name of its annotation, for those that have one."""
    return {name: str(kind) for name, kind in getattr(kernel, "fn", kernel).__annotations__.items()}
