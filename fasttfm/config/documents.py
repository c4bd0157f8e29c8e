"""The `data:` section where a model learns from running text: how prepared documents become rows and batches."""

from __future__ import annotations

from dataclasses import dataclass

from fasttfm.config.checks import require_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsConfig:
    """How training and validation batches are cut from prepared documents."""

    max_tokens: int = 4096
    """Tokens of a batch; a whole number of rows, so that fewer are taken where it is no multiple of row_length."""
    row_length: int = 256
    """Tokens of a row: documents one after the other, cut where the row is full; at most the model's max_length."""

    def __post_init__(self) -> None:
        require_rows(self, 2)
