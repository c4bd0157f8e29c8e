"""Token rows of task files: questions with contexts, contexts with choices, labelled texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fasttfm_pretraining.data.pairs import LabelledText
from fasttfm_pretraining.data.squad import SquadData
from fasttfm_pretraining.data.swag import Choices
from fasttfm_pretraining.data.task_batches import Examples
from fasttfm_pretraining.data.task_inputs import Markers, Window, join, question_windows

NO_LABEL = 0
"""Placeholder for a missing label; it is not scored."""


def answer_examples(
    data: SquadData, tokenizer: Any, markers: Markers, *, max_length: int, doc_stride: int
) -> tuple[list[Window], Examples]:
    """The windows of all questions, and their examples of one row and two labels each."""
    windows = question_windows(data.questions, tokenizer, markers, max_length=max_length, doc_stride=doc_stride)
    labels = np.array([window.answer for window in windows], np.int64).reshape(-1, 2)
    return windows, Examples([[window.row] for window in windows], labels)


def choice_examples(given: Sequence[Choices], tokenizer: Any, markers: Markers, *, max_length: int) -> Examples:
    """One row per choice: the context, then the choice."""
    rows = []
    for example in given:
        context = tokenizer.encode(example.context)
        rows.append([join(markers, context, tokenizer.encode(choice), max_length) for choice in example.choices])
    return Examples(rows, np.array([NO_LABEL if each.label is None else each.label for each in given], np.int64))


def class_examples(
    given: Sequence[LabelledText], labels: Sequence[int] | None, tokenizer: Any, markers: Markers, *, max_length: int
) -> Examples:
    """One row per text or pair. labels: index of each label; None: unknown."""
    rows = []
    for example in given:
        second = None if example.second is None else tokenizer.encode(example.second)
        rows.append([join(markers, tokenizer.encode(example.first), second, max_length)])
    return Examples(rows, np.array([NO_LABEL] * len(rows) if labels is None else labels, np.int64))
