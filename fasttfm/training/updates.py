"""Updates of the weights: batches in their order, gradients added up over them, one step of the optimizer.

Everything that decides the next update is the weights, the optimizer's moments, the update's number, the position
(epoch, batch) in the data and the number of ranks. `tensors` and `values` are all of it, so that on the CPU a run that
was killed and started again ends in the same bits as one that was not. An update is of the same batches whatever the
number of ranks, among which it is divided.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch, TokenBatches
from fasttfm.errors import UserError
from fasttfm.training.graphs import GraphedPasses
from fasttfm.training.optimization import Optimization
from fasttfm.training.precision import autocast_dtype
from fasttfm.training.protocols import TrainableModel, TrainingBatch, TrainingBatches
from fasttfm.training.read_ahead import Place, ReadAhead
from fasttfm.training.schedule import learning_rate
from fasttfm.training.sharding import shard
from fasttfm.training.workers import ALONE, Workers, last_batch


@dataclass(kw_only=True, slots=True)
class Sums:
    """Sums since the last line of the log, over all ranks; saved, so that a resumed run writes the same
    line."""

    updates: int = 0
    """Those that changed something, once skipped() has looked at them."""
    target_tokens: int = 0
    real_cells: int = 0
    cells: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Position:
    """Position of the run; the part of the state that is plain numbers."""

    step: int = 0
    """Updates done."""
    epoch: int = 0
    """Passes over the data that are complete."""
    batch: int = 0
    """Batches of the current pass that are used up, by all ranks together."""
    seconds: float = 0.0
    """Time spent by earlier sessions."""
    validated: int = 0
    """Step of the last validation."""
    worse: int = 0
    """Validations since the best one."""
    best: list[tuple[tuple[float, float], int]] = field(default_factory=list)
    """(rank, step) of the best checkpoints, best first."""
    skipped: int = 0
    """Updates that changed nothing, because their gradient was not finite."""
    skipped_in_a_row: int = 0
    """Those since the last one that did change something."""

    @property
    def first_skipped(self) -> int | None:
        """The first of them; None where the last update did change something."""
        return self.step - self.skipped_in_a_row + 1 if self.skipped_in_a_row else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """An update that changed nothing, because its gradient was not finite."""

    step: int
    """Its number."""
    elements: list[int]
    """What it was computed from (pairs, rows), by their places in the prepared data."""


class Updates:
    """Changes a model by batch after batch."""

    def __init__(
        self,
        model: TrainableModel,
        batches: TrainingBatches,
        config: TrainingConfig,
        device: torch.device,
        workers: Workers = ALONE,
    ) -> None:
        """workers: the ranks that divide each update among them."""
        self.model = model
        self.module = cast(nn.Module, model)
        """The same object."""
        self.workers = workers
        self.batches = batches
        self.config = config
        self.device = device
        self.autocast = autocast_dtype(config.precision, device)
        self.is_sharded = config.shard and self.workers.size > 1
        model.checkpoint_activations(config.checkpoint_activations)
        if self.is_sharded:
            shard(self.module, device, self.workers.size)
        self.optimization = Optimization(self.module, config, device, self.workers)
        self.position = Position()
        self.learning_rate = 0.0
        """Of the last update."""
        self.sums = Sums()
        # loss, nll, gradient norm and target tokens of the updates that were not skipped add up on the device and are
        # read when a line of the log is due, never in between
        self.totals = torch.zeros(4, dtype=torch.float64, device=device)
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Loss and nll of the running update."""
        self._graphs = self._graphed() if config.cuda_graph else None
        self._unread: list[tuple[int, int, int, Tensor]] = []
        """Update, epoch, first batch and gradient norm of updates that nobody has looked at."""
        self.shapes: set[tuple[int, ...]] = set()
        """Shapes of all batches of this rank so far: each costs time and memory when it is new."""
        self._read_ahead = ReadAhead(batches, config.update_freq, workers.rank, workers.size)

    def perform(self, is_stopping: Callable[[], bool] = lambda: False, elapsed: float = 0.0) -> bool:
        """One update. Returns False, with everything as it was before, when `is_stopping` between two batches.

        elapsed: seconds since the run began, the same on all ranks, for a learning rate that goes by the clock.

        The gradient is that of the mean loss over all target tokens of the update, whichever batch and rank they are
        of. Batches are drawn one at a time, so that their tokens are known at the end only.
        """
        started = time.perf_counter()
        config, position = self.config, self.position
        before = replace(position)
        self._losses.zero_()
        torch.manual_seed(_seed(config.seed, position.step, self.workers.rank))
        counts, is_given_up = np.zeros(3), False
        # the same on all ranks; for one alone of the right size for fp16, and exact for a single batch
        divisor = self.batches.max_tokens * config.update_freq if self.workers.size > 1 else 0
        last = last_batch(self.workers.rank, self.workers.size, config.update_freq)
        if self.is_sharded:
            counts = self._add_gradients_together(divisor)
        for index in range(0 if self.is_sharded else config.update_freq):
            is_given_up = index > 0 and is_stopping()
            if is_given_up:
                break
            batch = self.next_batch(index)
            if batch is None:
                continue
            divisor = divisor or batch.target_tokens * config.update_freq
            if index == last:
                self.optimization.expect_last()
            self._add_gradient(batch, divisor)
            counts += _counts(batch)
        self.optimization.add_up_gradients()
        *totals, given_up = self.workers.sum([*counts, is_given_up])
        if given_up:
            self._restore(before)
            return False
        target_tokens, real_cells, cells = map(int, totals)
        self.optimization.scale_gradients(divisor / target_tokens)
        position.step += 1
        self.learning_rate = learning_rate(config, self.model.config.d_model, position.step, elapsed)
        norm = self.optimization.step(self.learning_rate)
        added = torch.stack([*self._losses, norm.double(), torch.full_like(norm, target_tokens, dtype=torch.float64)])
        if not self.workers.is_first:
            added[2:] = 0  # the same on all ranks
        self.totals += torch.where(norm.isfinite(), added, 0)
        self._unread.append((position.step, before.epoch, before.batch, norm))
        self.sums.updates += 1
        self.sums.target_tokens += target_tokens
        self.sums.real_cells += real_cells
        self.sums.cells += cells
        self.sums.seconds += time.perf_counter() - started
        return True

    def _add_gradients_together(self, divisor: int) -> np.ndarray:
        """The gradients of an update where the ranks exchange weights while they compute; their counts.

        All ranks therefore call the model equally often, if need be for nothing; and none stops before the end.
        """
        given = (self.next_batch(index) for index in range(self.config.update_freq))
        batches = [batch for batch in given if batch is not None]
        calls = int(self.workers.maximum([len(batches)])[0])
        counts = np.zeros(3)
        for batch in batches:
            self._add_gradient(batch, divisor)
            counts += _counts(batch)
        for _ in range(calls - len(batches)):
            loss, _ = self.loss(self.batches.batch(self.batches.largest()[:1]).to(self.device))
            self.optimization.backward(loss * 0)
        return counts

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Label-smoothed and plain loss of a batch, summed over its target tokens, 0-d each."""
        config = self.config
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.model.batch_loss(batch, label_smoothing=config.label_smoothing, packed=config.packed)

    def next_batch(self, index: int = 0) -> TrainingBatch | None:
        """This rank's rows of the batch at the current position, on the device; None when it has none of them.

        index: of the batch among those of its update.
        """
        position = self.position
        made = self._read_ahead.get(Place(position.epoch, position.batch, index))
        position.epoch, position.batch, _ = made.following
        batch = made.rows
        if batch is None:
            return None
        return batch if self.device.type == "cpu" else batch.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Stop reading ahead; another update begins it again."""
        self._read_ahead.close()

    def rehearse(self) -> None:
        """Run the largest batch without effect: if memory does not suffice, better now than hours later."""
        indices = self.batches.largest()
        size = self.workers.size
        indices = indices[: -(-len(indices) * min(self.config.update_freq, size) // size)]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            loss, _ = self.loss(self.batches.batch(indices).to(self.device))
            loss.backward()
        self.optimization.forget()

    def add_up_totals(self) -> None:
        """Let rank 0 have the sum of all ranks' `totals`, and the others nothing; every rank must call it."""
        self.workers.add_up(self.totals)
        if not self.workers.is_first:
            self.totals.zero_()

    def skipped(self) -> list[Skipped]:
        """The updates since the last call that changed nothing, because their gradient was not finite.

        Waits for the device.
        """
        unread, self._unread = self._unread, []
        skipped = []
        for (step, epoch, first, _), norm in zip(
            unread, torch.stack([n for *_, n in unread]).tolist() if unread else []
        ):
            if math.isfinite(norm):
                self.position.skipped_in_a_row = 0
                continue
            self.position.skipped += 1
            self.sums.updates -= 1
            self.position.skipped_in_a_row += 1
            skipped.append(Skipped(step=step, elements=self._elements(epoch, first)))
        return skipped

    def _elements(self, epoch: int, first: int) -> list[int]:
        """The elements of the update that began with batch number `first` of an epoch, as they stand in the data."""
        elements: list[int] = []
        for _ in range(self.config.update_freq):
            order = self.batches.epoch(epoch)
            elements += order[first].tolist()
            epoch, first = (epoch, first + 1) if first + 1 < len(order) else (epoch + 1, 0)
        return elements

    def forget_sums(self) -> None:
        """Begin a new line of the log."""
        self.sums = Sums()
        self.totals.zero_()

    # State

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's."""
        return self.optimization.tensors()

    def values(self, seconds: float) -> dict[str, Any]:
        """Return the part of the state that is not a tensor; seconds: time spent so far, earlier sessions included."""
        return {
            **self.optimization.values(),
            "position": {**asdict(self.position), "seconds": seconds},
            "sums": asdict(self.sums),
            "totals": self.totals.tolist(),
            "shapes": sorted(self.shapes),
            "workers": self.workers.size,
        }

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take up what tensors() and values() gave. The model holds the saved weights.

        Raises KeyError, TypeError, ValueError or RuntimeError for the state of another run.
        """
        self.optimization.load(tensors, values)
        self.sums = Sums(**values["sums"])
        self.totals = torch.tensor(values["totals"], dtype=torch.float64, device=self.device)
        if not self.workers.is_first:
            self.totals.zero_()
        self.shapes = {tuple(shape) for shape in values["shapes"]}
        position = dict(values["position"])
        position["best"] = [(tuple(rank), step) for rank, step in position["best"]]
        self.position = Position(**position)

    def _graphed(self) -> GraphedPasses:
        if not isinstance(self.batches, TokenBatches) or self.workers.size > 1:
            raise UserError("--cuda-graph is for translation by one worker: leave it out, or give --workers 1 on a CPU")
        return GraphedPasses(self._run_pass, self.optimization.parameters, self._losses)

    def _add_gradient(self, batch: TrainingBatch, divisor: int) -> None:
        if self._graphs is not None:
            self._graphs(cast(Batch, batch), divisor)
        else:
            self._run_pass(batch, divisor)
        self.shapes.add(batch.shape)

    def _run_pass(self, batch: TrainingBatch, divisor: int | Tensor) -> None:
        """Add a batch's gradients and losses to those of the update; nothing here waits for the device."""
        loss, nll = self.loss(batch)
        self.optimization.backward(loss / divisor)
        self._losses += torch.stack([loss.detach(), nll.detach()]).double()

    def _restore(self, position: Position) -> None:
        self.position.epoch, self.position.batch = position.epoch, position.batch
        self.optimization.forget()


def _counts(batch: TrainingBatch) -> np.ndarray:
    """Target tokens, tokens and cells of a batch."""
    return np.array([batch.target_tokens, batch.source_tokens + batch.target_tokens, batch.cells], float)


def _seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a rank's dropout in the update after `step`; so no generator's state has to be saved."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
