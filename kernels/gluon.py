"""Kernels in Gluon, which states the layouts, copies and barriers that Triton's compiler would choose, as launches of
jit.py. Only where tensor_map.usable() is this file imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from fasttfm.kernels.jit import Kernel


def jit(function: Callable[..., Any]) -> Kernel:
    """jit.jit() for Gluon, which has no interpreter. A TensorMap is given as a tensor_map.Mapped, in no tuple."""
    return _GluonKernel(function)


class _GluonKernel(Kernel):
    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource = GluonASTSource
        return binder

    def is_gluon(self) -> bool:
        return True
