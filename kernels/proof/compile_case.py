"""Cases that must compile: every kernel with every tile that its launch can choose.

A kernel file has a pure function tile(chip, ...size classes...), which its launches call; the file of the same name in
cases/ lists every tile that it can return:

    def compile_cases(chip: Chip) -> Iterator[CompileCase]

So the compile matrix covers what really runs on each chip, without a device. residual_add.py is an example.
Arguments are in the notation of Triton's ahead-of-time compiler:

    "*bf16", "*i64"    a pointer, 16-byte aligned like torch's allocations; None: an absent optional pointer
    "i32:16", "i32"    an integer that is a multiple of 16 (like usual model sizes) or not; 1: Triton specializes on it
    "fp32"             a Python float
    "map bf16 128x64"  a tensor map with tiles of this shape, for a kernel in Gluon
    ("*bf16", "*bf16") a tuple of these
    any value          for a parameter annotated tl.constexpr
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fasttfm.kernels.parameter import CONSTANT, kinds_of
from fasttfm.kernels.tiles.table import Tile

NOTATION = {
    "Pointer": "*{dtype}",
    "ResidualPointer": "*{residual}",
    "ParameterPointer": "*{parameter}",
    "Float32Pointer": "*fp32",
    "Int64Pointer": "*i64",
    "Int32Pointer": "*i32",
    "Int8Pointer": "*i8",
    "BoolPointer": "*i1",
    "Size": "i32:16",
    "Stride": "i32:16",
    "Varying": "i32",
    "Real": "fp32",
    "VaryingOrNone": "i32",
    "RealOrNone": "fp32",
}
"""Annotation of a parameter (parameter.py) -> notation of its argument."""

DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Dtypes of kernels, in Triton's spelling -> bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One kernel with everything that Triton specializes on."""

    kernel: Any
    """A function decorated by jit.jit() or gluon.jit()."""
    name: str
    """Family, kernel, variant and tile: "attention.forward/causal+dropout/D64/64x32w4s2". Unique per chip and dtype,
    and stable, because it is the key of the budgets."""
    dtype: str
    """fp32, tf32, fp16 or bf16: dtype of the matrix products, else of the main operands."""
    arguments: Mapping[str, Any]
    """Every parameter of the kernel by name, in the notation above."""
    num_warps: int
    num_stages: int
    matrix_product: bool = False
    """Whether the kernel has a tl.dot, which must use matrix units if the chip has them for this dtype."""

    def __post_init__(self) -> None:
        expected = list(self.kernel.arg_names)
        if sorted(expected) != sorted(self.arguments):
            missing = [name for name in expected if name not in self.arguments]
            unknown = [name for name in self.arguments if name not in expected]
            raise ValueError(f"compile case {self.name}: missing arguments {missing}, unknown arguments {unknown}")


def kernel_case(
    kernel: Any, name: str, dtype: str, tile: Tile, /, *, dtypes: Mapping[str, str] = MappingProxyType({}),
    **overrides: Any,
) -> CompileCase:  # fmt: skip
    """The case of a tile and dtype; arguments follow from the kernel's annotations (parameter.py).

    name: family, kernel and variant; the tile is appended. dtypes: "residual" for ResidualPointer (default: dtype),
    "parameter" for ParameterPointer (default: fp32). overrides: constants, other arguments or fields of arguments, in
    the notation above.
    """
    element = "fp32" if dtype == "tf32" else dtype
    pointed = {"dtype": element, "residual": element, "parameter": "fp32", **dtypes}
    remaining = {**tile.sizes, **overrides}

    def described(name: str, kind: Any) -> Any:
        if name in remaining:
            return remaining.pop(name)
        if isinstance(kind, str):
            return NOTATION[kind].format(**pointed)
        return type(kind)(*map(described, kind._fields, kind))

    kinds = {name: kind for name, kind in kinds_of(kernel).items() if name in remaining or kind not in CONSTANT}
    arguments = {name: described(name, kind) for name, kind in kinds.items()}
    return CompileCase(
        kernel=kernel,
        name=f"{name}/{tile}",
        dtype=dtype,
        arguments={**arguments, **remaining},
        num_warps=tile.warps,
        num_stages=tile.stages,
        matrix_product="PRECISION" in kernel.arg_names,
    )
