"""Checkpoints: a directory each, complete or not there at all.

    MODEL/checkpoints/step-000001000/model.safetensors    weights, as translated with
                                     state.safetensors    all that resuming needs (newest two checkpoints only)
                                     sha256sums           of the two, as `sha256sum --check` reads it
                                     meta.json            step, epoch, the best step so far, the vocabulary's digest
    MODEL/checkpoints/average/       the same without state

A checkpoint is written under a temporary name, synced to the disk and then renamed, so a process killed at any moment
leaves the earlier ones as they were. `last` is the newest step, `best` the one whose validation score is best.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.store import quantized
from fasttfm.store.ownership import DIGESTS_FILE, META_FILE, claimed, describe, published, read_digests, recover
from fasttfm.store.weights import refuse_what_is_no_number
from fasttfm.system.files import refuse_bytes, sha256, unreadable, write_file
from fasttfm.system.parsing import parse_json, told

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
_META = {
    **dict.fromkeys(("step", "epoch", "best_step", "previous_step"), int),
    "average_of": list,
    **dict.fromkeys(("vocabulary", "precision"), str),
}
"""Field of meta.json -> its type; each may be missing or null."""


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, or was read and is not what was written."""

    def __init__(self, problem: str, remedy: str) -> None:
        """problem: the file and what is wrong with it; remedy: what to do."""
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """All that a run needs, beside the weights, to go on as if it had not stopped."""

    tensors: dict[str, Tensor]
    """Optimizer moments, generator states, raw weights when an average is what is saved."""
    values: dict[str, Any]
    """Numbers and strings (JSON): step, position in the data, best scores, running sums of the log."""


def save_checkpoint(
    target: Path, weights: Mapping[str, Tensor], meta: Mapping[str, Any], state: TrainingState | None = None
) -> None:
    """Write one checkpoint directory, all or nothing; whatever was there before under that name is replaced.

    Raises UserError when the disk is full or the directory cannot be written; then nothing has changed.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target.parent)
        with claimed(target.parent, target.name) as folder:
            digests = {MODEL_FILE: write_tensors(folder / MODEL_FILE, weights)}
            if state is not None:
                values = json.dumps(state.values)
                digests[STATE_FILE] = write_tensors(folder / STATE_FILE, state.tensors, values=values)
            describe(folder, digests, meta)
            published(folder, target)
        recover(target.parent)
    except OSError as error:
        raise UserError(
            f"{target}: cannot save the checkpoint: {error.strerror}; earlier checkpoints are untouched: make room or "
            "make the directory writable, then run the same command again to go on from the last one"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> str:
    """Write a .safetensors file, of weights where no metadata say otherwise, and return the SHA-256 of its bytes."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    content = save(tensors, metadata or {"format": "pt"})
    write_file(path, content)  # not save_file, whose files only their owner may read whatever the umask says
    return hashlib.sha256(content).hexdigest()


# Reading


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """meta.json of a checkpoint directory; UserError when it is missing, cut off or cannot be read."""
    path = checkpoint / META_FILE
    with _told(path):
        meta = parse_json(path.read_bytes(), dict)
        for name, kind in _META.items():
            if not isinstance(meta.get(name), kind | None) or isinstance(meta.get(name), bool):
                raise ValueError(f"{name} is {told(meta[name])}")
        if not all(type(step) is int for step in meta.get("average_of") or []):
            raise ValueError("average_of holds something else than steps")
        return meta


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint directory or of a .safetensors file; matrices stored in int8 come as float32.

    Raises UserError when the file cannot be read, is not what was written, or holds NaN, infinity or complex numbers.
    """
    _refuse_parts(checkpoint)
    path = checkpoint / MODEL_FILE if checkpoint.is_dir() else checkpoint
    with _opened(path) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        _check_digest(path)
        weights = quantized.restored(weights)
    refuse_what_is_no_number(weights, path)
    return weights


def is_quantized(checkpoint: Path) -> bool:
    """Return whether the matrices of a checkpoint directory or of a .safetensors file are stored in int8."""
    with _opened(checkpoint / MODEL_FILE if checkpoint.is_dir() else checkpoint) as file:
        return any(file.get_slice(name).get_dtype() == "I8" for name in file.keys())  # noqa: SIM118


def read_state(checkpoint: Path) -> TrainingState:
    """Training state of a checkpoint directory, on the CPU; UserError when it is missing, cut off or damaged."""
    _refuse_parts(checkpoint)
    with _opened(checkpoint / STATE_FILE) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        values = (file.metadata() or {}).get("values")
        if values is None:
            raise ValueError("it holds no training state")
        _check_digest(checkpoint / STATE_FILE)
        return TrainingState(tensors=tensors, values=parse_json(values, dict, finite=False))


def is_resumable(checkpoint: Path) -> bool:
    """Return whether weights and training state of a checkpoint directory are whole. Reads both."""
    try:
        read_state(checkpoint)
        read_weights(checkpoint)
        read_meta(checkpoint)
    except UserError:
        return False
    return True


def _refuse_parts(checkpoint: Path) -> None:
    if (checkpoint / "shards").is_dir():
        raise UserError(
            f"{checkpoint}: is in parts, as version 0.3 wrote it under --shard: join it there (consolidate)"
        )


def _check_digest(path: Path) -> None:
    """Raise ValueError when a checkpoint's file is not, bit for bit, what was written: safetensors would not notice."""
    try:
        written = read_digests(path.parent)
    except FileNotFoundError:
        return  # weights that somebody else wrote
    if path.name not in written:
        if (path.parent / META_FILE).exists() and path.name in (MODEL_FILE, STATE_FILE):
            raise ValueError(f"{DIGESTS_FILE} beside it was cut off and does not name it")
        return
    if sha256(path) != written[path.name]:
        raise ValueError(f"its SHA-256 is not the one in {DIGESTS_FILE}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    refuse_bytes(path)
    with _told(path):
        with path.open("rb"):
            pass  # the operating system's reason, which safetensors does not tell
        with safe_open(path, framework="pt") as file:
            yield file


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise what goes wrong while a file is read as a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged(path, "is missing") from error
    except (OSError, SafetensorError, ValueError) as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        if isinstance(error, OSError):
            raise unreadable(path, error) from error
        if "os error 24" in str(error):  # of safetensors, which opens the file anew
            raise unreadable(path, OSError(errno.EMFILE, os.strerror(errno.EMFILE))) from error
        raise _damaged(path, f"is cut off or not what its name says ({error})") from error


def _damaged(path: Path, problem: str) -> DamagedCheckpoint:
    if path.parent.name == "average":
        remedy = "make it anew with fasttfm average"
    elif path.parent.name.startswith("step-"):
        remedy = "copy the file back, or use another checkpoint"
    else:
        remedy = "give a checkpoint directory of fasttfm train, or a .safetensors file"
    return DamagedCheckpoint(f"{path}: {problem}", remedy)
