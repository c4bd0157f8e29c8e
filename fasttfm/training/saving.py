"""Saving and resuming: the model and training state of a checkpoint."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.store.checkpoint import DamagedCheckpoint, TrainingState, read_state, read_weights, save_checkpoint
from fasttfm.store.model_dir import CONFIG_FILE
from fasttfm.store.ownership import recover
from fasttfm.store.steps import checkpoints_folder, prune, resume_advice, saved_steps, step_folder
from fasttfm.store.vocabulary import check_vocabulary, vocabulary_digest
from fasttfm.store.weights import is_finite, load_weights, model_weights
from fasttfm.system.locks import LOCK_FILE
from fasttfm.training.sharding import divided, load_parts, whole
from fasttfm.training.updates import Updates


@dataclass(kw_only=True, slots=True)
class Saving:
    """Saves and resumes the run of one model directory.

    A thread writes one checkpoint at a time, from a copy made before it starts and with the same system calls as a
    synchronous save, so a kill or a power cut leaves the earlier checkpoints intact.
    """

    model_dir: Path
    updates: Updates
    saved: tuple[int, int] = (0, 0)
    """Step and last validation of the newest checkpoint, which may still be in writing."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    """Not a daemon: the interpreter waits for it before exiting."""
    _writes: deque[Future[Path]] = field(default_factory=deque)
    """Checkpoints being written, and those that written() has not returned."""
    _identity: tuple[int, int] | None = None
    """Device and inode of the model directory's lock file, which tell it from another directory at its path."""

    def __post_init__(self) -> None:
        self._identity = self._lock_identity()

    def _lock_identity(self) -> tuple[int, int] | None:
        try:
            status = (self.model_dir / LOCK_FILE).stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def refuse_another_folder(self) -> None:
        """Raise UserError if the model directory was moved, removed or replaced during training."""
        if self._lock_identity() != self._identity:
            raise UserError(
                f"{self.model_dir}: was moved or removed while training wrote into it, and nothing more is saved: put "
                "it back, its last checkpoint is whole, and run the same command again, or give another --out"
            )

    def is_due(self) -> bool:
        """Return whether an update or validation followed the newest checkpoint."""
        position = self.updates.position
        return position.step > 0 and (position.step, position.validated) != self.saved

    def save(self, seconds: float) -> None:
        """Save a checkpoint, then prune old ones, in the background; called by rank 0, or by all ranks if sharded.

        seconds: time spent so far, including earlier sessions. Raises DivergedWeights, and saves nothing, for
        non-finite weights, and errors of the save before.
        """
        position, optimization, workers = self.updates.position, self.updates.optimization, self.updates.workers
        with optimization.averaged():
            weights = whole(model_weights(self.updates.module), workers)
        are_finite = all(map(is_finite, weights.values()))
        if not (workers.broadcast(are_finite) if self.updates.is_sharded else are_finite):
            raise DivergedWeights
        parts = self.updates.tensors().items()
        tensors = whole({name: divided(part.detach(), optimization.source_of(name)) for name, part in parts}, workers)
        if not workers.is_first:
            return
        state = TrainingState(tensors=tensors, values=self.updates.values(seconds))
        step, best = position.step, [step for _, step in position.best]
        epoch, first_skipped = position.epoch, position.first_skipped

        def write() -> Path:
            self.refuse_another_folder()
            folder = step_folder(self.model_dir, step)
            try:
                save_checkpoint(folder, weights, self._meta(step, epoch, best), state)
                prune(self.model_dir, self.updates.config.keep_interval_updates, set(best), first_skipped)
            except (OSError, UserError):
                self.refuse_another_folder()
                raise
            return folder

        self.write(write)

    def write(self, write: Callable[[], Path]) -> None:
        """Call `write`, which returns the path it has written, in the thread after the previous write has ended.

        Raises the errors of the previous one.
        """
        if self._writes and self._writes[-1].exception() is not None:
            self._writes.pop().result()
        self._writes.append(self._thread.submit(write))

    def written(self, wait: bool = False) -> list[Path]:
        """The paths written since the last call; wait: including the current one. Raises its errors."""
        paths = []
        while self._writes and (wait or self._writes[0].done()):
            paths.append(self._writes.popleft().result())
        return paths

    def close(self) -> None:
        """Wait for the current write, ignoring its errors, and end the thread."""
        self._thread.shutdown()

    def _meta(self, step: int, epoch: int, best: list[int]) -> dict[str, Any]:
        earlier = [each for each in saved_steps(self.model_dir) if each < step]
        return {
            "step": step,
            "epoch": epoch + 1,
            "best_step": best[0] if best else None,
            "previous_step": max(earlier, default=None),
            "vocabulary": vocabulary_digest(self.model_dir),
        }

    def mark(self) -> None:
        """Note that the current state has been saved, by this rank or by rank 0."""
        self.saved = (self.updates.position.step, self.updates.position.validated)

    def resume(self) -> int | None:
        """Resume from the newest checkpoint, if any; rank 0 sends weights and state to the others.

        Returns the number of ranks that saved it, or None. Raises UserError with a remedy if it cannot be loaded.
        """
        workers, module = self.updates.workers, self.updates.module
        source = workers.broadcast(self._newest_checkpoint() if workers.is_first else None)
        if source is None:
            if not self.updates.is_sharded:  # else weights were broadcast before sharding
                weights = workers.broadcast_tensors(model_weights(module) if workers.is_first else None)
                load_weights(module, weights, self.model_dir)
            return None
        values, tensors = self._read(source)
        try:
            self.updates.load(tensors, values)
            self.mark()
            return int(values["workers"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
                raise
            raise UserError(
                f"{source}: its training state does not belong to this run ({error}): copy it and {CONFIG_FILE} back, "
                f"or begin a new run from its weights with another --out and --init-from {source}"
            ) from error

    def _newest_checkpoint(self) -> Path | None:
        recover(checkpoints_folder(self.model_dir))
        steps = saved_steps(self.model_dir)
        if not steps:
            return None
        checkpoint = step_folder(self.model_dir, steps[-1])
        check_vocabulary(checkpoint, self.model_dir)
        return checkpoint

    def _read(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Load a checkpoint's weights into the model; returns values and tensors of its state. Rank 0 reads it."""
        workers, module = self.updates.workers, self.updates.module
        weights, state = None, None
        try:
            if workers.is_first:
                weights, state = read_weights(checkpoint), read_state(checkpoint)
        except DamagedCheckpoint as error:
            raise UserError(f"{error.problem}; {resume_advice(self.model_dir)}") from error
        weights = workers.broadcast_tensors(weights)
        if self.updates.is_sharded:
            load_parts(module, weights)
        else:
            load_weights(module, weights, checkpoint)
        values = workers.broadcast(None if state is None else state.values)
        return values, workers.broadcast_tensors(None if state is None else state.tensors)


class DivergedWeights(ArithmeticError):
    """A weight is NaN or infinite."""
