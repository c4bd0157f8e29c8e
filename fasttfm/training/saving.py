"""Checkpoints of a run: what is saved as the model and its state, and taking up the newest one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fasttfm.errors import UserError
from fasttfm.store.background import Background
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
    """Saves and resumes the run of one model directory."""

    model_dir: Path
    updates: Updates
    saved: tuple[int, int] = (0, 0)
    """Step and last validation at the newest checkpoint, which may be on its way to the disk."""
    background: Background = field(default_factory=Background)
    _identity: tuple[int, int] | None = None
    """Of the model directory's lock, which another folder at its path has not."""

    def __post_init__(self) -> None:
        self._identity = self._found()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = (self.model_dir / LOCK_FILE).stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def refuse_another_folder(self) -> None:
        """Raise UserError where the model directory was moved, removed or put in another's place while training."""
        if self._found() != self._identity:
            raise UserError(
                f"{self.model_dir}: was moved or removed while training wrote into it, and nothing more is saved: put "
                "it back, its last checkpoint is whole, and run the same command again, or give another --out"
            )

    def is_due(self) -> bool:
        """Return whether anything has changed since the newest checkpoint."""
        position = self.updates.position
        return position.step > 0 and (position.step, position.validated) != self.saved

    def save(self, seconds: float) -> None:
        """Begin to save a checkpoint, and then to delete those that are not kept. Training may go on meanwhile.

        seconds: time spent, earlier sessions included. Called by rank 0, and by all where the model is divided: they
        send it their parts. Raises DivergedWeights, and saves nothing, when a weight is not finite, and what saving the
        one before raised.
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

        self.background.start(write)

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
        """The state as it is has been saved, by this rank or by rank 0."""
        self.saved = (self.updates.position.step, self.updates.position.validated)

    def resume(self) -> int | None:
        """Take up the newest checkpoint, if there is one; the other ranks get weights and state from rank 0.

        Returns the number of ranks that saved it, None without one. Raises UserError with the way on when it cannot be
        taken up.
        """
        workers, module = self.updates.workers, self.updates.module
        source = workers.broadcast(self._newest_checkpoint() if workers.is_first else None)
        if source is None:
            if not self.updates.is_sharded:  # else all ranks were given the weights before they were divided
                weights = workers.broadcast_tensors(model_weights(module) if workers.is_first else None)
                load_weights(module, weights, self.model_dir)
            return None
        values, tensors = self._read(source)
        try:
            self.updates.load(tensors, values)
            self.mark()
            return int(values["workers"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
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
        """Put a checkpoint's weights into the model; the values and tensors of its state. Rank 0 reads it."""
        workers, module = self.updates.workers, self.updates.module
        weights, state = None, None
        try:
            if workers.is_first:
                weights, state = read_weights(checkpoint), read_state(checkpoint)
        except DamagedCheckpoint as error:
            raise UserError(f"{error.problem}; {resume_advice(self.model_dir)}") from error
        given = workers.broadcast_tensors(weights)
        if self.updates.is_sharded:
            load_parts(module, given)
        else:
            load_weights(module, given, checkpoint)
        values = workers.broadcast(None if state is None else state.values)
        return values, workers.broadcast_tensors(None if state is None else state.tensors)


class DivergedWeights(ArithmeticError):
    """A weight is NaN or infinite."""
