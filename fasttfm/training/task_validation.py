"""Validation of a fine-tuned model: exact match and F1 of answers, accuracy of choices and classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fasttfm.data.squad import SquadData
from fasttfm.data.squad_scores import evaluate
from fasttfm.data.task_batches import Examples
from fasttfm.data.task_inputs import Window
from fasttfm.decoding.tasks import answers_of, score_examples
from fasttfm.training.workers import ALONE, Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """What one validation found."""

    loss: float
    """Label-smoothed cross entropy per example, in nats."""
    nll: float
    """Without smoothing."""
    numbers: dict[str, float]
    """Name -> value, in percent except of threshold; the first is what decides which checkpoint is best."""
    outputs: Sequence[str] = field(default=())
    """A line an example: what the model says."""

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: the first number, and of equal ones the lower loss."""
        return next(iter(self.numbers.values())), -self.nll

    def record(self) -> dict[str, Any]:
        """The numbers of a line of the log by name."""
        return {"loss": self.loss, "nll": self.nll, **self.numbers}

    def __str__(self) -> str:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in self.numbers.items())
        return f"validation loss {self.nll:.3f}, {shown}"


Judge = Callable[[list[tuple[np.ndarray, torch.Tensor]]], tuple[dict[str, float], list[str]]]
"""From the scores of all examples, by their places, to the numbers and the lines of a TaskScore."""


class TaskValidator:
    """Validates on given examples. Draws no random numbers."""

    def __init__(
        self,
        examples: Examples,
        judge: Judge,
        *,
        max_tokens: int,
        label_smoothing: float,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        """autocast: matrix products' type, None fp32."""
        self.examples, self.judge, self.label_smoothing = examples, judge, label_smoothing
        self._options: dict[str, Any] = {"max_tokens": max_tokens, "device": device, "autocast": autocast}

    def __call__(
        self,
        model: Any,
        workers: Workers = ALONE,
        stoppable: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> TaskScore:
        """As training.protocols.Scorer: each rank takes a part of the batches, all get the score."""
        scored, sums, interrupt = [], np.zeros(2), None
        try:
            with stoppable():
                for places, scores, labels in score_examples(
                    model, self.examples, rank=workers.rank, size=workers.size, **self._options
                ):
                    scored.append((places, scores))
                    sums += [float(part) for part in model.loss_of(scores, labels, self.label_smoothing)]
        except KeyboardInterrupt as raised:
            interrupt = raised
        if workers.sum([interrupt is not None])[0]:  # nobody waits for a rank that has gone on elsewhere
            raise interrupt or KeyboardInterrupt
        loss, nll = (total / len(self.examples) for total in workers.sum(sums.tolist()))
        numbers, outputs = self.judge([each for part in workers.gather(scored) for each in part])
        return TaskScore(loss=loss, nll=nll, numbers=numbers, outputs=outputs)


def answer_judge(data: SquadData, windows: list[Window], max_answer: int) -> Judge:
    """F1 and exact match; of data with impossible questions at the thresholds that are best on these very data."""

    def judge(scored: list[tuple[np.ndarray, torch.Tensor]]) -> tuple[dict[str, float], list[str]]:
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
    """Accuracy; labels (N,) are places in names."""

    def judge(scored: list[tuple[np.ndarray, torch.Tensor]]) -> tuple[dict[str, float], list[str]]:
        chosen = chosen_labels(scored, len(labels))
        return {"accuracy": 100 * float((chosen == labels).mean())}, [names[each] for each in chosen]

    return judge


def chosen_labels(scored: list[tuple[np.ndarray, torch.Tensor]], count: int) -> np.ndarray:
    """(count,) int64: the label with the highest score of each example, by its place."""
    chosen = np.zeros(count, np.int64)
    for places, scores in scored:
        chosen[places] = scores.argmax(dim=-1).numpy()
    return chosen
