"""Checkpoints of a run: what is saved as the model and its state, and taking up the newest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fasttfm.checkpoints.background import Background
from fasttfm.checkpoints.checkpoint import DamagedCheckpoint, TrainingState, read_state, read_weights, save_checkpoint
from fasttfm.checkpoints.ownership import recover
from fasttfm.checkpoints.steps import checkpoints_folder, prune, saved_steps, step_folder, way_on
from fasttfm.checkpoints.vocabulary import check_vocabulary, vocabulary_digest
from fasttfm.checkpoints.weights import is_finite, load_weights, model_weights
from fasttfm.errors import UserError
from fasttfm.training.updates import Updates

if TYPE_CHECKING:
    from fasttfm.models import Transformer


@dataclass(kw_only=True, slots=True)
class Saving:
    """Saves and resumes the run of one model directory."""

    model_dir: Path
    model: Transformer
    updates: Updates
    saved: tuple[int, int] = (0, 0)
    """Step and last validation at the newest checkpoint, which may be on its way to the disk."""
    background: Background = field(default_factory=Background)

    def is_due(self) -> bool:
        """Whether anything has changed since the newest checkpoint."""
        position = self.updates.position
        return position.step > 0 and (position.step, position.validated) != self.saved

    def save(self, seconds: float) -> None:
        """Begin to save a checkpoint, and then to delete those that are not kept. Training may go on meanwhile.

        seconds: time spent, earlier sessions included. Called by rank 0. Raises DivergedWeights, and saves nothing,
        when a weight is not finite, and what saving the one before raised.
        """
        position, optimization = self.updates.position, self.updates.optimization
        optimization.swap_average()  # what is saved as the model is what was validated
        try:
            weights = _copied(model_weights(self.model))
        finally:
            optimization.swap_average()
        if not all(map(is_finite, weights.values())):
            raise DivergedWeights
        state = TrainingState(tensors=_copied(self.updates.tensors()), values=self.updates.values(seconds))
        step, best = position.step, [step for _, step in position.best]
        meta: dict[str, Any] = {"step": step, "epoch": position.epoch + 1, "best_step": best[0] if best else None}

        def write() -> Path:
            earlier = [each for each in saved_steps(self.model_dir) if each < step]
            meta["previous_step"] = max(earlier, default=None)
            meta["vocabulary"] = vocabulary_digest(self.model_dir)
            folder = step_folder(self.model_dir, step)
            save_checkpoint(folder, weights, meta, state)
            prune(self.model_dir, self.updates.config.keep_interval_updates, set(best))
            return folder

        self.background.start(write)

    def mark(self) -> None:
        """The state as it is has been saved, by this rank or by rank 0."""
        self.saved = (self.updates.position.step, self.updates.position.validated)

    def resume(self) -> int | None:
        """Take up the newest checkpoint, if there is one; the other ranks get weights and state from rank 0.

        Returns the number of ranks that saved it, None without one. Raises UserError with the way on when it cannot be
        taken up.
        """
        workers = self.updates.workers
        weights, state, source = self._newest() if workers.is_first else (None, None, self.model_dir)
        weights = workers.broadcast_tensors(weights)
        values = workers.broadcast(None if state is None else state.values)
        load_weights(self.model, weights, source)
        if values is None:
            return None
        tensors = workers.broadcast_tensors(None if state is None else state.tensors)
        try:
            self.updates.load(tensors, values)
            self.mark()
            return int(values["workers"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{source}: its training state does not belong to this run ({error}); {way_on(self.model_dir)}"
            ) from error

    def _newest(self) -> tuple[dict[str, Tensor], TrainingState | None, Path]:
        """Weights, state and place of the newest checkpoint; of a run that begins, the model's own weights."""
        recover(checkpoints_folder(self.model_dir))
        steps = saved_steps(self.model_dir)
        if not steps:
            return model_weights(self.model), None, self.model_dir
        checkpoint = step_folder(self.model_dir, steps[-1])
        check_vocabulary(checkpoint, self.model_dir)
        try:
            return read_weights(checkpoint), read_state(checkpoint), checkpoint
        except DamagedCheckpoint as error:
            raise UserError(f"{error.problem}; {way_on(self.model_dir)}") from error


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class DivergedWeights(ArithmeticError):
    """A weight is NaN or infinite."""
