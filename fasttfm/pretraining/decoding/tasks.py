"""Answers of a fine-tuned model for examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fasttfm.pretraining.data.answers import Predictions, predict_answers
from fasttfm.pretraining.data.squad import SquadData
from fasttfm.pretraining.data.task_batches import TaskBatch
from fasttfm.pretraining.data.task_inputs import Window


def score_examples(
    model: Any, batches: Iterable[tuple[np.ndarray, TaskBatch]], device: torch.device
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """(Their indices, their scores, their labels) of the examples of one batch after the other.

    batches: of evaluation_batches(), with a model in evaluation mode (decoding.batches.evaluating). Scores are float32
    on the CPU: (2, B, S) of a models.heads.Answerer, (B, C) of a classifier.
    """
    for indices, batch in batches:
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
