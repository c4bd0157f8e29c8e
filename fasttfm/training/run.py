"""A training run of any task, from data and model directory to the averaged checkpoint."""

import dataclasses
import errno
import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig, Values
from fasttfm.config.flags import written
from fasttfm.config.training import TrainingConfig
from fasttfm.errors import Stopped, UserError, is_out_of_memory
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.model_dir import CONFIG_FILE, Data, prepare_model_dir, read_config, refuse_strangers
from fasttfm.store.steps import consecutive_steps, saved_steps, step_folder
from fasttfm.store.weights import load_weights, model_weights
from fasttfm.system.locks import locked
from fasttfm.system.memory import keep_freed_memory, limit_remedy
from fasttfm.system.wording import counted
from fasttfm.training.average import average_last
from fasttfm.training.callback import Callback
from fasttfm.training.precision import resolved_precision
from fasttfm.training.progress import tell
from fasttfm.training.recorder import Recorder
from fasttfm.training.task import Task
from fasttfm.training.trainer import Trainer
from fasttfm.training.translation import Translation
from fasttfm.training.validation import Score
from fasttfm.training.workers import Workers, device_of_rank, joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a finished run."""

    reason: str
    """Why it stopped."""
    score: Score | None
    """Validation of the last weights, if this session validated."""
    best: Score | None
    """Validation of the best checkpoint with the final decoding, if training validated with another."""
    average: Score | None
    """Validation of the averaged checkpoint, if the recipe requests one."""


def train(
    values: Values, data_dir: Path, model_dir: Path, device: torch.device | None = None, *, task: Task | None = None,
    init_from: Path | None = None, resumed_with: Sequence[str] = (), settings: str = "",
    callbacks: Sequence[Callback] = (), started: float | None = None,
) -> Outcome | None:  # fmt: skip
    """Train a model on prepared data into `model_dir`, or resume its training.

    values: from fasttfm.config.gather, of the task's kind. device: None: a GPU if available. task: None: translation.
    init_from: initial weights of a new run, a checkpoint or a model directory (its best one). resumed_with: names of
    settings that a resumed run changes. settings: process settings to print. callbacks: called by rank 0. started:
    start of the run by time.monotonic(); None: now. Under torchrun all ranks train together; only rank 0 gets an
    Outcome. Raises UserError for problems that the caller can fix; Stopped, a KeyboardInterrupt with a message for the
    user, after Ctrl-C, SIGTERM or SIGHUP.
    """
    started = time.monotonic() if started is None else started
    task = task or Translation()
    device = device_of_rank(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    minutes = values["training"].get("rank_timeout_minutes", TrainingConfig().rank_timeout_minutes)
    with joined(device, minutes) as workers:
        if not workers.is_first:
            workers.wait()  # rank 0 alone reports problems with data or directory
        data = task.open(data_dir)
        config = task.build(values, data)
        _set_threads(config.training.threads, device)
        if device.type == "cpu":
            keep_freed_memory()
        if not workers.is_first:
            return _train(task, config, data, model_dir, device, workers, init_from, settings, (), started, {})
        refuse_strangers(model_dir)
        try:
            with locked(model_dir):
                config = _decided(config, model_dir, device)
                changed = prepare_model_dir(model_dir, config, data, resumed_with)
                workers.wait()
                return _train(
                    task, config, data, model_dir, device, workers, init_from, settings, callbacks, started, changed
                )
        except (OSError, MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise _out_of_memory(config, device) from error
            if not isinstance(error, OSError) or error.errno is None:
                raise  # not from the operating system
            few = error.errno == errno.EMFILE
            remedy = "allow more open files (ulimit -n)" if few else "make room or make the directory writable"
            # error.filename is None for writes to an open file
            raise UserError(
                f"{error.filename or model_dir}: {error.strerror}; checkpoints saved before are untouched: {remedy}, "
                "then run the same command again to resume from the last one"
            ) from error


def _decided(config: RunConfig, model_dir: Path, device: torch.device) -> RunConfig:
    """Resolve precision `auto`: the resumed run's, else that of rank 0's device.

    Raises UserError for a precision in the run's config.yaml that no run writes.
    """
    if config.training.precision != "auto" or not saved_steps(model_dir):
        return _with_precision(config, resolved_precision(config.training.precision, device))
    saved = read_config(model_dir, config.kind)["training"]["precision"]
    reason = "a run has what auto stood for when it began"
    if saved != "auto":
        try:
            return _with_precision(config, saved)
        except ValueError as error:  # conflicts with other settings
            reason = str(error)
    raise UserError(
        f"{model_dir / CONFIG_FILE}: training.precision {saved} was not written by this run ({reason}): copy the file "
        "back, or give another --out"
    )


def _with_precision(config: RunConfig, precision: Any) -> RunConfig:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, precision=precision))


def _set_threads(threads: int, device: torch.device) -> None:
    """Set the threads of this process; by default 1 if several ranks share the machine's cores."""
    if not threads and device.type == "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        threads = 1
    if threads:
        torch.set_num_threads(threads)


def _train(
    task: Task, config: RunConfig, data: Data, model_dir: Path, device: torch.device, workers: Workers,
    init_from: Path | None, settings: str, callbacks: Sequence[Callback], started: float,
    changed: dict[str, tuple[Any, Any]],
) -> Outcome | None:  # fmt: skip
    config = _with_precision(config, workers.broadcast(config.training.precision))  # rank 0's, on all devices
    recipe = config.training
    torch.manual_seed(recipe.seed)
    is_sharded = recipe.shard and workers.size > 1
    model = task.model(config.model)
    if not is_sharded:  # a sharded model may not fit on one device
        model.to(device)
    if workers.is_first and init_from is not None and not saved_steps(model_dir):
        task.initialise(model, init_from, model_dir)
    if is_sharded and not saved_steps(model_dir):
        weights = workers.broadcast_tensors(model_weights(model) if workers.is_first else None)
        load_weights(model, weights, model_dir)
    validates = recipe.valid_interval_updates and (workers.is_first or not recipe.shard)
    trainer = Trainer(
        model, task.batches(config, data), recipe, model_dir, device=device, workers=workers, callbacks=callbacks,
        validator=task.validator(config, data, device) if validates else None, started=started,
        changed={name: new for name, (_, new) in changed.items()},
    )  # fmt: skip
    for name, (old, new) in changed.items():
        tell(f"{name} is {written(new)} from here on, {written(old)} before")
    if workers.is_first:
        tell(_summary(trainer) + settings)
        if trainer.updates.uncaptured is not None:
            tell(f"updates are launched kernel by kernel, not as CUDA graphs: {trainer.updates.uncaptured}")
    reason = trainer.run()
    outcome = None
    if workers.is_first:
        try:
            whole = task.model(config.model).to(device) if is_sharded else model
            scores: dict[str, Score | None] = {"score": trainer.last_score, "best": None, "average": None}
            scores |= _finish(whole, trainer)
        except KeyboardInterrupt as stop:
            raise Stopped(
                f"stopped when training was finished ({reason}) and its last update saved: run the same command again "
                "for what comes after it",
                getattr(stop, "number", signal.SIGINT),
            ) from None
        outcome = Outcome(reason=reason, **scores)
    workers.wait()
    return outcome


def _out_of_memory(config: RunConfig, device: torch.device) -> UserError:
    halved, doubled = config.data.max_tokens // 2, config.training.update_freq * 2
    graphs = ", or --no-cuda-graph" if device.type == "cuda" and config.training.cuda_graph else ""
    return UserError(
        f"{device} is out of memory with batches of {config.data.max_tokens:,} tokens: give --max-tokens {halved} "
        f"--update-freq {doubled} and a new --out, which sums two halves into the same update{graphs}{limit_remedy()}"
    )


def _finish(model: Any, trainer: Trainer) -> dict[str, Score]:
    """Average checkpoints if requested, and validate best, last and average with the final decoding.

    Returns scores by their name in Outcome. The model keeps the averaged weights.
    """
    position, validator = trainer.updates.position, trainer.validator
    of_users = None if validator is None else validator.of_users()
    folder, saved = trainer.model_dir, saved_steps(trainer.model_dir)
    averaged = min(trainer.config.average_last, len(consecutive_steps(folder)))
    steps = {"best": position.best[0][1], "score": position.step} if of_users and position.best else {}
    scores: dict[str, Score] = {}
    if not (averaged or steps):
        return scores
    with closing(Recorder(folder, trainer.updates, trainer.callbacks)) as recorder:
        for step in {*steps.values()}.intersection(saved):
            path = step_folder(folder, step)
            load_weights(model, read_weights(path), path)
            assert of_users is not None
            recorder.final(score := of_users(model), step)
            scores |= {name: score for name, each in steps.items() if each == step}
        if averaged:
            path, sources = average_last(folder, averaged)
            tell(f"{path}: average of the checkpoints of updates {', '.join(f'{step:,}' for step in sources)}")
            if validator is not None:
                load_weights(model, read_weights(path), path)
                scores["average"] = score = (of_users or validator)(model)
                recorder.average(score, position.step, sources)
    return scores


def _summary(trainer: Trainer) -> str:
    batches, device, workers = trainer.updates.batches, trainer.updates.device, trainer.workers
    parameters = sum(parameter.numel() for parameter in trainer.updates.module.parameters())
    steps = saved_steps(trainer.model_dir)
    begin = f"resuming from update {steps[-1]:,}" if steps else "starting"
    skipped = f", {batches.skipped:,} {batches.unit}s left out for their length" if batches.skipped else ""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shared = f"{counted(workers.size, 'worker')} with " if workers.size > 1 else ""
    where += f", {shared}{counted(torch.get_num_threads(), 'thread')}{' each' if shared else ''}"
    where += f", {trainer.config.precision}"
    return (
        f"{begin} in {trainer.model_dir}: {parameters:,} parameters on {where}; {len(batches):,} batches and "
        f"{batches.target_tokens:,} target tokens an epoch, {batches.padding_ratio:.1%} padding in "
        f"{counted(batches.shapes, 'shape')}{skipped}"
    )
