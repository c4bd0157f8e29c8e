"""Compiles a case for its chip with Triton, without a device."""

from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase


def specialization(case: CompileCase) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], list]]:
    """Signature, constants and attributes as triton.compiler.ASTSource takes them: a value in a tuple by its path."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}

    def described(value: Any, path: tuple[int, ...], constant: bool = False) -> Any:
        if isinstance(value, tuple) and not constant:
            parts = [described(each, (*path, i)) for i, each in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if constant or not isinstance(value, str):
            constants[path] = value
            return "constexpr"
        kind, _, divisor = value.partition(":")
        if divisor or kind.startswith("*"):
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    signature = {
        parameter.name: described(case.arguments[parameter.name], (index,), parameter.is_constexpr)
        for index, parameter in enumerate(case.kernel.params)
    }
    return signature, constants, attributes


def compiled(chip: Chip, case: CompileCase) -> Any:
    """Compile a case with triton.compile(); Triton must not be in its interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fasttfm.kernels.jit import OPTIONS

    target = GPUTarget("cuda", chip.capability, 32) if chip.capability else GPUTarget("hip", chip.name, chip.warp)
    return triton.compile(
        ASTSource(case.kernel, *specialization(case)),
        target=target,
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **OPTIONS},
    )
