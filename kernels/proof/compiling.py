"""Compiles a case for its chip with Triton, without a device."""

from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase


def specialization(case: CompileCase) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], list]]:
    """Return signature, constants and attributes for triton.compiler.ASTSource; values in tuples have paths as keys."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}

    def described(value: Any, path: tuple[int, ...], constant: bool = False) -> Any:
        if isinstance(value, tuple) and not constant:
            parts = [described(each, (*path, i)) for i, each in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if constant or not isinstance(value, str):
            constants[path] = value
            return "constexpr"
        if value.startswith("map "):
            return _tensor_map(*value.split()[1:])
        kind, _, divisor = value.partition(":")
        if divisor or kind.startswith("*"):
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    signature = {
        parameter.name: described(case.arguments[parameter.name], (index,), parameter.is_constexpr)
        for index, parameter in enumerate(case.kernel.params)
    }
    return signature, constants, attributes


def _tensor_map(dtype: str, block: str) -> str:
    """Return Triton's type string for a tensor map, with the shared-memory layout of its tiles."""
    from triton.experimental.gluon import language as gl

    shape = [int(size) for size in block.split("x")]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.dtype(dtype))
    return f"tensordesc<{dtype}{shape},{layout!r}>"


def compiled(chip: Chip, case: CompileCase) -> Any:
    """Compile a case with triton.compile(); Triton's interpreter must be off."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fasttfm.kernels.jit import OPTIONS

    target = GPUTarget("cuda", chip.capability, 32) if chip.capability else GPUTarget("hip", chip.name, chip.warp)
    if case.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    return triton.compile(
        Source(case.kernel, *specialization(case)),
        target=target,
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **OPTIONS},
    )
