"""Loss, perplexity and bits per byte of a trained language model on held-out text: fasttfm lm evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttfm.checkpoints.model_dir import read_config
from fasttfm.checkpoints.vocabulary import refuse_another_vocabulary
from fasttfm.data.corpus import TextFile
from fasttfm.data.documents import Documents, PreparedDocuments, RowBatches
from fasttfm.data.text_tokenizer import TextTokenizer
from fasttfm.errors import UserError
from fasttfm.training.text_validation import LossValidator, TextScore, text_score


def evaluate(
    model: Any,
    tokenizer: TextTokenizer,
    model_dir: Path,
    *,
    data: Path | None = None,
    text: Path | None = None,
    row_length: int | None = None,
    max_tokens: int = 4096,
) -> TextScore:
    """The score on the held-out part of prepared documents, or on a text as a single document.

    row_length: tokens that see one another; None: as in training. Raises UserError for data of another vocabulary, an
    empty text, and rows that the model has too few positions for.
    """
    length = row_length or min(read_config(model_dir, "gpt")["data"]["row_length"], model.config.max_length)
    if not 2 <= length <= model.config.max_length:
        raise UserError(f"--row-length {length}: between 2 and {model.config.max_length:,}, the model's positions")
    if data is not None:
        prepared = PreparedDocuments.open(data)
        refuse_another_vocabulary(prepared, model_dir)
        documents = prepared.valid
    else:
        assert text is not None
        lines = list(TextFile(text))
        if not any(line.strip() for line in lines):
            raise UserError(f"{text}: is empty: at least one line of text is needed")
        ids = [token for line in tokenizer.encode_lines(lines) for token in line]
        documents = Documents.from_lists([ids], tokenizer.end, sum(len(line.encode()) + 1 for line in lines))
    rows = RowBatches(documents, length, max(length, max_tokens))
    device = next(model.parameters()).device
    score = text_score(documents.bytes)
    return LossValidator(rows, rows.in_order(), score, label_smoothing=0.0, device=device, autocast=None)(model)
