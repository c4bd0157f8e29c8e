"""Search and sampling settings: the `decoding:` section of a configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fasttfm.config.checks import Range, Seed, check_fields

_MOST = (1 << 31) - 1
"""Maximum of all counts, which index tensors and tables as int32."""
_Count = Annotated[int, Range(1, _MOST)]
_Whole = Annotated[int, Range(0, _MOST)]
_Beam = Annotated[int, Range(1, 4_096)]
_Length = Annotated[int, Range(0, 1_000_000)]
"""A longer search would take days."""
_Penalty = Annotated[float, Range(0, 1_000)]
"""With a larger penalty float32 loses the log-probabilities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingConfig:
    """Search, lengths and batches of translation. Invalid values raise ValueError on construction."""

    beam: _Beam = 4
    """Beam size; 1: greedy search."""
    diverse_beam_groups: _Count = 1
    """Groups in diverse beam search; later groups avoid the tokens of earlier ones. 1: plain beam search."""
    diverse_beam_strength: _Penalty = 0.5
    """Penalty of a token for each earlier group that chose it at the same step; 0 makes all groups equal."""
    length_penalty: Literal["wu", "power", "avg", "none"] = "power"
    """Divisor of the log-probability: wu ((5 + length) / 6)^alpha, power length^alpha, avg length, none 1."""
    alpha: Annotated[float, Range(0, 6)] = 1.0  # float32 holds the sixth power of 2 million tokens
    """Exponent of the length penalty: 0.6 with wu in the paper, fairseq's lenpen with power."""
    early_stopping: bool = True
    """Stop a sentence's search once `beam` hypotheses have ended, as fairseq and CTranslate2 do; false: once no better
    one is possible."""
    coverage_penalty: _Penalty = 0.0
    """Weight of the sum over source tokens of log(min(1, attention received)), added to each hypothesis's score."""
    alignment_layer: _Whole = 0
    """Decoder layer, from 1, whose attention gives alignments and coverage. 0: the last but one (of two layers, the
    last)."""
    max_len_a: Annotated[float, Range(0, 1_000)] = 1.0  # bounds the search of a model that never ends a sentence
    """The longest output is max_len_a * source tokens + max_len_b tokens, without end of sentence."""
    max_len_b: _Length = 50
    """Output tokens allowed beyond max_len_a * source tokens; 50 in the paper."""
    min_len: _Length = 1
    """Shortest output in tokens; 0 allows empty translations."""
    no_repeat_ngram: _Whole = 0
    """Forbid repeated sequences of N tokens in an output, except those forced by a prefix; 0: allow all."""
    nbest: _Count = 1
    """Translations returned per sentence, best first; at most beam, except with sampling."""
    allow_unk: bool = False
    """Allow the unknown token in translations."""
    sampling: bool = False
    """Sample tokens instead of searching; beam then has no effect."""
    sampling_topk: _Whole = 0
    """With sampling: sample from the K most probable tokens; 0: from all."""
    sampling_topp: Annotated[float, Range(0, 1, above=True)] = 1.0
    """With sampling: sample from the smallest set of tokens whose probabilities sum to P; 1: from all."""
    temperature: Annotated[float, Range(0, 1_000, above=True)] = 1.0  # nearly uniform at the maximum
    """With sampling: divisor of the logits; below 1 is more certain, above 1 more varied."""
    sampling_seed: Seed = 1
    """Seed of sampling. A sentence's samples depend only on the seed and its line number."""
    mbr_samples: _Whole = 0
    """Draw N samples and choose the one closest to all others by chrF (minimum Bayes risk); 0: search instead."""
    batch_tokens: _Count = 1024
    """Source tokens per batch, padding included; a sentence counts as at least 16, a longer one is its own batch."""
    batch_invariant: bool = True
    """Make translations and scores bit-identical whatever else is in the batch; CPU only."""
    buffer_size: _Count = 1024
    """Lines that are read, sorted by length, translated and written at a time."""
    max_source_length: _Count = 512
    """Longest line in source tokens; longer ones are truncated with a warning."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mbr_samples == 1 or 0 < self.mbr_samples < self.nbest:
            raise ValueError(f"mbr_samples {self.mbr_samples} must be 0, or at least 2 and at least nbest {self.nbest}")
        if self.beam % self.diverse_beam_groups:
            raise ValueError(f"beam {self.beam} must be a multiple of diverse_beam_groups {self.diverse_beam_groups}")
        if self.nbest > self.beam and not (self.sampling or self.mbr_samples):
            raise ValueError(f"nbest {self.nbest} is more than beam {self.beam}: raise beam or lower nbest")

    def longest_output(self, source_tokens: int) -> int:
        """Longest output in tokens for this many source tokens, both without end of sentence."""
        return min(max(int(min(self.max_len_a * source_tokens, _MOST)) + self.max_len_b, self.min_len), _MOST)
