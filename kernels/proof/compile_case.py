"""Cases that must compile: one for every kernel and tile that its launch functions can choose.

A kernel file has, beside its launch functions, a pure tile(chip, ...size classes...) that they call; the file of the
same name in cases/ has

    def compile_cases(chip: Chip) -> Iterator[CompileCase]    everything that `tile` can return on that chip

so that the compile matrix covers what really runs, chip by chip, without a device. residual_add.py is the worked
example.
Arguments are written as Triton's own ahead-of-time compiler writes them:

    "*bf16", "*i64"    a pointer; 16-byte aligned, as torch allocates memory. None: the optional pointer is not given
    "i32:16", "i32"    an integer, known to divide by 16 (as usual model sizes do) or not; 1: Triton specialises on it
    "fp32"             a Python float
    "map bf16 128x64"  a tensor map whose copies bring tiles of so many elements, for a kernel in Gluon
    ("*bf16", "*bf16") a tuple of any of these
    anything           for a parameter annotated tl.constexpr: its value
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
"""How a case writes an argument for such a parameter."""

DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""The dtypes that kernels take, as Triton spells them, and their bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One kernel with everything that Triton specialises on."""

    kernel: Any
    """The @triton.jit function, or Gluon's."""
    name: str
    """Family, kernel, variant and tile, unique on a chip together with dtype, stable over time because the budgets are
    filed under it: "attention.forward/causal+dropout/D64/64x32w4s2"."""
    dtype: str
    """fp32, tf32, fp16 or bf16: what the matrix products, or else the main operands, are computed from."""
    arguments: Mapping[str, Any]
    """Every parameter of the kernel by name, in the notation above."""
    num_warps: int
    num_stages: int
    matrix_product: bool = False
    """Whether the kernel has a tl.dot that must be issued to matrix units where the chip has them for this dtype."""

    def __post_init__(self) -> None:
        expected = list(self.kernel.arg_names)
        if sorted(expected) != sorted(self.arguments):
            missing = [name for name in expected if name not in self.arguments]
            unknown = [name for name in self.arguments if name not in expected]
            raise ValueError(f"compile case {self.name}: missing arguments {missing}, unknown arguments {unknown}")


def kernel_case(
    kernel: Any,
    name: str,
    dtype: str,
    tile: Tile,
    *,
    dtypes: Mapping[str, str] = MappingProxyType({}),
    given: Mapping[str, Any] = MappingProxyType({}),
) -> CompileCase:
    """A case whose arguments are what the kernel's annotations say (parameter.py), for a tile and a dtype.

    name: family, kernel and variant; the tile is added. dtypes: of what a ResidualPointer and a ParameterPointer
    point at, by "residual" and "parameter", where these are not dtype and fp32. given: arguments of which other is
    known, or fields of them, in the notation above; None: the pointer is not given.
    """
    element = "fp32" if dtype == "tf32" else dtype
    every = {"dtype": element, "residual": element, "parameter": "fp32", **dtypes}
    known = {**tile.sizes, **given}

    def described(name: str, kind: Any) -> Any:
        if name in known:
            return known.pop(name)
        if isinstance(kind, str):
            return NOTATION[kind].format(**every)
        return type(kind)(*map(described, kind._fields, kind))

    kinds = {name: kind for name, kind in kinds_of(kernel).items() if name in known or kind not in CONSTANT}
    arguments = {name: described(name, kind) for name, kind in kinds.items()}
    return CompileCase(
        kernel=kernel,
        name=f"{name}/{tile}",
        dtype=dtype,
        arguments={**arguments, **known},
        num_warps=tile.warps,
        num_stages=tile.stages,
        matrix_product="PRECISION" in kernel.arg_names,
    )
