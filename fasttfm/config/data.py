"""The `data:` section of a configuration: how prepared data become batches."""

from dataclasses import dataclass
from typing import Annotated

from fasttfm.config.checks import Count, Range, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Settings that make batches from prepared data, for training and validation."""

    max_tokens: Annotated[int, Range(8)] = 4096
    """Largest batch in tokens: rows times the longer side, with padding and end of sentence counted."""
    max_sentence_tokens: Count = 256
    """Leave pairs with more subwords than this on either side out of training; the count is reported."""
    subword_sampling: Annotated[float, Range(0, 1)] = 0.0
    """0: use SentencePiece's best segmentation. Above 0: segment the training text anew in every epoch. For BPE this is
    the probability of dropping a merge (0.1 is usual), for unigram the exponent of a segmentation's probability (0.1 to
    0.5; smaller is more random)."""
    case_augment: Annotated[float, Range(0, 1)] = 0.0
    """Share of the training pairs whose case is changed, drawn anew in every epoch: half of them to capitals on both
    sides, half to title case in the source alone."""

    def __post_init__(self) -> None:
        check_fields(self)
