"""The `data:` section of a configuration: how prepared data become batches."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Settings that make batches from prepared data, for training and validation."""

    max_tokens: int = 4096
    """Largest batch in tokens: rows times the longer side, with padding and end of sentence counted."""
    max_sentence_tokens: int = 256
    """Leave pairs with more subwords than this on either side out of training; the count is reported."""
    subword_sampling: float = 0.0
    """0: use SentencePiece's best segmentation. Above 0: segment the training text anew in every epoch. For BPE this is
    the probability of dropping a merge (0.1 is usual), for unigram the exponent of a segmentation's probability (0.1 to
    0.5; smaller is more random)."""

    def __post_init__(self) -> None:
        if self.max_tokens < 8:
            raise ValueError(f"max_tokens is {self.max_tokens}: a batch needs room for at least 8 tokens")
        if self.max_sentence_tokens < 1:
            raise ValueError(f"max_sentence_tokens is {self.max_sentence_tokens}: at least 1 is needed")
        if not 0.0 <= self.subword_sampling <= 1.0:
            raise ValueError(f"subword_sampling is {self.subword_sampling}: between 0 and 1 is needed")
