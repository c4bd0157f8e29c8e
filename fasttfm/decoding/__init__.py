"""Search for translations with a trained model: greedy, beam and sampling over cached decoder states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fasttfm.decoding.config import DecodingConfig
from fasttfm.decoding.hypotheses import Hypothesis
from fasttfm.decoding.scoring import score_ids
from fasttfm.decoding.search import search_ids, translate_ids

if TYPE_CHECKING:
    from fasttfm.decoding.translator import Translation, Translator

__all__ = ["DecodingConfig", "Hypothesis", "Translation", "Translator", "score_ids", "search_ids", "translate_ids"]


def __getattr__(name: str) -> Any:
    # Translator reads checkpoints of fasttfm.training, which itself translates while it validates.
    if name in ("Translation", "Translator"):
        from fasttfm.decoding import translator

        return getattr(translator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
