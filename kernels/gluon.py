"""jit.jit() for Gluon, in which kernels state their own layouts, copies and barriers. Needs tensor_map.usable()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from fasttfm.kernels.jit import Kernel


def jit(function: Callable[..., Any]) -> Kernel:
    """jit.jit() for a kernel in Gluon, which has no interpreter. Tensor maps are passed as tensor_map.Mapped, not in
    tuples."""
    return _GluonKernel(function)


class _GluonKernel(Kernel):
    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource = GluonASTSource
        return binder

    def is_gluon(self) -> bool:
        return True
