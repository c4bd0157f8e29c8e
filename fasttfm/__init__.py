"""fasttfm: the encoder-decoder Transformer of "Attention Is All You Need" on fused Triton kernels.

Importing it queries no device and needs neither a GPU nor Triton. The rooms: fasttfm.functional (operators),
fasttfm.nn (torch.nn's modules), fasttfm.models, fasttfm.data, fasttfm.training, fasttfm.decoding, fasttfm.interop,
fasttfm.reference (the specification).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttfm.decoding.pipeline import pipeline
    from fasttfm.functional import backend
    from fasttfm.interop import replace_modules, restore_modules

__version__ = "0.1.0"
__all__ = ["__version__", "backend", "pipeline", "replace_modules", "restore_modules"]


def __getattr__(name: str) -> Any:
    if name == "backend":  # on first use, so that `fasttfm --help` does not wait for torch
        from fasttfm.functional import backend

        return backend
    if name == "pipeline":
        from fasttfm.decoding.pipeline import pipeline

        return pipeline
    if name in ("replace_modules", "restore_modules"):
        from fasttfm import interop

        return getattr(interop, name)
    raise AttributeError(f"module 'fasttfm' has no attribute {name!r}")
