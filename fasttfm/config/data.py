"""The `data:` section of a configuration: how what a kind of model learns from becomes rows and batches."""

from dataclasses import dataclass
from typing import Literal

from fasttfm.config.checks import require_choices, require_rows, require_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Settings of how training and validation batches are cut from prepared data."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsConfig:
    """Settings of how training and validation batches are cut from prepared documents."""

    max_tokens: int = 4096
    """Tokens of a batch; a whole number of rows, so that fewer are taken where it is not a multiple of row_length."""
    row_length: int = 256
    """Tokens of a row: documents one after the other, cut where the row is full; at most the model's max_length."""

    def __post_init__(self) -> None:
        require_rows(self, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingConfig:
    """Settings of how batches are cut from prepared documents and masked."""

    objective: Literal["mlm", "mlm+nsp", "mlm+sop", "electra"] = "mlm+nsp"
    """mlm: hidden tokens. mlm+nsp: and whether the second segment follows the first (BERT). mlm+sop: and whether two
    neighbouring segments are in order (ALBERT). electra: and which tokens a generator has replaced."""
    max_tokens: int = 4096
    """Most tokens of a batch, padding counted."""
    row_length: int = 128
    """Most tokens of a row, its markers counted; at most the model's max_length."""
    mask_rate: float = 0.15
    """Share of a row's tokens that are hidden, at least one of them."""
    whole_words: bool = False
    """Hide all pieces of a word or none."""
    phrases: str = ""
    """A text file with a phrase or entity a line, all words of which are hidden or none (ERNIE 1.0)."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_rows(self, 8)
        if not 0 < self.mask_rate < 1:
            raise ValueError(f"mask_rate {self.mask_rate} must lie between 0 and 1")

    @property
    def has_pairs(self) -> bool:
        """True if a row has two segments."""
        return self.objective in ("mlm+nsp", "mlm+sop")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Settings of how examples become rows and batches."""

    max_tokens: int = 4096
    """Tokens of a batch, padding included."""
    row_length: int = 256
    """Most tokens of a row, markers included; at most the model's max_length. Longer pairs lose their ends, longer
    contexts of questions are cut into windows."""
    doc_stride: int = 128
    """Tokens from the beginning of a context's window to the beginning of the next."""
    max_answer: int = 30
    """Most tokens of a predicted answer."""

    def __post_init__(self) -> None:
        require_whole(self, 1, "doc_stride", "max_answer")
        require_rows(self, 16)
