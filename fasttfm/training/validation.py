"""Base of validations of all kinds: their scores, ranks that stop together, a model without dropout."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch

from fasttfm.config.training import TrainingConfig
from fasttfm.search.batches import evaluating
from fasttfm.training.precision import autocast_dtype
from fasttfm.training.workers import ALONE, Workers

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Results of one validation; str() of it is for a person."""

    loss: float
    """Training loss per target, in nats; not finite if training has diverged."""
    nll: float
    """Cross entropy per target without smoothing, in nats; what curves are drawn of."""
    outputs: Sequence[str] = ()
    """Lines that the model wrote, which are kept beside the log; may be none."""

    @property
    def perplexity(self) -> float:
        """exp(nll), per target."""
        return math.exp(min(self.nll, 700))

    @property
    def shown_perplexity(self) -> str:
        """The perplexity as printed."""
        return f"{self.perplexity:.2f}" if self.perplexity < 1e6 else f"{self.perplexity:.2e}"

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better."""
        return (0.0, -self.nll)

    def record(self) -> dict[str, Any]:
        """The numbers by name, as a line of the log has them: also those that a subclass adds, where there are any."""
        names = [field.name for field in fields(self) if field.name not in Score.__dataclass_fields__]
        added = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"loss": self.loss, "nll": self.nll, "perplexity": self.perplexity, **added}


def settings_of(recipe: TrainingConfig, device: torch.device) -> dict[str, Any]:
    """Return the settings of a run's DividedValidator: it computes as training does."""
    autocast = autocast_dtype(recipe.precision, device)
    return {"device": device, "label_smoothing": recipe.label_smoothing, "autocast": autocast}


class DividedValidator(ABC, Generic[Part]):
    """Validates a model; the ranks divide the batches among them. It draws no random numbers of the training's."""

    def __init__(
        self, *, device: torch.device, label_smoothing: float = 0.0, autocast: torch.dtype | None = None
    ) -> None:
        """autocast: type of matrix products, None for float32."""
        self.device, self.label_smoothing, self.autocast = device, label_smoothing, autocast

    def __call__(
        self, model: Any, workers: Workers = ALONE, stoppable: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Any:
        """The Score of a model, whose training mode is put back.

        workers: ranks that hold the same weights and call together; each takes a part of the batches, all get the
        score. stoppable: a context in which KeyboardInterrupt may be raised. If it is, all ranks raise it once they
        are done.
        """
        part, interrupt = None, None
        try:
            with stoppable(), evaluating(model, self.device, self.autocast):
                part = self.part(model, workers.rank, workers.size)
        except KeyboardInterrupt as raised:
            interrupt = raised
        if workers.sum([interrupt is not None])[0]:  # nobody waits for a rank that has gone on elsewhere
            raise interrupt or KeyboardInterrupt
        assert part is not None
        return self.score(part, workers)

    @abstractmethod
    def part(self, model: Any, rank: int, size: int) -> Part:
        """Return the measurements of every size-th batch, from number rank; the model is in evaluation mode."""

    @abstractmethod
    def score(self, part: Part, workers: Workers) -> Any:
        """The Score of the parts of all ranks, on each of them."""

    def of_users(self) -> "DividedValidator[Part] | None":
        """One that computes outputs as users will, where this one does not."""
        return None

    def loss_sums(self, model: Any, batches: Iterable[Any]) -> list[float]:
        """Sums of loss and nll over the batches, and their targets."""
        sums, targets = torch.zeros(2, dtype=torch.float64, device=self.device), 0
        for batch in batches:
            sums += torch.stack(model.batch_loss(batch, label_smoothing=self.label_smoothing)).double()
            targets += batch.target_tokens
        return [*sums.tolist(), targets]
