"""Text to batches: SentencePiece, parallel corpora, the prepared directory, token-budget batches, the demo corpus.

Names are imported at first use, so that preparing data does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttfm.data.batches import Batch, TokenBatches, collate, sorted_batches
    from fasttfm.data.config import DataConfig
    from fasttfm.data.prepared import ParallelTokens, PreparedData
    from fasttfm.data.scoring import bleu
    from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK, Tokenizer

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "Batch",
    "DataConfig",
    "ParallelTokens",
    "PreparedData",
    "TokenBatches",
    "Tokenizer",
    "bleu",
    "collate",
    "sorted_batches",
]

_HOME = {
    "tokenizer": ("BOS", "EOS", "PAD", "UNK", "Tokenizer"),
    "batches": ("Batch", "TokenBatches", "collate", "sorted_batches"),
    "config": ("DataConfig",),
    "prepared": ("ParallelTokens", "PreparedData"),
    "scoring": ("bleu",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"fasttfm.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
