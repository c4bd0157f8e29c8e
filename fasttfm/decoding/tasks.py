"""What a fine-tuned model says of examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fasttfm.data.answers import Predictions, predict_answers
from fasttfm.data.squad import SquadData
from fasttfm.data.task_batches import Examples, evaluation_batches
from fasttfm.data.task_inputs import Window
from fasttfm.decoding.batches import evaluating


def score_examples(
    model: Any,
    examples: Examples,
    *,
    max_tokens: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    rank: int = 0,
    size: int = 1,
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """(Their indices, their scores, their labels) of one batch of examples after the other.

    Scores are float32 on the CPU: (2, B, S) of a models.heads.Answerer, (B, C) of a classifier. autocast: the type of
    matrix products, None for the weights' own. rank, size: every size-th batch, from number rank. The model's mode is
    put back.
    """
    with evaluating(model, device, autocast):
        for indices, batch in evaluation_batches(examples, max_tokens)[rank::size]:
            yield indices, model(batch.to(device)).float().cpu(), batch.labels


def answers_of(
    data: SquadData, windows: list[Window], scored: list[tuple[np.ndarray, torch.Tensor]], max_answer: int
) -> Predictions:
    """The answers to all questions, from the scores of all their windows in any order."""
    by_window: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0), np.empty(0))] * len(windows)
    for indices, scores in scored:
        for row, index in enumerate(indices):
            by_window[index] = scores[0, row].numpy(), scores[1, row].numpy()
    return predict_answers(data, windows, by_window, max_answer=max_answer)
