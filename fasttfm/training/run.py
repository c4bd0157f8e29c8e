"""One training run from start to end: data, model directory, model, trainer, average; of any task."""

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
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
    """Validation of the best checkpoint, if it was validated by another search than the one that users get."""
    average: Score | None
    """Validation of the averaged checkpoint, if the recipe asks for one."""


def train(
    values: Values,
    data_dir: Path,
    model_dir: Path,
    device: torch.device | None = None,
    *,
    task: Task | None = None,
    init_from: Path | None = None,
    resumed_with: Sequence[str] = (),
    settings: str = "",
    callbacks: Sequence[Callback] = (),
    started: float | None = None,
) -> Outcome | None:
    """Train a model on prepared data into `model_dir`, or resume its training.

    values: from fasttfm.config.gather, of the task's kind. device: None takes a GPU if there is one. task: None for
    translation. init_from: a checkpoint, or a model
    directory whose best one is meant, with whose weights a new run begins. resumed_with: settings that have another
    value than the run, which must have begun. settings: of the process, to be shown.
    callbacks: called by rank 0. started: when the minutes of the run began, by time.monotonic(); None: now.
    Started by torchrun, the processes train together; all but rank 0 get None.
    Raises UserError for anything that the caller can put right; Stopped, a KeyboardInterrupt, with a line for the user
    after Ctrl-C, SIGTERM or SIGHUP.
    """
    started = time.monotonic() if started is None else started
    task = task or Translation()
    device = device_of_rank(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    minutes = values["training"].get("rank_timeout_minutes", TrainingConfig().rank_timeout_minutes)
    with joined(device, minutes) as workers:
        if not workers.is_first:
            workers.wait()  # what is wrong with data or directory is found, and told, by rank 0 alone
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
                raise  # raised by hand somewhere, not by the operating system
            # writing to an open file on a full disk names no file
            raise UserError(
                f"{error.filename or model_dir}: {error.strerror}; checkpoints saved before are untouched: make "
                "room or make the directory writable, then run the same command again to go on from the last one"
            ) from error


def _decided(config: RunConfig, model_dir: Path, device: torch.device) -> RunConfig:
    """The configuration with what `auto` stands for: the precision of the run which is gone on with, else the one for
    rank 0's device. UserError where that run's config.yaml says what no run has begun with."""
    if config.training.precision != "auto" or not saved_steps(model_dir):
        return _with_precision(config, resolved_precision(config.training.precision, device))
    saved = read_config(model_dir, config.kind)["training"]["precision"]
    reason = "a run has what auto stood for when it began"
    if saved != "auto":
        try:
            return _with_precision(config, saved)
        except ValueError as error:  # goes with nothing else that was asked for
            reason = str(error)
    raise UserError(
        f"{model_dir / CONFIG_FILE}: training.precision {saved} was not written by this run ({reason}): copy the file "
        "back, or give another --out"
    )


def _with_precision(config: RunConfig, precision: Any) -> RunConfig:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, precision=precision))


def _set_threads(threads: int, device: torch.device) -> None:
    """Threads of this process: those asked for, else one where several ranks share the machine's cores."""
    if not threads and device.type == "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        threads = 1
    if threads:
        torch.set_num_threads(threads)


def _train(
    task: Task,
    config: RunConfig,
    data: Data,
    model_dir: Path,
    device: torch.device,
    workers: Workers,
    init_from: Path | None,
    settings: str,
    callbacks: Sequence[Callback],
    started: float,
    changed: dict[str, tuple[Any, Any]],
) -> Outcome | None:
    config = _with_precision(config, workers.broadcast(config.training.precision))  # rank 0's, on any device
    recipe = config.training
    torch.manual_seed(recipe.seed)
    is_sharded = recipe.shard and workers.size > 1
    model = task.model(config.model)
    if not is_sharded:  # a model that is divided need not fit
        model.to(device)
    if workers.is_first and init_from is not None and not saved_steps(model_dir):
        task.initialise(model, init_from, model_dir)
    if is_sharded and not saved_steps(model_dir):
        given = workers.broadcast_tensors(model_weights(model) if workers.is_first else None)
        load_weights(model, given, model_dir)
    validates = recipe.valid_interval_updates and (workers.is_first or not recipe.shard)
    trainer = Trainer(
        model,
        task.batches(config, data),
        recipe,
        model_dir,
        validator=task.validator(config, data, device) if validates else None,
        device=device,
        workers=workers,
        callbacks=callbacks,
        started=started,
        changed={name: new for name, (_, new) in changed.items()},
    )
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
    """Validate by the search that users get, where the run has used another: its best and its last checkpoint, and the
    average that the recipe asks for, whose weights stay in the model. By name, as Outcome has them."""
    position, validator = trainer.updates.position, trainer.validator
    of_users = None if validator is None else validator.of_users()
    folder, saved = trainer.model_dir, saved_steps(trainer.model_dir)
    averaged = min(trainer.config.average_last, len(consecutive_steps(folder)))
    steps = {"best": position.best[0][1], "score": position.step} if of_users and position.best else {}
    scores: dict[str, Score] = {}
    if not (averaged or steps):
        return scores
    with trainer.recorder() as recorder:
        for step in {*steps.values()}.intersection(saved):
            path = step_folder(folder, step)
            load_weights(model, read_weights(path), path)
            assert of_users is not None
            recorder.final(score := of_users(model), step)
            scores |= {name: score for name, each in steps.items() if each == step}
        if averaged:
            path, of = average_last(folder, averaged)
            tell(f"{path}: average of the checkpoints of updates {', '.join(f'{step:,}' for step in of)}")
            if validator is not None:
                load_weights(model, read_weights(path), path)
                scores["average"] = score = (of_users or validator)(model)
                recorder.average(score, position.step, of)
    return scores


def _summary(trainer: Trainer) -> str:
    batches, device, workers = trainer.updates.batches, trainer.updates.device, trainer.workers
    parameters = sum(parameter.numel() for parameter in trainer.updates.module.parameters())
    steps = saved_steps(trainer.model_dir)
    begin = f"going on from update {steps[-1]:,}" if steps else "starting"
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
