"""Executes the PTX of Triton kernels on a CPU, with checks that neither the interpreter nor a device performs."""

import importlib
from typing import TYPE_CHECKING, Any

from ptx_check.version import __version__

if TYPE_CHECKING:
    from ptx_check.chips import CHIPS
    from ptx_check.faults import KINDS, NOTES, Fault, FaultyKernel, Unsupported
    from ptx_check.machine import Machine, executed

__all__ = [
    "CHIPS", "KINDS", "NOTES", "Fault", "FaultyKernel", "Machine", "Unsupported", "__version__", "executed",
]  # fmt: skip

_HOMES = {"CHIPS": "chips", "Machine": "machine", "executed": "machine"}


def __getattr__(name: str) -> Any:
    """Imported lazily: pytest loads this package's plugin even in suites that do not use it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ptx_check.{_HOMES.get(name, 'faults')}"), name)
