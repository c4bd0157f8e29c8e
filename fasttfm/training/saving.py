"""Checkpoints of a run: what is saved as the model and its state, and taking up the newest one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fasttfm.checkpoints.background import Background
from fasttfm.checkpoints.checkpoint import DamagedCheckpoint, TrainingState, read_state, read_weights, save_checkpoint
from fasttfm.checkpoints.model_dir import CONFIG_FILE
from fasttfm.checkpoints.ownership import recover
from fasttfm.checkpoints.shards import MODEL, STATE, check_shards, is_sharded, read_values, save_sharded
from fasttfm.checkpoints.steps import checkpoints_folder, prune, saved_steps, step_folder, way_on
from fasttfm.checkpoints.vocabulary import check_vocabulary, vocabulary_digest
from fasttfm.checkpoints.weights import is_finite, load_weights, model_weights
from fasttfm.errors import UserError
from fasttfm.training.sharding import divided, load_parts, local, read_parts
from fasttfm.training.updates import Updates


@dataclass(kw_only=True, slots=True)
class Saving:
    """Saves and resumes the run of one model directory."""

    model_dir: Path
    updates: Updates
    saved: tuple[int, int] = (0, 0)
    """Step and last validation at the newest checkpoint, which may be on its way to the disk."""
    background: Background = field(default_factory=Background)

    def is_due(self) -> bool:
        """Return whether anything has changed since the newest checkpoint."""
        position = self.updates.position
        return position.step > 0 and (position.step, position.validated) != self.saved

    def save_parts(self, seconds: float) -> None:
        """Save a checkpoint of a model that is divided among the ranks, all of which call this. It waits for the end.

        Raises DivergedWeights on all ranks, and saves nothing, when a weight is not finite.
        """
        position, optimization, workers = self.updates.position, self.updates.optimization, self.updates.workers
        with optimization.averaged():
            tensors = {
                f"{MODEL}{name}": divided(local(tensor).detach().clone(), tensor)
                for name, tensor in model_weights(self.updates.module).items()
            }
        if workers.sum([float(not all(is_finite(local(tensor)) for tensor in tensors.values()))])[0]:
            raise DivergedWeights
        for name, tensor in self.updates.tensors().items():
            tensors[f"{STATE}{name}"] = divided(tensor.detach(), optimization.source_of(name))
        folder = step_folder(self.model_dir, position.step)
        best = [step for _, step in position.best]
        meta = self._meta(position.step, position.epoch, best) if workers.is_first else {}
        save_sharded(folder, tensors, self.updates.values(seconds), meta, workers)
        if workers.is_first:
            keep = self.updates.config.keep_interval_updates
            prune(self.model_dir, keep, set(best), position.first_skipped)
        workers.wait()

    def save(self, seconds: float) -> None:
        """Begin to save a checkpoint, and then to delete those that are not kept. Training may go on meanwhile.

        seconds: time spent, earlier sessions included. Called by rank 0. Raises DivergedWeights, and saves nothing,
        when a weight is not finite, and what saving the one before raised.
        """
        position, optimization = self.updates.position, self.updates.optimization
        with optimization.averaged():
            weights = _copied(model_weights(self.updates.module))
        if not all(map(is_finite, weights.values())):
            raise DivergedWeights
        state = TrainingState(tensors=_copied(self.updates.tensors()), values=self.updates.values(seconds))
        step, best = position.step, [step for _, step in position.best]
        epoch, first_skipped = position.epoch, position.first_skipped

        def write() -> Path:
            folder = step_folder(self.model_dir, step)
            save_checkpoint(folder, weights, self._meta(step, epoch, best), state)
            prune(self.model_dir, self.updates.config.keep_interval_updates, set(best), first_skipped)
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
        """Put a checkpoint's weights into the model; the values and tensors of its state.

        A divided model reads a checkpoint in parts rank by rank, and gets this rank's parts of the state. All else is
        read whole, by rank 0.
        """
        workers, optimization, module = self.updates.workers, self.updates.optimization, self.updates.module
        try:
            if self.updates.is_sharded and is_sharded(checkpoint):
                if workers.is_first:
                    check_shards(checkpoint)
                tensors = read_parts(checkpoint, model_weights(module), optimization.source_of)
                return workers.broadcast(read_values(checkpoint) if workers.is_first else None), tensors
            weights, state = None, None
            if workers.is_first:
                weights, state = read_weights(checkpoint), read_state(checkpoint)
        except (DamagedCheckpoint, ValueError, OSError) as error:
            problem = getattr(error, "problem", f"{checkpoint}: {error}")
            raise UserError(f"{problem}; {way_on(self.model_dir)}") from error
        whole = workers.broadcast_tensors(weights)
        if self.updates.is_sharded:
            load_parts(module, whole)
        else:
            load_weights(module, whole, checkpoint)
        values = workers.broadcast(None if state is None else state.values)
        return values, workers.broadcast_tensors(None if state is None else state.tensors)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class DivergedWeights(ArithmeticError):
    """A weight is NaN or infinite."""
