"""Model inputs of task texts: tokens between markers, and overlapping windows over long contexts.

BERT joins a pair as [CLS] first [SEP] second [SEP], GPT-1 as start first delimiter second extract; a single text leaves
out the middle marker. In both the task's head reads one place: BERT's the first, GPT's the last.
Source: Devlin et al. 2019, section 3; Radford et al. 2018, section 3.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasttfm_pretraining.data.squad import Question

_LONGEST_QUESTION = 64


@dataclass(frozen=True, slots=True)
class Markers:
    """Marker tokens around texts."""

    begin: int
    """[CLS], or GPT's start."""
    between: int
    """[SEP], or GPT's delimiter."""
    end: int
    """[SEP], or GPT's extract."""
    separators: int = 1
    """Number of `between` tokens between two texts; 2 for RoBERTa."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence."""

    tokens: np.ndarray
    """(S,) int64, markers included."""
    second: int
    """Start of the second text and of segment 1; S if there is none."""


def join(markers: Markers, first: Sequence[int], second: Sequence[int] | None, max_length: int) -> Row:
    """One row of at most max_length tokens; the longer text is truncated token by token."""
    parts = [list(first), list(second or ())]
    extra = len(parts[0]) + len(parts[1]) + (2 if second is None else 2 + markers.separators) - max_length
    for _ in range(max(extra, 0)):
        parts[len(parts[1]) > len(parts[0])].pop()
    row = [markers.begin, *parts[0]]
    if second is None:
        return Row(np.array([*row, markers.end], np.int64), len(row) + 1)
    row += [markers.between] * markers.separators
    return Row(np.array([*row, *parts[1], markers.end], np.int64), len(row))


@dataclass(frozen=True, slots=True)
class Window:
    """A question with a part of its context."""

    question: int
    """Index of the question."""
    row: Row
    spans: np.ndarray
    """(context tokens here, 2) int64: character span of each token in the context."""
    best: np.ndarray
    """(context tokens here,) bool: whether this window shows the token with maximum context."""
    answer: tuple[int, int]
    """Positions of the answer's first and last token; (0, 0), the first marker, if it is not in this window."""

    @property
    def first(self) -> int:
        """Position in the row where the context begins."""
        return self.row.second


def answer_tokens(spans: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """First and last token that overlap characters [start, end). spans (tokens, 2): character spans."""
    first = int(np.argmax(spans[:, 1] > start))
    while first and spans[first - 1, 0] == spans[first - 1, 1] == spans[first, 0]:
        first -= 1  # the other bytes of a character that is spelt in bytes
    return first, int(np.flatnonzero(spans[:, 0] < end)[-1])


def question_windows(
    questions: Sequence[Question], tokenizer: Any, markers: Markers, *, max_length: int, doc_stride: int
) -> list[Window]:
    """Windows of every question over its context; consecutive windows start doc_stride tokens apart.

    max_length: tokens of a row. Questions are truncated to 64 tokens. A window without the whole answer has no answer.
    """
    windows = []
    contexts: dict[str, tuple[list[int], np.ndarray]] = {}
    for index, question in enumerate(questions):
        if question.context not in contexts:
            ids, offsets = tokenizer.encode_with_spans(question.context)
            contexts[question.context] = ids, np.array(offsets, np.int64).reshape(-1, 2)
        tokens, spans = contexts[question.context]
        asked = tokenizer.encode(question.text)[: min(_LONGEST_QUESTION, max_length // 2)]
        width = max_length - len(asked) - 2 - markers.separators
        first, last = -1, -1
        if question.answers and len(tokens):
            answer = question.answers[0]
            first, last = answer_tokens(spans, answer.start, answer.start + len(answer.text))
        begins = _window_begins(len(tokens), width, doc_stride)
        owner = _owners(len(tokens), width, begins)
        for number, begin in enumerate(begins):
            end = min(begin + width, len(tokens))
            row = join(markers, asked, tokens[begin:end], max_length)
            holds = first >= begin and last < end and question.answers
            answer_span = (first - begin + row.second, last - begin + row.second) if holds else (0, 0)
            windows.append(Window(index, row, spans[begin:end], owner[begin:end] == number, answer_span))
    return windows


def _window_begins(tokens: int, width: int, stride: int) -> list[int]:
    begins = [0]
    while begins[-1] + width < tokens:
        begins.append(begins[-1] + min(stride, width))
    return begins


def _owners(tokens: int, width: int, begins: list[int]) -> np.ndarray:
    """(tokens,): maximum-context window of each token (most context on its shorter side; ties: longer windows)."""
    best, owner = np.full(tokens, -np.inf), np.zeros(tokens, np.int64)
    for number, begin in enumerate(begins):
        end = min(begin + width, tokens)
        inside = np.arange(begin, end)
        scores = np.minimum(inside - begin, end - 1 - inside) + 0.01 * (end - begin)
        shows_more = scores > best[begin:end]  # of equal ones the first window
        best[begin:end][shows_more] = scores[shows_more]
        owner[begin:end][shows_more] = number
    return owner
