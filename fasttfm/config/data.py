"""The `data:` section of a preset or configuration file: how prepared pairs become batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """How training and validation batches are cut from prepared data."""

    max_tokens: int = 4096
    """Largest padded size of a batch: rows times the longer of the two sides, padding and end of sentence counted."""
    max_sentence_tokens: int = 256
    """Pairs with more subwords than this on either side are left out of training (the count is reported)."""
    subword_sampling: float = 0.0
    """0: always SentencePiece's own segmentation. Above 0 the training text is segmented anew in every epoch: for BPE
    the probability that a merge is dropped (0.1 is usual), for unigram the exponent of a segmentation's probability
    (0.1 to 0.5; less is more random)."""

    def __post_init__(self) -> None:
        if self.max_tokens < 8:
            raise ValueError(f"max_tokens is {self.max_tokens}: a batch needs room for at least 8 tokens")
        if self.max_sentence_tokens < 1:
            raise ValueError(f"max_sentence_tokens is {self.max_sentence_tokens}: at least 1 is needed")
        if not 0.0 <= self.subword_sampling <= 1.0:
            raise ValueError(f"subword_sampling is {self.subword_sampling}: between 0 and 1 is needed")
