"""The training loop: updates, logging, validation, checkpoints, and going on exactly where a run stopped.

Everything that decides the next update is the weights, the optimizer's moments, torch's generators, the update's number
and the position (epoch, batch) in the data; a checkpoint holds all of it. On the CPU a run that was killed and started
again therefore ends in the same bits as one that was not.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasttfm.data import Batch, TokenBatches
from fasttfm.errors import Stopped, UserError
from fasttfm.training.checkpoint import (
    TrainingState,
    check_vocabulary,
    checkpoints_folder,
    load_weights,
    model_weights,
    prune,
    read_state,
    read_weights,
    recover,
    save_checkpoint,
    saved_steps,
    step_folder,
    vocabulary_digest,
)
from fasttfm.training.config import TrainingConfig
from fasttfm.training.interrupt import Interruption
from fasttfm.training.log import RunLog
from fasttfm.training.optimization import Optimization, generator_states, restore_generators
from fasttfm.training.progress import Progress
from fasttfm.training.schedule import learning_rate
from fasttfm.training.validate import Validation, Validator

if TYPE_CHECKING:
    from fasttfm.models import Transformer

_HOPELESS = 10
"""A loss of so many times that of guessing is pointed out. Models begin at one to three times."""
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


class Trainer:
    """Trains `model` on `batches` and keeps its checkpoints in `model_dir`. One object, one call of `run`."""

    def __init__(
        self,
        model: Transformer,
        batches: TokenBatches,
        config: TrainingConfig,
        model_dir: Path,
        *,
        validator: Validator | None,
        device: torch.device,
    ) -> None:
        self.model = model
        self.batches = batches
        self.config = config
        self.model_dir = model_dir
        self.validator = validator
        self.device = device
        self.autocast = AUTOCAST[config.precision]
        self.optimization = Optimization(model, config, device)
        self.position = Position()
        self.sums = Sums()
        # loss, nll and gradient norm add up on the device and are read when a line of the log is due, never in between
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)
        self._order = batches.epoch(0)
        self._started = time.monotonic()
        self._saved = (0, 0)  # step and last validation at the newest checkpoint
        self._warned = False
        self.last_score: Validation | None = None

    # Running

    def run(self) -> str:
        """Train until the configuration says stop, resuming from the last checkpoint if there is one.

        Returns why it stopped. Ctrl-C, SIGTERM and SIGHUP finish the update, save and raise Stopped with a line for the
        user.
        """
        self._resume()
        self._log = RunLog(self.model_dir, self.config.tensorboard, self.position.step, self.position.validated)
        self._progress = Progress()
        self.model.train()
        if self.device.type == "cuda":
            self._rehearse()
        self._started = time.monotonic()
        try:
            with Interruption() as interruption:
                return self._loop(interruption)
        finally:
            self._progress.close()
            self._log.close()

    def _loop(self, interruption: Interruption) -> str:
        config, position = self.config, self.position
        while True:
            reason = self._reason_to_stop()
            improved = False
            if self._is_due(config.valid_interval_updates, reason) and position.validated != position.step:
                try:
                    improved = self._validate(interruption)
                except KeyboardInterrupt:
                    interruption.requested = True
                reason = reason or self._reason_to_stop()
            if improved or interruption.requested or self._is_due(config.save_interval_updates, reason, at_end=True):
                self._save()
            if interruption.requested:
                saved = "which is saved" if position.step else "nothing to save yet"
                raise Stopped(
                    f"stopped after update {position.step:,}, {saved}: run the same command again to go on",
                    interruption.number,
                )
            if reason:
                return reason
            started = time.perf_counter()
            self._update()
            self.sums.seconds += time.perf_counter() - started
            if position.step % config.log_interval == 0:
                self._write_log()
            self._progress.update(position.step, *self._share_done())

    def _is_due(self, interval: int, reason: str | None, at_end: bool = False) -> bool:
        """Whether something that happens every `interval` updates (0: never) and at the end happens now."""
        step = self.position.step
        if step == 0:
            return False
        if reason:
            return at_end or interval > 0
        return interval > 0 and step % interval == 0

    def _reason_to_stop(self) -> str | None:
        config, position = self.config, self.position
        if position.step >= config.max_update:
            return f"max_update {config.max_update:,} is reached"
        if config.max_epoch and position.epoch >= config.max_epoch:
            return f"max_epoch {config.max_epoch:,} is reached"
        if config.max_minutes and self._elapsed() >= config.max_minutes * 60:
            return f"max_minutes {config.max_minutes:g} are over"
        if config.patience and position.worse >= config.patience:
            return f"{position.worse} validations without improvement (patience {config.patience})"
        return None

    def _elapsed(self) -> float:
        return self.position.seconds + time.monotonic() - self._started

    def _share_done(self) -> tuple[float, float]:
        """How much of the run is over, in [0, 1] by the limit that will end it, and the seconds that are left."""
        config, position = self.config, self.position
        elapsed = self._elapsed()
        shares = [position.step / config.max_update]
        if config.max_epoch:
            shares.append((position.epoch + position.batch / len(self.batches)) / config.max_epoch)
        if config.max_minutes:
            shares.append(elapsed / (config.max_minutes * 60))
        share = min(max(shares), 1.0)
        return share, (elapsed * (1 - share) / share if share > 0 else 0.0)

    # One update

    def _update(self) -> None:
        config, position = self.config, self.position
        batches = [self._next_batch() for _ in range(config.update_freq)]
        target_tokens = sum(batch.target_tokens for batch in batches)
        for batch in batches:
            loss, nll = self._loss(batch)
            # the mean over all target tokens of the update, whichever batch they are in
            self.optimization.backward(loss / target_tokens)
            self._totals[0] += loss.detach()
            self._totals[1] += nll
            self.sums.real_cells += batch.source_tokens + batch.target_tokens
            self.sums.cells += batch.source.numel() + batch.target_in.numel()
        position.step += 1
        norm = self.optimization.step(learning_rate(config, self.model.config.d_model, position.step))
        if norm is not None:
            self._totals[2] += norm
        self.sums.updates += 1
        self.sums.target_tokens += target_tokens

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
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

    def _rehearse(self) -> None:
        """Run the largest batch without effect: if memory does not suffice, better now than hours later."""
        generators = generator_states(self.device)
        loss, _ = self._loss(self.batches.batch(self.batches.largest()).to(self.device))
        loss.backward()
        self.optimization.forget()
        restore_generators(generators, self.device)

    def _next_batch(self) -> Batch:
        position = self.position
        batch = self.batches.batch(self._order[position.batch], position.epoch)
        position.batch += 1
        if position.batch == len(self._order):
            position.epoch, position.batch = position.epoch + 1, 0
            self._order = self.batches.epoch(position.epoch)
        return batch if self.device.type == "cpu" else batch.to(self.device, non_blocking=True)

    # Log, validation

    def _write_log(self) -> None:
        sums, position, config = self.sums, self.position, self.config
        started = time.perf_counter()
        loss, nll, norm = self._totals.tolist()  # waits for the device
        seconds = sums.seconds + time.perf_counter() - started
        record: dict[str, Any] = {
            "kind": "train",
            "step": position.step,
            "epoch": position.epoch + 1,
            "loss": loss / sums.target_tokens,
            "nll": nll / sums.target_tokens,
            "lr": learning_rate(config, self.model.config.d_model, position.step),
            "padding": 1 - sums.real_cells / sums.cells,
            "target_tokens": sums.target_tokens,
            "tokens_per_second": sums.target_tokens / seconds,
            "seconds": round(self._elapsed(), 2),
        }
        if config.clip_norm:
            record["gradient_norm"] = norm / sums.updates
        if config.precision == "fp16":
            record["loss_scale"] = self.optimization.scaler.get_scale()
        self._refuse_divergence(loss)
        self._log.write(record)
        self._progress.train(record, *self._share_done())
        guessing = math.log(self.model.config.vocab_size)
        if record["loss"] > _HOPELESS * guessing and not self._warned:
            self._warned = True
            self._progress.say(
                f"warning: the loss {record['loss']:.4g} is far worse than guessing ({guessing:.1f}), training seems "
                "to diverge: stop it and give another --out with a lower --lr, more --warmup-updates or --clip-norm 1"
            )
        self.sums = Sums()
        self._totals.zero_()

    def _refuse_divergence(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        saved = saved_steps(self.model_dir)
        kept = f"the checkpoint of update {saved[-1]:,} is kept" if saved else "no checkpoint was saved yet"
        raise UserError(
            f"training diverged: the loss is {loss} at update {self.position.step:,}; {kept}: train anew with a lower "
            "--lr, more --warmup-updates or --clip-norm 1, and with --precision bf16 or fp32 if it was fp16"
        )

    def _validate(self, interruption: Interruption) -> bool:
        """Validate, record it, and tell whether the result is among the best that are kept."""
        assert self.validator is not None
        position, config = self.position, self.config
        self.optimization.swap_average()
        try:
            with interruption.at_once():
                score = self.validator(self.model)
        finally:
            self.optimization.swap_average()
        self.last_score = score
        position.validated = position.step
        if not math.isfinite(score.loss):
            self._refuse_divergence(score.loss)
        best = not position.best or score.rank > position.best[0][0]
        position.worse = 0 if best else position.worse + 1
        ranked = sorted([*position.best, (score.rank, position.step)], key=lambda entry: entry[0], reverse=True)
        position.best = ranked[: config.keep_best]
        record = {"epoch": position.epoch + 1, "best": best, "seconds": round(self._elapsed(), 2)}
        self._record_score("valid", score, f"valid.step-{position.step:09d}.txt", record)
        self._progress.say(f"update {position.step:,}: {score}{' (best so far)' if best else ''}")
        return (score.rank, position.step) in position.best

    def _record_score(self, kind: str, score: Validation, file: str, more: dict[str, Any]) -> None:
        """A record with a validation's numbers, and its translations as hypotheses/`file`."""
        record = {"kind": kind, "step": self.position.step, "loss": score.loss, "nll": score.nll}
        record["perplexity"] = score.perplexity
        if score.bleu is not None:
            record["bleu"] = score.bleu
            folder = self.model_dir / "hypotheses"
            folder.mkdir(exist_ok=True)
            text = "".join(f"{line}\n" for line in score.translations)
            (folder / file).write_text(text, encoding="utf-8")
        self._log.write({**record, **more})

    def record_average(self, score: Validation, steps: list[int]) -> None:
        """Record how the average of the checkpoints of `steps`, made when the run was over, has scored."""
        self._log = RunLog(self.model_dir, self.config.tensorboard, self.position.step)
        self._record_score("average", score, "valid.average.txt", {"average_of": steps})
        self._log.close()

    # Checkpoints

    def _save(self) -> None:
        position = self.position
        now = (position.step, position.validated)
        if position.step == 0 or now == self._saved:
            return
        totals = self._totals.tolist()
        self._refuse_divergence(totals[0])
        self._log.flush()
        self.optimization.swap_average()  # what is saved as the model is what was validated
        weights = {name: tensor.detach().clone() for name, tensor in model_weights(self.model).items()}
        self.optimization.swap_average()
        state = TrainingState(
            tensors={**self.optimization.tensors(), **generator_states(self.device)},
            values={
                **self.optimization.values(),
                "position": {**asdict(position), "seconds": self._elapsed()},
                "sums": asdict(self.sums),
                "totals": totals,
            },
        )
        meta = {
            "step": position.step,
            "epoch": position.epoch + 1,
            "best_step": position.best[0][1] if position.best else None,
            "vocabulary": vocabulary_digest(self.model_dir),
        }
        save_checkpoint(step_folder(self.model_dir, position.step), weights, meta, state)
        self._saved = now
        prune(self.model_dir, self.config.keep_interval_updates, {step for _, step in position.best})

    def _resume(self) -> None:
        """Take up the newest checkpoint, if there is one."""
        recover(checkpoints_folder(self.model_dir))
        steps = saved_steps(self.model_dir)
        if not steps:
            return
        checkpoint = step_folder(self.model_dir, steps[-1])
        check_vocabulary(checkpoint, self.model_dir)
        state = read_state(checkpoint)
        load_weights(self.model, read_weights(checkpoint), checkpoint)
        try:
            self.optimization.load(state.tensors, state.values)
            restore_generators(state.tensors, self.device)
            self.sums = Sums(**state.values["sums"])
            self._totals = torch.tensor(state.values["totals"], dtype=torch.float64, device=self.device)
            saved = dict(state.values["position"])
            saved["best"] = [(tuple(rank), step) for rank, step in saved["best"]]
            self.position = Position(**saved)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{checkpoint}: its training state does not belong to this run ({error}); delete {checkpoint} to use "
                "the checkpoint before it"
            ) from error
        self._order = self.batches.epoch(self.position.epoch)
        self._saved = (self.position.step, self.position.validated)
