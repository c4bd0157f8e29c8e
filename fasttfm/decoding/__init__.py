"""Search for translations with a trained model: greedy, beam and sampling over cached decoder states."""

from fasttfm.config.decoding import DecodingConfig
from fasttfm.decoding.hypotheses import Hypothesis
from fasttfm.decoding.scoring import score_ids
from fasttfm.decoding.search import search_ids, translate_ids
from fasttfm.decoding.shortlist import Shortlist
from fasttfm.decoding.terminology import Terminology
from fasttfm.decoding.translator import Translation, Translator

__all__ = [
    "DecodingConfig",
    "Hypothesis",
    "Shortlist",
    "Terminology",
    "Translation",
    "Translator",
    "score_ids",
    "search_ids",
    "translate_ids",
]
