"""Scores and answers of a fine-tuned model, and its validation: exact match and F1, accuracy of choices and classes."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fasttfm.training.validation import DividedValidator, Score
from fasttfm.training.workers import Workers
from fasttfm_pretraining.data.answers import Predictions, predict_answers
from fasttfm_pretraining.data.squad import SquadData
from fasttfm_pretraining.data.squad_scores import evaluate
from fasttfm_pretraining.data.task_batches import Examples, TaskBatch, evaluation_batches
from fasttfm_pretraining.data.task_inputs import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore(Score):
    """Results of one validation, per example; `outputs` has one line of prediction per example."""

    numbers: dict[str, float]
    """Metrics by name, in percent except threshold; the first one selects the best checkpoint."""

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: the first metric, then the lower loss."""
        return next(iter(self.numbers.values())), -self.nll

    def record(self) -> dict[str, Any]:
        """The values of a log line by name."""
        return {"loss": self.loss, "nll": self.nll, **self.numbers}

    def __str__(self) -> str:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in self.numbers.items())
        return f"validation loss {self.nll:.3f}, {shown}"


Scored = list[tuple[np.ndarray, torch.Tensor]]
"""Scores of batches, each with the indices of its examples."""

Judge = Callable[[Scored], tuple[dict[str, float], list[str]]]
"""Computes metrics and output lines of a TaskScore from the scores of all examples."""


class TaskValidator(DividedValidator[tuple[Scored, np.ndarray]]):
    """Validates on fixed examples. Draws no random numbers."""

    def __init__(self, examples: Examples, judge: Judge, *, max_tokens: int, **settings: Any) -> None:
        """settings: as DividedValidator takes them."""
        super().__init__(**settings)
        self.examples, self.judge, self.max_tokens = examples, judge, max_tokens

    def part(self, model: Any, rank: int, size: int) -> tuple[Scored, np.ndarray]:
        """The scores of a rank's batches, and (2,) sums of loss and nll."""
        scored, sums = [], np.zeros(2)
        batches = evaluation_batches(self.examples, self.max_tokens)[rank::size]
        for numbers, scores, labels in score_examples(model, batches, self.device):
            scored.append((numbers, scores))
            sums += [float(each) for each in model.loss_of(scores, labels, self.label_smoothing)]
        return scored, sums

    def score(self, part: tuple[Scored, np.ndarray], workers: Workers) -> TaskScore:
        """The score over all examples."""
        scored, sums = part
        loss, nll = (total / len(self.examples) for total in workers.sum(sums.tolist()))
        numbers, outputs = self.judge([each for batches in workers.gather(scored) for each in batches])
        return TaskScore(loss=loss, nll=nll, numbers=numbers, outputs=outputs)


def answer_judge(data: SquadData, windows: list[Window], max_answer: int) -> Judge:
    """F1 and exact match; with unanswerable questions, at the thresholds that are best on these data."""

    def judge(scored: Scored) -> tuple[dict[str, float], list[str]]:
        predictions = answers_of(data, windows, scored, max_answer)
        if not data.may_be_impossible:
            score = evaluate(data, predictions.answers).all
            numbers, answers = {"f1": score.f1, "exact": score.exact}, predictions.answers
        else:
            report = evaluate(data, predictions.answers, predictions.null_scores)
            assert report.best_f1 is not None
            assert report.best_exact is not None
            numbers = {"f1": report.best_f1[0], "exact": report.best_exact[0], "threshold": report.best_f1[1]}
            answers = predictions.texts(numbers["threshold"])
        return numbers, [json.dumps({each: text}, ensure_ascii=False) for each, text in answers.items()]

    return judge


def label_judge(labels: np.ndarray, names: Sequence[str]) -> Judge:
    """Accuracy. labels (N,): indices into names."""

    def judge(scored: Scored) -> tuple[dict[str, float], list[str]]:
        chosen = chosen_labels(scored, len(labels))
        return {"accuracy": 100 * float((chosen == labels).mean())}, [names[each] for each in chosen]

    return judge


def chosen_labels(scored: Scored, count: int) -> np.ndarray:
    """(count,) int64: highest-scoring label of each example."""
    chosen = np.zeros(count, np.int64)
    for numbers, scores in scored:
        chosen[numbers] = scores.argmax(dim=-1).numpy()
    return chosen


def score_examples(
    model: Any, batches: Iterable[tuple[np.ndarray, TaskBatch]], device: torch.device
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """Yields (indices, scores, labels) of the examples of each batch.

    batches: of evaluation_batches(), with a model in evaluation mode (decoding.batches.evaluating). Scores are float32
    on the CPU: (2, B, S) of a models.heads.Answerer, (B, C) of a classifier.
    """
    for indices, batch in batches:
        yield indices, model(batch.to(device)).float().cpu(), batch.labels


def answers_of(data: SquadData, windows: list[Window], scored: Scored, max_answer: int) -> Predictions:
    """Answers to all questions from the scores of their windows, in any order."""
    by_window: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0), np.empty(0))] * len(windows)
    for indices, scores in scored:
        for row, index in enumerate(indices):
            by_window[index] = scores[0, row].numpy(), scores[1, row].numpy()
    return predict_answers(data, windows, by_window, max_answer=max_answer)
