"""One training run from start to end: data, model directory, model, trainer, average."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fasttfm.checkpoints.checkpoint import read_weights
from fasttfm.checkpoints.model_dir import CONFIG_FILE, prepare_model_dir, refuse_strangers
from fasttfm.checkpoints.steps import consecutive_steps, resolve_checkpoint, saved_steps
from fasttfm.checkpoints.vocabulary import check_vocabulary
from fasttfm.checkpoints.weights import load_weights, model_weights
from fasttfm.config import Config, Values, build
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.folders import Verification
from fasttfm.locks import locked
from fasttfm.memory import limit_remedy
from fasttfm.models import Transformer
from fasttfm.training.average import average_last
from fasttfm.training.callback import Callback
from fasttfm.training.progress import tell
from fasttfm.training.trainer import Trainer
from fasttfm.training.updates import AUTOCAST
from fasttfm.training.validate import Validation, Validator
from fasttfm.training.workers import Workers, device_of_rank, joined
from fasttfm.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a finished run has to show."""

    reason: str
    """Why it stopped."""
    score: Validation | None
    """Validation of the last weights, if this session validated."""
    average: Validation | None
    """Validation of the averaged checkpoint, if the recipe asks for one."""


def train(
    values: Values,
    data_dir: Path,
    model_dir: Path,
    device: torch.device | None = None,
    *,
    init_from: Path | None = None,
    settings: str = "",
    callbacks: Sequence[Callback] = (),
) -> Outcome | None:
    """Train, or go on training, a model on prepared data into `model_dir`.

    values: from fasttfm.config.gather. device: None takes a GPU if there is one. init_from: a checkpoint, or a model
    directory whose best one is meant, with whose weights a new run begins. settings: of the process, to be shown.
    callbacks: called by rank 0.
    Started by torchrun, the processes train together; all but rank 0 get None.
    Raises UserError for anything that the caller can put right; Stopped, a KeyboardInterrupt, with a line for the user
    after Ctrl-C, SIGTERM or SIGHUP.
    """
    device = device_of_rank(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with joined(device) as workers:
        if not workers.is_first:
            workers.wait()  # what is wrong with data or directory is found, and told, by rank 0 alone
        data = PreparedData.open(data_dir)
        config = _with_vocabulary(values, data)
        _set_threads(config.training.threads, device)
        if not workers.is_first:
            return _train(config, data, model_dir, device, workers, init_from, settings, ())
        refuse_strangers(model_dir)
        try:
            with locked(model_dir):
                prepare_model_dir(model_dir, config, data)
                workers.wait()
                return _train(config, data, model_dir, device, workers, init_from, settings, callbacks)
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


def _set_threads(threads: int, device: torch.device) -> None:
    """Threads of this process: those asked for, else one where several ranks share the machine's cores."""
    if not threads and device.type == "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        threads = 1
    if threads:
        torch.set_num_threads(threads)


def _train(
    config: Config,
    data: PreparedData,
    model_dir: Path,
    device: torch.device,
    workers: Workers,
    init_from: Path | None,
    settings: str,
    callbacks: Sequence[Callback],
) -> Outcome | None:
    torch.manual_seed(config.training.seed)
    is_sharded = config.training.shard and workers.size > 1
    model = Transformer(config.model)
    if not is_sharded:  # a model that is divided need not fit
        model.to(device)
    if workers.is_first and init_from is not None and not saved_steps(model_dir):
        _begin_with(model, init_from, model_dir)
    if is_sharded and not saved_steps(model_dir):
        given = workers.broadcast_tensors(model_weights(model) if workers.is_first else None)
        load_weights(model, given, model_dir)
    verification = data.verify() if workers.is_first else None
    trainer = _trainer(model, config, data, model_dir, device, verification, workers, callbacks)
    if workers.is_first:
        tell(_summary(model, trainer.updates.batches, model_dir, device, workers) + settings)
    reason = trainer.run()
    outcome = None
    if verification is not None:
        verification.finish()
        average = _average(Transformer(config.model).to(device) if is_sharded else model, config, trainer, model_dir)
        outcome = Outcome(reason=reason, score=trainer.last_score, average=average)
    workers.wait()
    return outcome


def _out_of_memory(config: Config, device: torch.device) -> UserError:
    halved, doubled = config.data.max_tokens // 2, config.training.update_freq * 2
    return UserError(
        f"{device} is out of memory with batches of {config.data.max_tokens:,} tokens: give --max-tokens {halved} "
        f"--update-freq {doubled} and a new --out, which sums two halves into the same update{limit_remedy()}"
    )


def _begin_with(model: Transformer, init_from: Path, model_dir: Path) -> None:
    """Put the weights of a checkpoint of the same vocabulary and shape into a model."""
    if not init_from.exists():
        raise UserError(f"--init-from {init_from}: does not exist: give a checkpoint or a model directory")
    checkpoint = resolve_checkpoint(init_from) if (init_from / CONFIG_FILE).is_file() else init_from
    check_vocabulary(checkpoint, model_dir)
    load_weights(model, read_weights(checkpoint), checkpoint)


def _with_vocabulary(values: Values, data: PreparedData) -> Config:
    sizes = {"vocab_size": len(data.target_tokenizer)}
    if not data.joint:
        sizes["source_vocab_size"] = len(data.source_tokenizer)
        if values["model"].get("share_embeddings", "all") == "all":
            raise UserError(
                f"{data.path}: has a vocabulary for each side, but share_embeddings all needs a joint one: give "
                "--share-embeddings decoder or none, or prepare the data without --separate-vocab"
            )
    return build(values, sizes)


def _trainer(
    model: Transformer,
    config: Config,
    data: PreparedData,
    model_dir: Path,
    device: torch.device,
    verification: Verification | None,
    workers: Workers,
    callbacks: Sequence[Callback],
) -> Trainer:
    recipe, batching = config.training, config.data
    try:
        batches = TokenBatches(
            data.train,
            batching.max_tokens,
            recipe.seed,
            batching.max_sentence_tokens,
            batching.subword_sampling,
            (data.source_tokenizer, data.target_tokenizer),
            verification,
        )
    except ValueError as error:
        raise UserError(f"{data.path}: {error}: raise --max-tokens or --max-sentence-tokens") from error
    validator = None
    if recipe.valid_interval_updates and (workers.is_first or not recipe.shard):
        validator = Validator(
            data,
            max_tokens=batching.max_tokens,
            label_smoothing=recipe.label_smoothing,
            decoding=dataclasses.replace(config.decoding, beam=recipe.valid_beam, nbest=1)
            if recipe.valid_bleu
            else None,
            device=device,
            bleu_tokenizer=recipe.valid_bleu_tokenizer,
            autocast=AUTOCAST[recipe.precision],
        )
    return Trainer(
        model,
        batches,
        recipe,
        model_dir,
        validator=validator,
        device=device,
        verification=verification,
        workers=workers,
        callbacks=callbacks,
    )


def _average(model: Transformer, config: Config, trainer: Trainer, model_dir: Path) -> Validation | None:
    """Make the averaged checkpoint that the recipe asks for and validate it, leaving its weights in the model."""
    wanted = min(config.training.average_last, len(consecutive_steps(model_dir)))
    if not wanted:
        return None
    path, steps = average_last(model_dir, wanted)
    tell(f"{path}: average of the checkpoints of updates {', '.join(f'{step:,}' for step in steps)}")
    if trainer.validator is None:
        return None
    load_weights(model, read_weights(path), path)
    score = trainer.validator(model)
    trainer.record_average(score, steps)
    return score


def _summary(model: Transformer, batches: TokenBatches, model_dir: Path, device: torch.device, workers: Workers) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    steps = saved_steps(model_dir)
    begin = f"going on from update {steps[-1]:,}" if steps else "starting"
    skipped = f", {batches.skipped:,} pairs left out for their length" if batches.skipped else ""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shared = f"{counted(workers.size, 'worker')} with " if workers.size > 1 else ""
    where += f", {shared}{counted(torch.get_num_threads(), 'thread')}{' each' if shared else ''}"
    return (
        f"{begin} in {model_dir}: {parameters:,} parameters on {where}; {len(batches):,} batches and "
        f"{batches.target_tokens:,} target tokens an epoch, {batches.padding_ratio:.1%} padding in "
        f"{counted(batches.shapes, 'shape')}{skipped}"
    )
