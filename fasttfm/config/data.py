"""The `data:` section of a configuration: batching of prepared data."""

from dataclasses import dataclass
from typing import Annotated

from fasttfm.config.checks import Count, Range, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Batching options for training and validation."""

    max_tokens: Annotated[int, Range(8)] = 4096
    """Largest batch in tokens: rows times the longer side, padding and end of sentence included."""
    max_sentence_tokens: Count = 256
    """Skip training pairs with more subwords than this on either side; their number is reported."""
    subword_sampling: Annotated[float, Range(0, 1)] = 0.0
    """0: use SentencePiece's best segmentation. Above 0: sample a new segmentation of the training text each epoch. For
    BPE this is the probability of dropping a merge (0.1 is usual), for unigram the exponent of a segmentation's
    probability (0.1 to 0.5; smaller is more random)."""

    def __post_init__(self) -> None:
        check_fields(self)
