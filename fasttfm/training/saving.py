"""Checkpoints of a run: what is saved as the model and its state, and taking up the newest one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Step and last validation at the newest checkpoint."""

    def is_due(self) -> bool:
        """Whether anything has changed since the newest checkpoint."""
        position = self.updates.position
        return position.step > 0 and (position.step, position.validated) != self.saved

    def save(self, seconds: float) -> None:
        """Save a checkpoint and delete those that are not kept. seconds: time spent, earlier sessions included.

        Raises DivergedWeights, and saves nothing, when a weight is not finite.
        """
        position, optimization = self.updates.position, self.updates.optimization
        optimization.swap_average()  # what is saved as the model is what was validated
        try:
            weights = {name: tensor.detach().clone() for name, tensor in model_weights(self.model).items()}
        finally:
            optimization.swap_average()
        if not all(map(is_finite, weights.values())):
            raise DivergedWeights
        meta = {
            "step": position.step,
            "epoch": position.epoch + 1,
            "best_step": position.best[0][1] if position.best else None,
            "previous_step": max((step for step in saved_steps(self.model_dir) if step < position.step), default=None),
            "vocabulary": vocabulary_digest(self.model_dir),
        }
        state = TrainingState(tensors=self.updates.tensors(), values=self.updates.values(seconds))
        save_checkpoint(step_folder(self.model_dir, position.step), weights, meta, state)
        self.saved = (position.step, position.validated)
        keep = self.updates.config.keep_interval_updates
        prune(self.model_dir, keep, {step for _, step in position.best})

    def resume(self) -> None:
        """Take up the newest checkpoint, if there is one; UserError with the way on when that cannot be done."""
        recover(checkpoints_folder(self.model_dir))
        steps = saved_steps(self.model_dir)
        if not steps:
            return
        checkpoint = step_folder(self.model_dir, steps[-1])
        check_vocabulary(checkpoint, self.model_dir)
        try:
            state, weights = read_state(checkpoint), read_weights(checkpoint)
        except DamagedCheckpoint as error:
            raise UserError(f"{error.problem}; {way_on(self.model_dir)}") from error
        load_weights(self.model, weights, checkpoint)
        try:
            self.updates.load(state.tensors, state.values)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{checkpoint}: its training state does not belong to this run ({error}); {way_on(self.model_dir)}"
            ) from error
        self.saved = (self.updates.position.step, self.updates.position.validated)


class DivergedWeights(ArithmeticError):
    """A weight is NaN or infinite."""
