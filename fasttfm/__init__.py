"""fasttfm: the encoder-decoder Transformer of "Attention Is All You Need" on fused Triton kernels.

Importing it queries no device and needs neither a GPU nor Triton. The rooms: fasttfm.functional (operators),
fasttfm.nn (torch.nn's modules), fasttfm.models, fasttfm.data, fasttfm.training, fasttfm.search, fasttfm.convert,
fasttfm.reference (the specification).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttfm.convert import replace_modules, restore_modules
    from fasttfm.functional import backend
    from fasttfm.translate.pipeline import pipeline

__version__ = "0.4.0"
__all__ = ["__version__", "backend", "pipeline", "replace_modules", "restore_modules"]


_HOMES = {
    "backend": "fasttfm.functional",
    "pipeline": "fasttfm.translate.pipeline",
    "replace_modules": "fasttfm.convert",
    "restore_modules": "fasttfm.convert",
}
"""Imported on first use, so that `fasttfm --help` does not wait for torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fasttfm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
