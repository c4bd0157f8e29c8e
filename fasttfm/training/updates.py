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
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch
from fasttfm.training import graphs
from fasttfm.training.arrivals import Arrivals
from fasttfm.training.optimization import Optimization, rate_dtype
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
    """Updates that changed the weights, once their norms have arrived."""
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
    """Skipped updates since the last one that changed the weights."""

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
    """Pairs or rows of the batch, by their places in the prepared data."""


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
        from_graphs = config.cuda_graph and device.type in graphs.DEVICES
        self.uncaptured = graphs.why_uncaptured(self.module, batches, config, workers) if from_graphs else None
        """Why updates that are asked for as CUDA graphs are none."""
        self._graphs = (
            graphs.Graphs(device, "an update", "give --no-cuda-graph")
            if from_graphs and self.uncaptured is None
            else None
        )
        model.checkpoint_activations(config.checkpoint_activations)
        if self.is_sharded:
            shard(self.module, device, self.workers.size)
        self.optimization = Optimization(self.module, config, device, self.workers, captured=self._graphs is not None)
        self.position = Position()
        self.learning_rate = 0.0
        """Of the last update."""
        self.sums = Sums()
        # loss, nll, gradient norm and target tokens of the updates that were not skipped add up on the device and are
        # read when a line of the log is due, never in between
        self.totals = torch.zeros(4, dtype=torch.float64, device=device)
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Loss and nll of the running update."""
        self._is_single = config.update_freq == 1 and workers.size == 1
        """Whether an update is of one batch, here alone: its tokens are then known before."""
        # what differs from update to update, where a captured one finds it
        self._share, self._factor, self._norm = torch.zeros(3, dtype=torch.float32, device=device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=device)
        self._lr = torch.zeros((), dtype=rate_dtype(device), device=device)
        self.arrivals = Arrivals()
        self.skipped: list[Skipped] = []
        """Updates that changed nothing, of those whose norms have arrived; whoever tells of them clears it."""
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
        self.arrivals.keep_up()
        torch.manual_seed(_seed(config.seed, position.step, self.workers.rank))
        counts, is_given_up = np.zeros(3), False
        # the same on all ranks; for one alone of the right size for fp16, and exact for a single batch
        divisor = self.batches.max_tokens * config.update_freq if self.workers.size > 1 else 0
        last = last_batch(self.workers.rank, self.workers.size, config.update_freq)
        if self.is_sharded:
            self._share.fill_(1.0 / divisor)
            counts = self._add_gradients_together()
        for index in range(0 if self.is_sharded else config.update_freq):
            is_given_up = index > 0 and is_stopping()
            if is_given_up:
                break
            batch = self.next_batch(index)
            if batch is None:
                continue
            divisor = divisor or batch.target_tokens * config.update_freq
            self._share.fill_(1.0 / divisor)
            if index == last:
                self.optimization.expect_last()
            if self._is_single:
                self._set_step(elapsed, batch.target_tokens)
            self._run(self._update if self._is_single else self._add_gradient, batch)
            counts += _counts(batch)
        self.optimization.add_up_gradients()
        *totals, given_up = self.workers.sum([*counts, is_given_up])
        if given_up:
            self._restore(before)
            return False
        target_tokens, real_cells, cells = map(int, totals)
        if not self._is_single:
            self._set_step(elapsed, target_tokens)
            self._factor.fill_(divisor / target_tokens)
            self._run(self._change_weights, None)
        position.step += 1
        self.arrivals.expect(self._norm, partial(self._judge, position.step, before, self.sums))
        self.sums.updates += 1
        self.sums.target_tokens += target_tokens
        self.sums.real_cells += real_cells
        self.sums.cells += cells
        self.sums.seconds += time.perf_counter() - started
        return True

    def _add_gradients_together(self) -> np.ndarray:
        """The gradients of an update where the ranks exchange weights while they compute; their counts.

        All ranks therefore call the model equally often, if need be for nothing; and none stops before the end.
        """
        given = (self.next_batch(index) for index in range(self.config.update_freq))
        batches = [batch for batch in given if batch is not None]
        calls = int(self.workers.maximum([len(batches)])[0])
        counts = np.zeros(3)
        for batch in batches:
            self._run(self._add_gradient, batch)
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
        is_there = self.device.type == "cpu" or self._graphs is not None  # or is copied into buffers
        return batch if is_there else batch.to(self.device, non_blocking=True)

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

    def numbers(self) -> Tensor:
        """`totals` and the loss scale, 1 where there is none, (5,) float64: what a line of the log is made of."""
        scale = self.optimization.scaler.scale(torch.ones(1, dtype=torch.float32, device=self.device))
        return torch.cat([self.totals, scale.double()])

    def _judge(self, step: int, began: Position, sums: Sums, norm: float) -> None:
        """The gradient norm of update `step`, which began at a position and counts in these sums, has arrived."""
        if math.isfinite(norm):
            self.position.skipped_in_a_row = 0
            return
        self.position.skipped += 1
        self.position.skipped_in_a_row += 1
        sums.updates -= 1
        self.skipped.append(Skipped(step=step, elements=self._elements(began.epoch, began.batch)))

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
        self.totals.copy_(self.totals.new_tensor(values["totals"]))
        if not self.workers.is_first:
            self.totals.zero_()
        self.shapes = {tuple(shape) for shape in values["shapes"]}
        position = dict(values["position"])
        position["best"] = [(tuple(rank), step) for rank, step in position["best"]]
        self.position = Position(**position)

    def _run(self, compute: Callable[[Any], None], batch: TrainingBatch | None) -> None:
        """Compute on a batch, or without one, from a graph where there are any."""
        if self._graphs is None:
            compute(batch)
        else:
            graphs.run_on_batch(self._graphs, compute, cast(Batch | None, batch))
        if batch is not None:
            self.shapes.add(batch.shape)

    def _set_step(self, elapsed: float, target_tokens: int) -> None:
        """Put where the device finds it what the next step of the optimizer depends on."""
        self.learning_rate = learning_rate(self.config, self.model.config.d_model, self.position.step + 1, elapsed)
        self._lr.fill_(self.learning_rate)
        self._tokens.fill_(target_tokens)

    # What a graph may hold: nothing here waits for the device, or depends on a number of the host's that changes

    def _update(self, batch: TrainingBatch) -> None:
        self._add_gradient(batch)
        self._change_weights()

    def _add_gradient(self, batch: TrainingBatch) -> None:
        """Add a batch's gradients and losses to those of the update."""
        loss, nll = self.loss(batch)
        self.optimization.backward(loss, self._share)
        self._losses += torch.stack([loss.detach(), nll.detach()]).double()

    def _change_weights(self, _: None = None) -> None:
        """The optimizer's step, and the sums of what the update has come to."""
        if not self._is_single:
            self.optimization.scale_gradients(self._factor)
        self._norm.copy_(self.optimization.step(self._lr))
        added = torch.stack([*self._losses, self._norm.double(), self._tokens])
        if not self.workers.is_first:
            added[2:] = 0  # the same on all ranks
        self.totals += torch.where(self._norm.isfinite(), added, 0)
        self._losses.zero_()

    def _restore(self, position: Position) -> None:
        self.position.epoch, self.position.batch = position.epoch, position.batch
        self.optimization.forget()
        self._losses.zero_()


def _counts(batch: TrainingBatch) -> np.ndarray:
    """Target tokens, tokens and cells of a batch."""
    return np.array([batch.target_tokens, batch.source_tokens + batch.target_tokens, batch.cells], float)


def _seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a rank's dropout in the update after `step`; so no generator's state has to be saved."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
