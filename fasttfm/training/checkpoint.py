"""Checkpoints: a directory each, complete or not there at all.

    MODEL/checkpoints/step-000001000/model.safetensors    weights, as translated with
                                     state.safetensors    all that resuming needs (newest two checkpoints only)
                                     sha256sums           of the two, as `sha256sum --check` reads it
                                     meta.json            step, epoch, the best step so far, the vocabulary's digest
    MODEL/checkpoints/average/       the same without state

A checkpoint is written under a temporary name, synced to the disk and then renamed, so a process killed at any moment
leaves the earlier ones as they were. `last` is the newest step, `best` the one whose validation score is best.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fasttfm.errors import UserError

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
META_FILE = "meta.json"
DIGESTS_FILE = "sha256sums"
_TEMPORARY = ".writing-"
_REPLACED = ".replaced-"
_STATES_KEPT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """All that a run needs, beside the weights, to go on as if it had not stopped."""

    tensors: dict[str, Tensor]
    """Optimizer moments, generator states, raw weights when an average is what is saved."""
    values: dict[str, Any]
    """Numbers and strings (JSON): step, position in the data, best scores, running sums of the log."""


def checkpoints_folder(model_dir: str | Path) -> Path:
    """Where the checkpoints of a model directory lie."""
    return Path(model_dir) / "checkpoints"


def step_folder(model_dir: str | Path, step: int) -> Path:
    """The directory of the checkpoint of update `step`."""
    return checkpoints_folder(model_dir) / f"step-{step:09d}"


def saved_steps(model_dir: str | Path) -> list[int]:
    """Updates that have a complete checkpoint, oldest first."""
    folder = checkpoints_folder(model_dir)
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdecimal()]
    # a copy under another name, such as step-12, is the user's
    return sorted(step for path in found if path == step_folder(model_dir, step := int(path.name[5:])))


def save_checkpoint(
    target: Path, weights: Mapping[str, Tensor], meta: Mapping[str, Any], state: TrainingState | None = None
) -> None:
    """Write one checkpoint directory, all or nothing; whatever was there before under that name is replaced.

    Raises UserError when the disk is full or the directory cannot be written; then nothing has changed.
    """
    temporary = target.parent / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target.parent)
        temporary.mkdir()
        # meta.json last: with it the directory would be complete even if the rename were not atomic
        digests = {MODEL_FILE: _write_tensors(temporary / MODEL_FILE, weights, {"format": "pt"})}
        if state is not None:
            values = {"values": json.dumps(state.values)}
            digests[STATE_FILE] = _write_tensors(temporary / STATE_FILE, state.tensors, values)
        lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
        (temporary / DIGESTS_FILE).write_text(lines, encoding="utf-8")
        _sync(temporary / DIGESTS_FILE)
        (temporary / META_FILE).write_text(json.dumps(dict(meta), indent=1) + "\n", encoding="utf-8")
        _sync(temporary / META_FILE)
        _sync(temporary)
        if target.exists():
            # a kill between these two renames is what recover puts right
            os.replace(target, target.parent / f"{_REPLACED}{target.name}")
        os.replace(temporary, target)
        _sync(target.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"{target}: cannot save the checkpoint: {error.strerror}; earlier checkpoints are untouched: make room or "
            "make the directory writable, then run the same command again to go on from the last one"
        ) from error
    recover(target.parent)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> str:
    """Write a .safetensors file and return the SHA-256 of its bytes."""
    content = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, metadata)
    path.write_bytes(content)  # not save_file, whose files only their owner may read whatever the umask says
    _sync(path)
    return hashlib.sha256(content).hexdigest()


def _sync(path: Path) -> None:
    """Make a file or a directory entry survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover(folder: Path) -> None:
    """Tidy up behind a process that was killed while it wrote, replaced or deleted a checkpoint."""
    for path in folder.glob(f"{_REPLACED}*"):
        original = folder / path.name.removeprefix(_REPLACED)
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, original)
    for path in folder.glob(f"{_TEMPORARY}*"):
        if not _is_written_by_another(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_written_by_another(path: Path) -> bool:
    """Whether the process whose number ends the temporary name is alive: `average` may run beside `train`."""
    number = path.name.rpartition("-")[2]
    if not number.isdecimal() or int(number) == os.getpid() or os.name == "nt":
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def prune(model_dir: str | Path, keep_last: int, keep: set[int]) -> None:
    """Delete all but the `keep_last` newest checkpoints (-1: none) and those of the steps in `keep`.

    Of the checkpoints that stay, all but the newest two lose their optimizer state, which is two thirds of the bytes.
    """
    steps = saved_steps(model_dir)
    old = steps[:-keep_last] if keep_last > 0 else []
    for step in steps:
        folder = step_folder(model_dir, step)
        if step in old and step not in keep:
            # renamed first, so that a kill in the middle leaves no half checkpoint under a good name
            doomed = folder.parent / f"{_TEMPORARY}pruned-{folder.name}-{os.getpid()}"
            os.replace(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        elif step in steps[:-_STATES_KEPT]:
            (folder / STATE_FILE).unlink(missing_ok=True)


# Reading


def resolve_checkpoint(model_dir: str | Path, which: str = "best") -> Path:
    """The directory (or .safetensors file) that `last`, `best`, `average`, a step number or a path means.

    `best` falls back to `last` when the run never validated. Raises UserError when there is none.
    """
    model_dir = Path(model_dir)
    folder = checkpoints_folder(model_dir)
    steps = saved_steps(model_dir)
    if which == "average":
        if not (folder / "average").is_dir():
            raise UserError(f"{model_dir}: has no averaged checkpoint; make one with: fasttfm average {model_dir}")
        return folder / "average"
    if which in ("last", "best"):
        if not steps:
            raise UserError(f"{model_dir}: has no checkpoint; train a model into it first (fasttfm train --out)")
        last = step_folder(model_dir, steps[-1])
        if which == "last":
            return last
        best = read_meta(last).get("best_step")
        return step_folder(model_dir, best) if best in steps else last
    if which.isdecimal() and int(which) in steps:
        return step_folder(model_dir, int(which))
    if which and Path(which).exists():
        return Path(which)
    found = ", ".join(map(str, steps)) or "none"
    raise UserError(
        f"checkpoint {which!r} was not found in {model_dir}: give last, best, average, a step ({found}) or a path"
    )


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """meta.json of a checkpoint directory; UserError when it is cut off."""
    path = checkpoint / META_FILE
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(meta, dict):
        raise _damaged(path, ValueError("not a JSON object"))
    return meta


def vocabulary_digest(model_dir: str | Path) -> str | None:
    """The SHA-256 of the SentencePiece models of a model directory; None when it has none."""
    digest, names = hashlib.sha256(), ("spm.model", "spm.src.model", "spm.tgt.model")
    found = [path for path in (Path(model_dir) / name for name in names) if path.is_file()]
    for path in found:
        digest.update(path.read_bytes())
    return digest.hexdigest() if found else None


def check_vocabulary(checkpoint: Path, model_dir: str | Path) -> None:
    """Raise UserError when a checkpoint says that it was trained with another vocabulary than is in `model_dir`.

    Of the same size it would load, and translate into nonsense. Weights that say nothing (a bare file) pass.
    """
    if not (checkpoint / META_FILE).is_file():
        return
    said = read_meta(checkpoint).get("vocabulary")
    if said is not None and said != vocabulary_digest(model_dir):
        raise UserError(
            f"{checkpoint}: was trained with another vocabulary than the SentencePiece model in {model_dir}: give a "
            "checkpoint of this model, or copy its SentencePiece model back"
        )


def read_weights(checkpoint: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Weights of a checkpoint directory or of a .safetensors file; UserError when it is cut off or damaged."""
    path = checkpoint / MODEL_FILE if checkpoint.is_dir() else checkpoint
    with _opened(path, device) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        _check_digest(path)
    return weights


def read_state(checkpoint: Path) -> TrainingState:
    """Training state of a checkpoint directory, on the CPU; UserError when it is missing, cut off or damaged."""
    with _opened(checkpoint / STATE_FILE, "cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        values = (file.metadata() or {}).get("values")
        if values is None:
            raise ValueError("it holds no training state")
        _check_digest(checkpoint / STATE_FILE)
        return TrainingState(tensors=tensors, values=json.loads(values))


def _check_digest(path: Path) -> None:
    """Raise ValueError when a checkpoint's file is not, bit for bit, what was written: safetensors would not notice."""
    try:
        lines = (path.parent / DIGESTS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return  # weights that somebody else wrote
    written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if path.name not in written:
        return
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != written[path.name]:
        raise ValueError(f"its SHA-256 is not the one in {DIGESTS_FILE}")


@contextlib.contextmanager
def _opened(path: Path, device: str | torch.device) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    folder = path.parent
    # only what a run wrote itself is ever advised to be deleted, never a directory that the user has named
    if folder.name.startswith("step-"):
        remedy = f"delete {folder} to use the checkpoint before it, or copy the file back"
    elif folder.name == "average":
        remedy = "make it anew with fasttfm average"
    else:
        remedy = "give a checkpoint directory of fasttfm train, or a .safetensors file"
    if not path.exists():
        return UserError(f"{path}: is missing; {remedy}")
    return UserError(f"{path}: is cut off or not what its name says ({error}); {remedy}")


def model_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared one (tied embeddings) appears once, under its first name."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor
    return weights


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Copy `weights` into `model`; UserError naming `source` and the first parameter that does not fit."""
    own = model_weights(model)
    for name, tensor in own.items():
        if name not in weights:
            raise UserError(f"{source}: is of another model: it has no {name}; give the checkpoint of this model")
        if weights[name].shape != tensor.shape:
            theirs, ours = tuple(weights[name].shape), tuple(tensor.shape)
            what = "vocabulary" if "embed" in name and theirs[1:] == ours[1:] else "model"
            raise UserError(
                f"{source}: is of another {what}: {name} is {theirs}, this model needs {ours}; "
                "give the checkpoint of this model"
            )
    for name in weights:
        if name not in own:
            raise UserError(
                f"{source}: is of another model: it has {name}, which this one has not; give this model's own"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
