"""jit.jit() for Gluon kernels, which specify layouts, copies and barriers themselves. Needs tensor_map.usable()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from fasttfm.kernels.jit import Kernel


def jit(function: Callable[..., Any]) -> Kernel:
    """Decorator for Gluon kernels that the host launches; Gluon has no interpreter. Tensor maps are passed as
    tensor_map.Mapped, not inside tuples."""
    return _GluonKernel(function)


class _GluonKernel(Kernel):
    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource = GluonASTSource
        return binder

    def is_gluon(self) -> bool:
        return True
