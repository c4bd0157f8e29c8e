"""Text as prepared documents, and the `data:` sections: documents and examples as rows and batches."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fasttfm.config.checks import Count, Range, check_fields, check_flags


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentOptions:
    """Options that decide the content of a prepared directory, besides the text."""

    vocabulary: Literal["pieces", "bytes"] = "pieces"
    """SentencePiece, or a token a byte."""
    vocab_size: Annotated[int, Range(5)] = 8000
    """Size of the vocabulary; four pieces are special."""
    document_separator: str | None = None
    """A line that ends a document, an empty one with ""; None: a file is a document."""
    valid_share: Annotated[float, Range(0, 0.5, above=True)] = 0.05
    """Share of each --text that is held out where --valid is not given."""

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsConfig:
    """Settings that make batches from prepared documents, for training and validation."""

    max_tokens: int = 4096
    """Tokens in a batch, rounded down to a whole number of rows."""
    row_length: int = 256
    """Tokens in a row, at most the model's max_length. Documents follow one another and are cut where a row is full."""

    def __post_init__(self) -> None:
        _require_rows(self, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingConfig:
    """Settings that make batches from prepared documents and mask them."""

    objective: Literal["mlm", "mlm+nsp", "mlm+sop", "electra"] = "mlm+nsp"
    """mlm: predict masked tokens. mlm+nsp: also whether the second segment follows the first (BERT). mlm+sop: also
    whether two neighbouring segments are in order (ALBERT). electra: also which tokens a generator replaced."""
    max_tokens: int = 4096
    """Largest batch in tokens, padding counted."""
    row_length: int = 128
    """Longest row in tokens, special tokens counted; at most the model's max_length."""
    mask_rate: float = 0.15
    """Share of a row's tokens to mask; at least one is masked."""
    whole_words: bool = False
    """Mask all pieces of a word or none."""
    phrases: str = ""
    """Text file with one phrase or entity a line; all words of a phrase are masked or none (ERNIE 1.0)."""

    def __post_init__(self) -> None:
        check_fields(self)
        _require_rows(self, 8)
        if not 0 < self.mask_rate < 1:
            raise ValueError(f"mask_rate {self.mask_rate} must lie between 0 and 1")

    @property
    def has_pairs(self) -> bool:
        """True if a row has two segments."""
        return self.objective in ("mlm+nsp", "mlm+sop")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Settings that make rows and batches from examples."""

    max_tokens: int = 4096
    """Largest batch in tokens, padding counted."""
    row_length: int = 256
    """Longest row in tokens, special tokens counted; at most the model's max_length. Longer pairs are truncated; a
    question's longer context is cut into windows."""
    doc_stride: Count = 128
    """Tokens from the start of one window of the context to the start of the next."""
    max_answer: Count = 30
    """Longest predicted answer in tokens."""

    def __post_init__(self) -> None:
        check_fields(self)
        _require_rows(self, 16)


def _require_rows(config: Any, least: int) -> None:
    """A row has at least `least` tokens, and a batch at least one row."""
    if config.row_length < least:
        raise ValueError(f"row_length is {config.row_length}: at least {least} tokens are needed")
    if config.max_tokens < config.row_length:
        raise ValueError(f"max_tokens {config.max_tokens} is less than row_length {config.row_length}, a single row")
