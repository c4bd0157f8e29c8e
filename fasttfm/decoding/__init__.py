"""Search for translations with a trained model: greedy, beam and sampling over cached decoder states."""

from fasttfm.decoding.config import DecodingConfig
from fasttfm.decoding.hypotheses import Hypothesis
from fasttfm.decoding.search import search_ids, translate_ids

__all__ = ["DecodingConfig", "Hypothesis", "search_ids", "translate_ids"]
