"""Output of a training run: log records, progress and warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttfm.system.memory import peak_memory
from fasttfm.system.wording import counted
from fasttfm.training.callback import Callback
from fasttfm.training.log import RunLog
from fasttfm.training.progress import Progress
from fasttfm.training.tensorboard import TensorBoard

if TYPE_CHECKING:
    from fasttfm.training.updates import Skipped, Updates
    from fasttfm.training.validation import Score


_HOPELESS = 10
"""Multiple of a random guess's loss above which we warn. Models start at one to three times."""


class Recorder:
    """Writes the log records of a session, shows progress and calls callbacks."""

    def __init__(self, model_dir: Path, updates: Updates, callbacks: Sequence[Callback] = ()) -> None:
        config, position = updates.config, updates.position
        self.model_dir = model_dir
        self.updates = updates
        self.log = RunLog(model_dir, position.step, position.validated)
        self.progress = Progress()
        self._tensorboard = None
        if config.tensorboard and not find_spec("tensorboard"):
            self.progress.say('tensorboard is not installed, no event files: pip install "./fasttfm[tensorboard]"')
        elif config.tensorboard:
            self._tensorboard = TensorBoard(model_dir / "tensorboard", position.step)
        self._is_hopeless = False
        self._callbacks = [*([self._tensorboard] if self._tensorboard else []), *callbacks]
        if self.log.previous is not None:
            self.progress.say(f"the log of an earlier run in {model_dir} is kept as {self.log.previous.name}")

    def training(self, seconds: float, share: float, seconds_left: float) -> Callable[[list[float]], None]:
        """Start a record of the updates since the last one; returns a function to write it, given Updates.numbers().

        seconds: since the run began; share: completed share of the run, in [0, 1].
        """
        updates, sums, position = self.updates, self.updates.sums, self.updates.position
        record: dict[str, Any] = {
            "kind": "train", "step": position.step, "epoch": position.epoch + 1,
            **dict.fromkeys(("loss", "nll", "gradient_norm"), math.nan),
            "lr": updates.learning_rate,
            "padding": 1 - sums.real_cells / sums.cells,
            "target_tokens": sums.target_tokens,
            "tokens_per_second": sums.target_tokens / sums.seconds,
            "seconds": round(seconds, 2),
            "batch_shapes": len(updates.shapes),
            "peak_memory": peak_memory(),
        }  # fmt: skip

        def write(numbers: list[float]) -> None:
            loss, nll, norm, tokens, scale = numbers
            if tokens:
                record.update(loss=loss / tokens, nll=nll / tokens)
            if sums.updates:
                record["gradient_norm"] = norm / sums.updates
            if position.skipped:
                record["skipped"] = position.skipped
            if updates.config.precision == "fp16":
                record["loss_scale"] = scale
            self._log(record)
            self.progress.train(record, share, seconds_left)
            self._warn(record["loss"])

        return write

    def resumed(self, changed: Mapping[str, Any]) -> None:
        """Record the settings that a resume changed."""
        self._log({"kind": "resumed", "step": self.updates.position.step, **changed})

    def skipped(self, update: Skipped) -> None:
        """Record a skipped update with the indices of its pairs (rows) in the prepared data."""
        unit = self.updates.batches.unit
        self._log({"kind": "skipped", "step": update.step, f"{unit}s": update.elements})
        self.progress.say(
            f"warning: update {update.step:,} was skipped: the gradient of its {counted(len(update.elements), unit)} "
            f"({self.log.path.name} names them) was not finite"
        )

    def validation(self, score: Score, step: int, is_best: bool, seconds: float) -> None:
        """Record a validation and save its outputs."""
        record = {"epoch": self.updates.position.epoch + 1, "best": is_best, "seconds": round(seconds, 2)}
        self._score("valid", score, step, f"valid.step-{step:09d}.txt", record)
        self.progress.say(f"update {step:,}: {score}{' (best so far)' if is_best else ''}")

    def average(self, score: Score, step: int, steps: list[int]) -> None:
        """Record the score of the average of the checkpoints of `steps`, at the end of the run."""
        self._score("average", score, step, "valid.average.txt", {"average_of": steps})

    def final(self, score: Score, step: int) -> None:
        """Record the score of a checkpoint with the final decoding, at the end of the run."""
        self._score("final", score, step, f"valid.final-{step:09d}.txt", {})

    def saved(self, checkpoint: Path) -> None:
        """Call on_save of all callbacks for a checkpoint on disk."""
        for callback in self._callbacks:
            callback.on_save(checkpoint)

    def close(self) -> None:
        """Close the log and the progress bar."""
        self.progress.close()
        self.log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _log(self, record: dict[str, Any]) -> None:
        self.log.write(record)
        for callback in self._callbacks:
            callback.on_log(record)

    def _score(self, kind: str, score: Score, step: int, file: str, more: dict[str, Any]) -> None:
        record = {"kind": kind, "step": step, **score.record()}
        if score.outputs:
            folder = self.model_dir / "hypotheses"
            folder.mkdir(exist_ok=True)
            text = "".join(f"{line}\n" for line in score.outputs)
            (folder / file).write_text(text, encoding="utf-8")
        record |= more
        self.log.write(record)
        for callback in self._callbacks:
            callback.on_validate(record, score.outputs)

    def _warn(self, loss: float) -> None:
        guessing = math.log(self.updates.model.config.vocab_size)
        if loss > _HOPELESS * guessing and not self._is_hopeless:
            self._is_hopeless = True
            self.progress.say(
                f"warning: the loss {loss:.4g} is far worse than guessing ({guessing:.1f}), training seems to diverge: "
                "stop it and give another --out with a lower --lr, more --warmup-updates or --clip-norm 1"
            )
