"""The training loop: when to update, log, validate, save and stop, with exact resume."""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fasttfm.config.training import TrainingConfig
from fasttfm.errors import Stopped, UserError
from fasttfm.store.steps import delete_since, saved_steps
from fasttfm.store.weights import load_weights, model_weights
from fasttfm.system.wording import counted
from fasttfm.training.callback import Callback
from fasttfm.training.interrupt import Interruption
from fasttfm.training.protocols import TrainableModel, TrainingBatches
from fasttfm.training.recorder import Recorder
from fasttfm.training.saving import DivergedWeights, Saving
from fasttfm.training.sharding import whole
from fasttfm.training.updates import Updates
from fasttfm.training.validation import DividedValidator, Score
from fasttfm.training.workers import ALONE, Workers

_SETTLING = 16
"""Updates that fp16 may skip beyond the limit: its loss scale starts at 65,536 and is halved by each."""


class Trainer:
    """Trains `model` on `batches` with checkpoints in `model_dir`; call run() once."""

    def __init__(
        self, model: TrainableModel, batches: TrainingBatches, config: TrainingConfig, model_dir: Path, *,
        validator: DividedValidator[Any] | None, device: torch.device, workers: Workers = ALONE,
        callbacks: Sequence[Callback] = (), started: float | None = None, changed: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """validator: on every rank, or on rank 0 only if the model is sharded; workers: all ranks.

        started: start of the session by time.monotonic(); None: now. changed: settings changed by a resume.
        """
        self.model = model
        self.config = config
        self.model_dir = model_dir
        self.validator = validator
        self.workers = workers
        self.updates = Updates(model, batches, config, device, workers)
        self.saving = Saving(model_dir=model_dir, updates=self.updates)
        self.callbacks = callbacks
        self._changed = changed
        self.last_score: Score | None = None
        self._started = time.monotonic() if started is None else started
        self._start_up = 0.0
        """Seconds from the start of the session to its first update."""
        self._elapsed = 0.0
        """Seconds since the run began, including earlier sessions, by rank 0's clock."""

    def run(self) -> str:
        """Train to the configured end, from the last checkpoint if there is one; returns the reason to stop.

        Ctrl-C, SIGTERM and SIGHUP finish the current batch, save the last complete update and raise Stopped with a
        message for the user.
        """
        before = self.saving.resume()
        self.updates.module.train()
        self.updates.rehearse()
        self._start_up = time.monotonic() - self._started
        self._recorder = Recorder(self.model_dir, self.updates, self.callbacks) if self.workers.is_first else None
        if self._recorder is not None and self._changed:
            self._recorder.resumed(self._changed)
        if self._recorder is not None and before not in (None, self.workers.size):
            self._recorder.progress.say(
                f"updates up to {self.updates.position.step:,} were computed by {counted(before, 'worker')}, later "
                f"ones by {self.workers.size}: on the same batches, with other dropout masks and rounding"
            )
        try:
            with Interruption() as interruption:
                return self._loop(interruption)
        finally:
            self.updates.close()
            self.saving.close()
            if self._recorder is not None:
                self._recorder.close()

    def _loop(self, interruption: Interruption) -> str:
        config, position = self.config, self.updates.position
        while True:
            stopping = self._agree(interruption)
            reason = self._reason_to_stop()
            improved = False
            is_due = self._is_due(config.valid_interval_updates, reason) and position.validated != position.step
            if is_due and not stopping:  # a signal waits for no validation: the resumed run does it
                improved = self._validate(interruption)
                stopping = self._agree(interruption)
                reason = reason or self._reason_to_stop()
            if improved or stopping or self._is_due(config.save_interval_updates, reason, at_end=True):
                self._save()
            if stopping or reason:
                self._look_at_saved(wait=True)
            if stopping:
                saved = "which is saved" if position.step else "nothing to save yet"
                raise Stopped(
                    f"stopped after update {position.step:,}, {saved}: run the same command again to resume", stopping
                )
            if reason:
                return reason
            self._look_at_saved()
            if self.updates.perform(lambda: interruption.requested, self._elapsed):
                if position.step % config.log_interval == 0:
                    self._record()
                self._take_arrivals()
                if self._recorder is not None:
                    self._recorder.progress.update(position.step, *self._share_done())

    def _agree(self, interruption: Interruption) -> int:
        """Synchronize rank 0's clock and any rank's stop signal; returns the signal's number, or 0.

        Signals take effect here only, so that all ranks stop at the same update.
        """
        if self.workers.is_orphaned:
            interruption.requested, interruption.number = True, signal.SIGHUP
        elapsed = self._seconds() if self.workers.is_first else 0.0
        self._elapsed, number = self.workers.maximum([elapsed, interruption.number if interruption.requested else 0])
        return int(number)

    # When

    def _is_due(self, interval: int, reason: str | None, at_end: bool = False) -> bool:
        """Return whether an action due every `interval` updates (0: never) and at the end is due now."""
        step = self.updates.position.step
        if step == 0:
            return False
        if reason:
            return at_end or interval > 0
        return interval > 0 and step % interval == 0

    def _reason_to_stop(self) -> str | None:
        config, position = self.config, self.updates.position
        if position.step >= config.max_update:
            return f"max_update {config.max_update:,} is reached"
        if config.max_epoch and position.epoch >= config.max_epoch:
            return f"max_epoch {config.max_epoch:,} is reached"
        if config.max_minutes and self._elapsed >= config.max_minutes * 60:
            unfinished = config.schedule in ("cosine", "linear")
            hint = f", before the {config.schedule} schedule has ended (cosine-minutes ends with them)"
            return f"max_minutes {config.max_minutes:g} are over{hint if unfinished else ''}"
        if config.patience and position.worse >= config.patience:
            return f"{position.worse} validations without improvement (patience {config.patience})"
        return None

    def _seconds(self) -> float:
        return self.updates.position.seconds + time.monotonic() - self._started

    def _share_done(self) -> tuple[float, float]:
        """Return the completed share of the run, in [0, 1], by the limit reached first, and the seconds left."""
        config, position = self.config, self.updates.position
        share = position.step / config.max_update
        if config.max_epoch:
            share = max(share, (position.epoch + position.batch / len(self.updates.batches)) / config.max_epoch)
        share = min(share, 1.0)
        left = (self._elapsed - self._start_up) * (1 - share) / share if share > 0 else 0.0
        if config.max_minutes:
            limit = config.max_minutes * 60
            share, left = max(share, min(self._elapsed / limit, 1.0)), min(left, limit - self._elapsed)
        return share, left

    # What

    def _record(self) -> None:
        """Start a log record; it is written once its numbers have arrived on the host."""
        self.updates.add_up_totals()
        if self._recorder is not None:
            write = self._recorder.training(self._elapsed, *self._share_done())

            def arrived(numbers: list[float]) -> None:
                self._tell_of_skipped()
                write(numbers)

            self.updates.arrivals.expect(self.updates.numbers(), arrived)
        self.updates.forget_sums()

    def _validate(self, interruption: Interruption) -> bool:
        """Validate on all ranks, or on rank 0 if sharded; returns whether the result is among the kept best.

        An interruption cancels the validation.
        """
        self._take_arrivals(wait=True)
        position = self.updates.position
        improved = False
        model = self._whole_model()
        try:
            score = self._score(model, interruption)
            improved = self._judge(score) if score is not None and self.workers.is_first else False
        except KeyboardInterrupt:
            interruption.requested |= self.workers.size == 1  # else the interrupted rank requests it
        improved, position.validated, position.worse, position.best = self.workers.broadcast(
            (improved, position.validated, position.worse, position.best)
        )
        return improved

    def _whole_model(self) -> nn.Module:
        """The model to validate; if sharded, an unsharded copy, with averaged weights if any, on rank 0's device.

        All ranks must call it.
        """
        if not self.updates.is_sharded:
            return self.updates.module
        with self.updates.optimization.averaged():
            weights = whole(model_weights(self.updates.module), self.workers)
        if not self.workers.is_first:
            return self.updates.module
        model = cast(type[nn.Module], type(self.model))(self.model.config)
        load_weights(model, weights, self.model_dir)
        return model.to(self.updates.device)

    def _score(self, model: nn.Module, interruption: Interruption) -> Score | None:
        """The validation of the model from _whole_model(), or None on ranks that do not validate."""
        if self.validator is None:
            return None
        if self.updates.is_sharded:
            return self.validator(model, stoppable=interruption.at_once)
        with self.updates.optimization.averaged():
            return self.validator(model, self.workers, interruption.at_once)

    def _judge(self, score: Score) -> bool:
        """Record a validation; returns whether the result is among the kept best."""
        assert self._recorder is not None
        self.saving.refuse_another_folder()
        position = self.updates.position
        self.last_score = score
        position.validated = position.step
        if not math.isfinite(score.loss):
            self._give_up(score.loss)
        is_best = not position.best or score.rank > position.best[0][0]
        position.worse = 0 if is_best else position.worse + 1
        ranked = sorted([*position.best, (score.rank, position.step)], key=lambda entry: entry[0], reverse=True)
        position.best = ranked[: self.config.keep_best]
        self._recorder.validation(score, position.step, is_best, self._seconds())
        return (score.rank, position.step) in position.best

    def _save(self) -> None:
        """Save a checkpoint if anything has changed, on rank 0."""
        if not self.saving.is_due():
            return
        self.updates.add_up_totals()
        self._take_arrivals(wait=True)
        if self._recorder is not None:
            self._recorder.log.flush()
        try:
            if self.updates.is_sharded or self.workers.is_first:
                self.saving.save(self._seconds())
        except DivergedWeights:
            self._give_up(math.nan, "a weight")
        self.saving.mark()

    def _look_at_saved(self, wait: bool = False) -> None:
        """Report checkpoints that have been written; wait: for the current one. Raises UserError if writing failed."""
        for checkpoint in self.saving.written(wait):
            if self._recorder is not None:
                self._recorder.saved(checkpoint)
        if wait:
            self.workers.wait()  # a launcher stops rank 0, even while saving, once another rank ends

    def _take_arrivals(self, wait: bool = False) -> None:
        """Process the numbers that have arrived from the device; wait: for all pending ones."""
        self.updates.arrivals.take(wait)
        self._tell_of_skipped()

    def _tell_of_skipped(self) -> None:
        """Record skipped updates. Raises UserError for too many in a row, or an fp16 loss scale below 1."""
        skipped, self.updates.skipped = self.updates.skipped, []
        if self._recorder is None:
            return
        for update in skipped:
            self._recorder.skipped(update)
        config, in_a_row = self.config, self.updates.position.skipped_in_a_row
        if in_a_row >= config.skip_limit + (_SETTLING if config.precision == "fp16" else 0):
            self._give_up(math.nan, f"the gradient of the last {in_a_row} updates")
        scaler = self.updates.optimization.scaler
        if skipped and scaler.is_enabled() and scaler.get_scale() < 1:
            self._give_up(scaler.get_scale(), "the loss scale of fp16")

    def _give_up(self, value: float, what: str = "the loss") -> NoReturn:
        """Raise UserError, after deleting checkpoints of skipped updates, whose weights diverged."""
        self.saving.written(wait=True)
        if self.updates.position.first_skipped is not None:
            delete_since(self.model_dir, self.updates.position.first_skipped)
        saved = saved_steps(self.model_dir)
        kept = f"the checkpoint of update {saved[-1]:,} is kept" if saved else "no checkpoint was saved yet"
        raise UserError(
            f"training diverged: {what} is {value} at update {self.updates.position.step:,}; {kept}: train anew with a "
            "lower --lr, more --warmup-updates or --clip-norm 1, and with --precision bf16 or fp32 if it was fp16"
        )
