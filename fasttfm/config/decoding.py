"""Settings of the search for translations: one frozen dataclass, the `decoding:` section of a configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fasttfm.config.checks import Range, Seed, check_fields

_MOST = (1 << 31) - 1
"""No setting that counts something is larger: tensors and tables are indexed with such numbers."""
_Count = Annotated[int, Range(1, _MOST)]
_Whole = Annotated[int, Range(0, _MOST)]
_Beam = Annotated[int, Range(1, 4_096)]
_Length = Annotated[int, Range(0, 1_000_000)]
"""A search of so many steps takes days."""
_Penalty = Annotated[float, Range(0, 1_000)]
"""Beside a larger one no log-probability counts any more; float32 still tells them apart beside this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingConfig:
    """Search, lengths and batches of a translation run. Wrong values raise ValueError on construction."""

    beam: _Beam = 4
    """Hypotheses kept for each sentence; 1: greedy search, which takes the likeliest token at every step."""
    diverse_beam_groups: _Count = 1
    """Groups of the beam (diverse beam search); a token costs more in later groups. 1: ordinary beam search."""
    diverse_beam_strength: _Penalty = 0.5
    """Penalty of a token for each earlier group that took it at the same step; 0 makes all groups alike."""
    length_penalty: Literal["wu", "power", "avg", "none"] = "power"
    """Divisor of the log-probability: wu ((5 + length) / 6)^alpha, power length^alpha, avg length, none 1."""
    alpha: Annotated[float, Range(0, 30)] = 1.0  # the penalty of the longest output still is a float
    """Exponent of the length penalty: 0.6 with wu in the paper, fairseq's lenpen with power."""
    early_stopping: bool = True
    """End a sentence's search as soon as `beam` of its hypotheses have ended, as fairseq and CTranslate2 do; false:
    when nothing better can come."""
    coverage_penalty: _Penalty = 0.0
    """Factor of the sum over source tokens of log(min(1, attention received)), added to each hypothesis's score."""
    alignment_layer: _Whole = 0
    """Decoder layer, counted from 1, whose attention gives alignments and coverage. 0: the last but one (of two layers,
    the last)."""
    max_len_a: Annotated[float, Range(0, 1_000)] = 1.0  # a model that never ends would search on for days
    """The longest output is max_len_a * source tokens + max_len_b tokens, without end-of-sentence."""
    max_len_b: _Length = 50
    """Tokens that an output may have beyond max_len_a * source tokens; the paper allows 50."""
    min_len: _Length = 1
    """Shortest output in tokens; 0 allows empty translations."""
    no_repeat_ngram: _Whole = 0
    """Forbid an output to repeat any sequence of N tokens, except where a prefix forces it; 0: allow all."""
    nbest: _Count = 1
    """Translations returned for each sentence, best first; at most beam, except with sampling."""
    allow_unk: bool = False
    """Allow the unknown token in translations."""
    sampling: bool = False
    """Draw tokens at random instead of searching; beam then has no effect."""
    sampling_topk: _Whole = 0
    """With sampling: draw among the K likeliest tokens; 0: among all."""
    sampling_topp: Annotated[float, Range(0, 1, above=True)] = 1.0
    """With sampling: draw among the fewest tokens whose probabilities sum to P; 1: among all."""
    temperature: Annotated[float, Range(0, 1_000, above=True)] = 1.0  # beyond it all tokens are alike
    """With sampling: divisor of the logits; below 1 is more certain, above 1 more varied."""
    sampling_seed: Seed = 1
    """Seed of sampling. A sentence's draws depend only on the seed and on its line number."""
    mbr_samples: _Whole = 0
    """Draw N samples and take the one closest to all others by chrF (minimum Bayes risk); 0: search instead."""
    batch_tokens: _Count = 1024
    """Source tokens in a batch, padding counted; a sentence counts as at least 16, a longer one is a batch alone."""
    batch_invariant: bool = True
    """Make each translation and its score the same to the last bit whatever else the batch holds; CPU only."""
    buffer_size: _Count = 1024
    """Lines that are read, sorted by length, translated and written at a time."""
    max_source_length: _Count = 512
    """Longest line in source tokens; a longer one is truncated, and a warning counts such lines."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mbr_samples == 1 or 0 < self.mbr_samples < self.nbest:
            raise ValueError(f"mbr_samples {self.mbr_samples} must be 0, or at least 2 and at least nbest {self.nbest}")
        if self.beam % self.diverse_beam_groups:
            raise ValueError(f"beam {self.beam} must be a multiple of diverse_beam_groups {self.diverse_beam_groups}")
        if self.nbest > self.beam and not (self.sampling or self.mbr_samples):
            raise ValueError(f"nbest {self.nbest} is more than beam {self.beam}: raise beam or lower nbest")

    def longest_output(self, source_tokens: int) -> int:
        """Longest output in tokens for a source of so many, both without end-of-sentence."""
        return min(max(int(min(self.max_len_a * source_tokens, _MOST)) + self.max_len_b, self.min_len), _MOST)
