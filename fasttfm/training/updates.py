"""Weight updates: accumulate gradients over batches, then one optimizer step.

The next update depends on the weights, the optimizer's moments, the update number, the position (epoch, batch) in the
data and the number of ranks only. Updates.tensors() and values() hold all of it, so on a CPU a killed and resumed run
ends in the same bits as an uninterrupted one. The batches of an update do not depend on the number of ranks.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

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
    """Sums since the last log record, over all ranks; part of the saved state."""

    updates: int = 0
    """Updates that were not skipped, once their norms have arrived."""
    target_tokens: int = 0
    real_cells: int = 0
    cells: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Position:
    """Position of the run: its state in plain numbers."""

    step: int = 0
    """Completed updates."""
    epoch: int = 0
    """Completed epochs."""
    batch: int = 0
    """Batches of the current epoch that were used, by all ranks together."""
    seconds: float = 0.0
    """Time spent by earlier sessions."""
    validated: int = 0
    """Step of the last validation."""
    worse: int = 0
    """Validations since the best one."""
    best: list[tuple[tuple[float, float], int]] = field(default_factory=list)
    """(rank, step) of the best checkpoints, best first."""
    skipped: int = 0
    """Updates skipped because of a non-finite gradient."""
    skipped_in_a_row: int = 0

    @property
    def first_skipped(self) -> int | None:
        """Step of the first of the last skipped updates, or None if the last update was not skipped."""
        return self.step - self.skipped_in_a_row + 1 if self.skipped_in_a_row else None


class Skipped(NamedTuple):
    """An update skipped because of a non-finite gradient."""

    step: int
    elements: list[int]
    """Indices of the batch's pairs or rows in the prepared data."""


class Updates:
    """Performs the updates of a model."""

    def __init__(
        self, model: TrainableModel, batches: TrainingBatches, config: TrainingConfig, device: torch.device,
        workers: Workers = ALONE,
    ) -> None:  # fmt: skip
        """workers: the ranks that share each update."""
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
        """Why updates are not captured in CUDA graphs, if requested."""
        is_captured = from_graphs and self.uncaptured is None
        self._graphs = graphs.Graphs(device, "an update", "give --no-cuda-graph") if is_captured else None
        model.checkpoint_activations(config.checkpoint_activations)
        if self.is_sharded:
            shard(self.module, device, self.workers.size)
        self.optimization = Optimization(self.module, config, device, self.workers, captured=self._graphs is not None)
        self.position = Position()
        self.learning_rate = 0.0
        """Of the last update."""
        self.sums = Sums()
        # sums of loss, nll, gradient norm and target tokens of updates not skipped, read only for a log record
        self.totals = torch.zeros(4, dtype=torch.float64, device=device)
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Loss and nll of the current update."""
        self._is_single = config.update_freq == 1 and workers.size == 1
        """Whether an update is one batch on one rank, whose number of tokens is known in advance."""
        # inputs of a captured update that change between replays
        self._share, self._factor, self._norm = torch.zeros(3, dtype=torch.float32, device=device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=device)
        self._lr = torch.zeros((), dtype=rate_dtype(device), device=device)
        self.arrivals = Arrivals()
        self.skipped: list[Skipped] = []
        """Skipped updates whose norms have arrived; cleared by the trainer once reported."""
        self.shapes: set[tuple[int, ...]] = set()
        """Shapes of this rank's batches so far; each new one costs time and memory."""
        self._read_ahead = ReadAhead(batches, config.update_freq, workers.rank, workers.size)

    def perform(self, is_stopping: Callable[[], bool] = lambda: False, elapsed: float = 0.0) -> bool:
        """Perform one update; if `is_stopping` between two batches, undo it and return False.

        elapsed: seconds since the run began, the same on all ranks, for time-based schedules. The gradient is that of
        the mean loss over all target tokens of the update, on all ranks; their number is known only after the last
        batch was drawn.
        """
        started = time.perf_counter()
        config, position = self.config, self.position
        before = replace(position)
        self.arrivals.keep_up()
        torch.manual_seed(_seed(config.seed, position.step, self.workers.rank))
        counts, is_given_up = np.zeros(3), False
        # the same on all ranks; on a single rank, of a size that suits fp16, and exact for a single batch
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
            divisor = divisor or max(1, batch.target_tokens) * config.update_freq  # a batch may have no target
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
            self._factor.fill_(divisor / max(1, target_tokens))
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
        """Accumulate the gradients of an update with a sharded model; returns the counts of this rank's batches.

        Ranks exchange weights during computation, so all call the model equally often, some on a dummy batch, and none
        stops early.
        """
        drawn = (self.next_batch(index) for index in range(self.config.update_freq))
        batches = [batch for batch in drawn if batch is not None]
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
        """Label-smoothed and plain loss of a batch, each 0-d and summed over target tokens."""
        config = self.config
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.model.batch_loss(batch, label_smoothing=config.label_smoothing, packed=config.packed)

    def next_batch(self, index: int = 0) -> TrainingBatch | None:
        """Draw this rank's rows of the next batch, on the device; None if it has none. index: within the update."""
        position = self.position
        batch, following = self._read_ahead.get(Place(position.epoch, position.batch, index))
        position.epoch, position.batch, _ = following
        if batch is None or self.device.type == "cpu" or self._graphs is not None:  # graphs copy it into buffers
            return batch
        return batch.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Stop reading ahead; another update restarts it."""
        self._read_ahead.close()

    def rehearse(self) -> None:
        """Run the largest batch without effect, so that insufficient memory fails at the start."""
        indices = self.batches.largest()
        size = self.workers.size
        indices = indices[: -(-len(indices) * min(self.config.update_freq, size) // size)]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            loss, _ = self.loss(self.batches.batch(indices).to(self.device))
            loss.backward()
        self.optimization.forget()

    def add_up_totals(self) -> None:
        """Reduce `totals` to rank 0 and clear them on other ranks; all ranks must call it."""
        self.workers.add_up(self.totals)
        if not self.workers.is_first:
            self.totals.zero_()

    def numbers(self) -> Tensor:
        """`totals` and the loss scale (1 without scaling), (5,) float64, for a log record."""
        scale = self.optimization.scaler.scale(torch.ones(1, dtype=torch.float32, device=self.device))
        return torch.cat([self.totals, scale.double()])

    def _judge(self, step: int, began: Position, sums: Sums, norm: float) -> None:
        """Count an update as skipped if its gradient norm, which has now arrived, is not finite.

        began: its first batch; sums: those of its log record.
        """
        if math.isfinite(norm):
            self.position.skipped_in_a_row = 0
            return
        self.position.skipped += 1
        self.position.skipped_in_a_row += 1
        sums.updates -= 1
        self.skipped.append(Skipped(step=step, elements=self._elements(began.epoch, began.batch)))

    def _elements(self, epoch: int, first: int) -> list[int]:
        """Indices in the prepared data of the update that starts with batch `first` of an epoch."""
        elements: list[int] = []
        for _ in range(self.config.update_freq):
            order = self.batches.epoch(epoch)
            elements += order[first].tolist()
            epoch, first = (epoch, first + 1) if first + 1 < len(order) else (epoch + 1, 0)
        return elements

    def forget_sums(self) -> None:
        """Reset the sums for the next log record."""
        self.sums = Sums()
        self.totals.zero_()

    # State

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state, besides the weights."""
        return self.optimization.tensors()

    def values(self, seconds: float) -> dict[str, Any]:
        """The rest of the state; seconds: time spent so far, including earlier sessions."""
        return {
            **self.optimization.values(),
            "position": {**asdict(self.position), "seconds": seconds},
            "sums": asdict(self.sums),
            "totals": self.totals.tolist(),
            "shapes": sorted(self.shapes),
            "workers": self.workers.size,
        }

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore the state of tensors() and values() into a model with the saved weights.

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
        """Call compute(batch), captured in a graph if updates are."""
        if self._graphs is None:
            compute(batch)
        else:
            graphs.run_on_batch(self._graphs, compute, cast(Batch | None, batch))
        if batch is not None:
            self.shapes.add(batch.shape)

    def _set_step(self, elapsed: float, target_tokens: int) -> None:
        """Write the learning rate and the number of tokens of the next step to device memory."""
        self.learning_rate = learning_rate(self.config, self.model.config.d_model, self.position.step + 1, elapsed)
        self._lr.fill_(self.learning_rate)
        self._tokens.fill_(target_tokens)

    # Captured in graphs: no synchronization, no dependence on changing host values

    def _update(self, batch: TrainingBatch) -> None:
        self._add_gradient(batch)
        self._change_weights()

    def _add_gradient(self, batch: TrainingBatch) -> None:
        """Accumulate a batch's gradients and losses."""
        loss, nll = self.loss(batch)
        self.optimization.backward(loss, self._share)
        self._losses += torch.stack([loss.detach(), nll.detach()]).double()

    def _change_weights(self, _: None = None) -> None:
        """Step the optimizer and add the update to the totals."""
        if not self._is_single:
            self.optimization.scale_gradients(self._factor)
        self._norm.copy_(self.optimization.step(self._lr))
        added = torch.stack([*self._losses, self._norm.double(), self._tokens])
        if not self.workers.is_first:
            added[2:] = 0  # equal on all ranks: counted once
        self.totals += torch.where(self._norm.isfinite(), added, 0)
        self._losses.zero_()

    def _restore(self, position: Position) -> None:
        self.position.epoch, self.position.batch = position.epoch, position.batch
        self.optimization.forget()
        self._losses.zero_()


def _counts(batch: TrainingBatch) -> np.ndarray:
    """Target tokens, all tokens and cells of a batch."""
    return np.array([batch.target_tokens, batch.source_tokens + batch.target_tokens, batch.cells], float)


def _seed(seed: int, step: int, rank: int) -> int:
    """The dropout seed of a rank for the update after `step`, so that no generator state is saved."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
