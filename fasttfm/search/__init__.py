"""Search over cached decoder states: greedy, beam, sampling and constrained search, from source ids to hypotheses."""

from fasttfm.config.decoding import DecodingConfig
from fasttfm.search.hypotheses import Hypothesis
from fasttfm.search.scoring import score_ids
from fasttfm.search.search import search_ids, translate_ids

__all__ = ["DecodingConfig", "Hypothesis", "score_ids", "search_ids", "translate_ids"]
