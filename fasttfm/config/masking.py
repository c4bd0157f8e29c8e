"""The `data:` section of masked language models: rows, what is hidden in them, and what besides is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttfm.config.checks import require_choices, require_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingConfig:
    """How batches are cut from prepared documents and masked."""

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
        """Whether a row has two segments."""
        return self.objective in ("mlm+nsp", "mlm+sop")
