"""The `data:` section where a model learns from running text: how prepared documents become rows and batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsConfig:
    """How training and validation batches are cut from prepared documents."""

    max_tokens: int = 4096
    """Tokens of a batch; a whole number of rows, so that fewer are taken where it is no multiple of row_length."""
    row_length: int = 256
    """Tokens of a row: documents one after the other, cut where the row is full; at most the model's max_length."""

    def __post_init__(self) -> None:
        if self.row_length < 2:
            raise ValueError(f"row_length is {self.row_length}: at least 2 tokens are needed")
        if self.max_tokens < self.row_length:
            raise ValueError(f"max_tokens {self.max_tokens} is less than row_length {self.row_length}, a single row")
