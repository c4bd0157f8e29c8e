"""Transformers and their parts: attention, feed-forward network, residual connections, stacks, caches, embedding, loss.

fasttfm.nn wraps them with torch.nn's interface; fasttfm_pretraining.models has GPT, Llama and BERT's family.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttfm.config.model import TransformerConfig
    from fasttfm.models.transformer import Transformer

__all__ = ["TimeSeriesTransformer", "Transformer", "TransformerConfig"]

_HOMES = {
    "TimeSeriesTransformer": "fasttfm.nn.time_series",
    "Transformer": "fasttfm.models.transformer",
    "TransformerConfig": "fasttfm.config.model",
}
"""Imported on first use, so that importing fasttfm.nn loads no whole model."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fasttfm.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
