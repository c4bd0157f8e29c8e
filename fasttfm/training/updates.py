"""Updates of the weights: batches in their order, gradients added up over them, one step of the optimizer.

Everything that decides the next update is the weights, the optimizer's moments, torch's generators, the update's number
and the position (epoch, batch) in the data. `tensors` and `values` are all of it, so that on the CPU a run that was
killed and started again ends in the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch, TokenBatches
from fasttfm.training.optimization import Optimization, generator_states, restore_generators
from fasttfm.training.schedule import learning_rate

if TYPE_CHECKING:
    from fasttfm.models import Transformer

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True, slots=True)
class Sums:
    """What was added up since the last line of the log; saved, so that a resumed run writes the same line."""

    updates: int = 0
    target_tokens: int = 0
    real_cells: int = 0
    cells: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Position:
    """Where the run stands; the part of the state that is plain numbers."""

    step: int = 0
    """Updates done."""
    epoch: int = 0
    """Passes over the data that are complete."""
    batch: int = 0
    """Batches of the current pass that are used up."""
    seconds: float = 0.0
    """Time spent by earlier sessions."""
    validated: int = 0
    """Step of the last validation."""
    worse: int = 0
    """Validations since the best one."""
    best: list[tuple[tuple[float, float], int]] = field(default_factory=list)
    """(rank, step) of the best checkpoints, best first."""


class Updates:
    """Changes a model by batch after batch."""

    def __init__(self, model: Transformer, batches: TokenBatches, config: TrainingConfig, device: torch.device) -> None:
        self.model = model
        self.batches = batches
        self.config = config
        self.device = device
        self.autocast = AUTOCAST[config.precision]
        self.optimization = Optimization(model, config, device)
        self.position = Position()
        self.sums = Sums()
        # loss, nll and gradient norm add up on the device and are read when a line of the log is due, never in between
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.shapes: set[tuple[int, ...]] = set()
        """Shapes of all batches so far: each costs time and memory when it is new."""
        self._order = batches.epoch(0)

    def perform(self, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """One update. Returns False, with everything as it was before, when `is_stopping` between two batches.

        The gradient is that of the mean loss over all target tokens of the update, whichever batch they are in. Batches
        are drawn one at a time, so that their tokens are known at the end only.
        """
        started = time.perf_counter()
        config, position = self.config, self.position
        before = self._snapshot() if config.update_freq > 1 else None
        target_tokens, divisor = 0, 0
        for index in range(config.update_freq):
            if index and is_stopping():
                assert before is not None
                self._restore(before)
                return False
            batch = self.next_batch()
            target_tokens += batch.target_tokens
            # of the right size for fp16, and exact for a single batch
            divisor = divisor or batch.target_tokens * config.update_freq
            self._add_gradient(batch, divisor)
        if target_tokens != divisor:
            self.optimization.scale_gradients(divisor / target_tokens)
        position.step += 1
        norm = self.optimization.step(learning_rate(config, self.model.config.d_model, position.step))
        if norm is not None:
            self.totals[2] += norm
        self.sums.updates += 1
        self.sums.target_tokens += target_tokens
        self.sums.seconds += time.perf_counter() - started
        return True

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Label-smoothed and plain loss of a batch, summed over its target tokens, 0-d each."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss, nll, _ = self.model.loss(
                batch.source,
                batch.target_in,
                batch.target_out,
                batch.source_lengths,
                batch.target_lengths,
                label_smoothing=self.config.label_smoothing,
                packed_tokens=(batch.source_tokens, batch.target_tokens) if self.config.packed else None,
            )
        return loss, nll

    def next_batch(self) -> Batch:
        """The batch at the current position, on the device."""
        position = self.position
        batch = self.batches.batch(self._order[position.batch], position.epoch)
        position.batch += 1
        if position.batch == len(self._order):
            position.epoch, position.batch = position.epoch + 1, 0
            self._order = self.batches.epoch(position.epoch)
        return batch if self.device.type == "cpu" else batch.to(self.device, non_blocking=True)

    def rehearse(self) -> None:
        """Run the largest batch without effect: if memory does not suffice, better now than hours later."""
        generators = generator_states(self.device)
        loss, _ = self.loss(self.batches.batch(self.batches.largest()).to(self.device))
        loss.backward()
        self.optimization.forget()
        restore_generators(generators, self.device)

    def forget_sums(self) -> None:
        """Begin a new line of the log."""
        self.sums = Sums()
        self.totals.zero_()

    # State

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer and generators."""
        return {**self.optimization.tensors(), **generator_states(self.device)}

    def values(self, seconds: float) -> dict[str, Any]:
        """What is no tensor; seconds: time spent so far, earlier sessions included."""
        return {
            **self.optimization.values(),
            "position": {**asdict(self.position), "seconds": seconds},
            "sums": asdict(self.sums),
            "totals": self.totals.tolist(),
            "shapes": sorted(self.shapes),
        }

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take up what tensors() and values() gave. The model holds the saved weights.

        Raises KeyError, TypeError, ValueError or RuntimeError for the state of another run.
        """
        self.optimization.load(tensors, values)
        restore_generators(tensors, self.device)
        self.sums = Sums(**values["sums"])
        self.totals = torch.tensor(values["totals"], dtype=torch.float64, device=self.device)
        self.shapes = {tuple(shape) for shape in values.get("shapes", [])}
        position = dict(values["position"])
        position["best"] = [(tuple(rank), step) for rank, step in position["best"]]
        self.position = Position(**position)
        self._order = self.batches.epoch(self.position.epoch)

    def _add_gradient(self, batch: Batch, divisor: int) -> None:
        loss, nll = self.loss(batch)
        self.optimization.backward(loss / divisor)
        self.totals[0] += loss.detach()
        self.totals[1] += nll
        self.sums.real_cells += batch.source_tokens + batch.target_tokens
        self.sums.cells += batch.source.numel() + batch.target_in.numel()
        self.shapes.add(batch.shape)

    def _snapshot(self) -> tuple[Any, ...]:
        """All that an update changes before the optimizer's step."""
        return replace(self.position), replace(self.sums), self.totals.clone(), generator_states(self.device)

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        position, self.sums, self.totals, generators = snapshot
        if position.epoch != self.position.epoch:
            self._order = self.batches.epoch(position.epoch)
        self.position.epoch, self.position.batch = position.epoch, position.batch
        restore_generators(generators, self.device)
        self.optimization.forget()
