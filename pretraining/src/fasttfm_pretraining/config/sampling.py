"""Settings of `fasttfm lm generate`."""

import math
from dataclasses import dataclass

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Way in which the next token is drawn."""

    temperature: float = 1.0
    """Divisor of the logits; 0: always take the likeliest token."""
    top_k: int = 0
    """Draw from the N likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities sum to X (Holtzman et al. 2020)."""
    seed: int = 1
    """Seed; the same seed gives the same text."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature {self.temperature:g}: 0 or more is allowed")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k}: 0 (all tokens) or more is allowed")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p:g}: above 0 and at most 1 is allowed")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: 0 or more is allowed")

    def decoding(self) -> DecodingConfig:
        """The same for decoding.greedy."""
        if self.temperature == 0:
            return DecodingConfig(beam=1, sampling=True, sampling_topk=1)
        return DecodingConfig(
            beam=1, sampling=True, sampling_topk=self.top_k, sampling_topp=self.top_p, temperature=self.temperature
        )
