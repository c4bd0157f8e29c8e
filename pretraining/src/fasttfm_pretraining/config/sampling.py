"""Settings of `fasttfm lm generate`."""

from dataclasses import dataclass
from typing import Annotated

from fasttfm.config.checks import Amount, Range, Seed, Whole, check_flags
from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Method of drawing the next token."""

    temperature: Amount = 1.0
    """Divisor of the logits; 0: always take the likeliest token."""
    top_k: Whole = 0
    """Draw from the N likeliest tokens; 0: from all."""
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Draw from the fewest tokens whose probabilities sum to X (Holtzman et al. 2020)."""
    seed: Seed = 1
    """Seed; the same seed gives the same text."""

    def __post_init__(self) -> None:
        check_flags(self)
        for flag, is_given in (("top-k", self.top_k), ("top-p", self.top_p < 1), ("seed", self.seed != 1)):
            if is_given and self.temperature == 0:
                raise UserError(f"--{flag} does nothing while --temperature is 0: leave it out")

    def decoding(self) -> DecodingConfig:
        """The same for decoding.greedy."""
        if self.temperature == 0:
            return DecodingConfig(beam=1, sampling=True, sampling_topk=1)
        return DecodingConfig(
            beam=1, sampling=True, sampling_topk=self.top_k, sampling_topp=self.top_p, temperature=self.temperature
        )
