"""Checkpoints: one directory each, written atomically.

    MODEL/checkpoints/step-000001000/model.safetensors    weights for translation
                                     state.safetensors    the state for resuming (newest two checkpoints only)
                                     sha256sums           of the two, in the format of `sha256sum --check`
                                     meta.json            step, epoch, best step so far, digest of the vocabulary
    MODEL/checkpoints/average/       the same without state

A checkpoint is written under a temporary name, synced and renamed, so a kill at any time leaves the earlier ones
intact. `last` is the newest step, `best` the one with the best validation score.
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
from fasttfm.store.ownership import DIGESTS_FILE, META_FILE, describe, publishing, read_digests
from fasttfm.store.weights import refuse_nonfinite
from fasttfm.system.files import refuse_bytes, sha256, unreadable, write_file
from fasttfm.system.parsing import parse_json, type_name

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
_META = {
    **dict.fromkeys(("step", "epoch", "best_step", "previous_step"), int),
    "average_of": list,
    **dict.fromkeys(("vocabulary", "precision"), str),
}
"""Field of meta.json -> its type; all may be missing or null."""


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, or its content is not what was written."""

    def __init__(self, problem: str, remedy: str) -> None:
        """problem: the file and its fault. remedy: what to do."""
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """The state for exact resumption, in addition to the weights."""

    tensors: dict[str, Tensor]
    """Optimizer moments, generator states, and the raw weights if the saved ones are an average."""
    values: dict[str, Any]
    """JSON values: step, position in the data, best scores, running sums of the log."""


def save_checkpoint(
    target: Path, weights: Mapping[str, Tensor], meta: Mapping[str, Any], state: TrainingState | None = None
) -> None:
    """Write a checkpoint directory atomically, replacing an existing one.

    Raises UserError, leaving everything unchanged, if the disk is full or the directory is not writable.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with publishing(target) as folder:
            digests = {MODEL_FILE: write_tensors(folder / MODEL_FILE, weights)}
            if state is not None:
                values = json.dumps(state.values)
                digests[STATE_FILE] = write_tensors(folder / STATE_FILE, state.tensors, values=values)
            describe(folder, digests, meta)
    except OSError as error:
        raise UserError(
            f"{target}: cannot save the checkpoint: {error.strerror}; earlier checkpoints are intact: free some space "
            "or make the directory writable, then run the same command again to resume from the last one"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> str:
    """Write a .safetensors file and return its SHA-256. metadata: default {"format": "pt"}, for weights."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    content = save(tensors, metadata or {"format": "pt"})
    write_file(path, content)  # not save_file, which ignores the umask and makes files readable by the owner only
    return hashlib.sha256(content).hexdigest()


# Reading


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """meta.json of a checkpoint directory; UserError if it is missing, truncated or unreadable."""
    path = checkpoint / META_FILE
    with _read_errors(path):
        meta = parse_json(path.read_bytes(), dict)
        for name, kind in _META.items():
            if not isinstance(meta.get(name), kind | None) or isinstance(meta.get(name), bool):
                raise ValueError(f"{name} is {type_name(meta[name])}")
        if not all(type(step) is int for step in meta.get("average_of") or []):
            raise ValueError("average_of must be a list of steps")
        return meta


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint directory or a .safetensors file; int8 matrices are dequantized to float32.

    Raises UserError for an unreadable or damaged file, and for NaN, infinity or complex numbers.
    """
    path = checkpoint / MODEL_FILE if checkpoint.is_dir() else checkpoint
    with _opened(path) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        _check_digest(path)
        weights = quantized.restored(weights)
    refuse_nonfinite(weights, path)
    return weights


def is_quantized(checkpoint: Path) -> bool:
    """Whether the matrices of a checkpoint directory or a .safetensors file are stored in int8."""
    with _opened(checkpoint / MODEL_FILE if checkpoint.is_dir() else checkpoint) as file:
        return any(file.get_slice(name).get_dtype() == "I8" for name in file.keys())  # noqa: SIM118


def read_state(checkpoint: Path) -> TrainingState:
    """Training state of a checkpoint directory, on the CPU; UserError if it is missing, truncated or damaged."""
    with _opened(checkpoint / STATE_FILE) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        values = (file.metadata() or {}).get("values")
        if values is None:
            raise ValueError("it has no training state")
        _check_digest(checkpoint / STATE_FILE)
        return TrainingState(tensors=tensors, values=parse_json(values, dict, finite=False))


def is_resumable(checkpoint: Path, *, state: bool = True) -> bool:
    """Whether weights and training state of a checkpoint directory are intact. Reads both; state: False: weights."""
    try:
        read_weights(checkpoint)
        if state:
            read_state(checkpoint)
            read_meta(checkpoint)
    except UserError:
        return False
    return True


def _check_digest(path: Path) -> None:
    """Raise ValueError if a checkpoint's file has changed since it was written, which safetensors would not notice."""
    try:
        written = read_digests(path.parent)
    except FileNotFoundError:
        return  # weights from another program
    if path.name not in written:
        if (path.parent / META_FILE).exists() and path.name in (MODEL_FILE, STATE_FILE):
            raise ValueError(f"it is missing from {DIGESTS_FILE}, which is truncated")
        return
    if sha256(path) != written[path.name]:
        raise ValueError(f"its SHA-256 differs from {DIGESTS_FILE}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    refuse_bytes(path)
    with _read_errors(path):
        with path.open("rb"):
            pass  # raises the operating system's error, which safetensors hides
        with safe_open(path, framework="pt") as file:
            yield file


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Translate errors while reading a file into UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged(path, "is missing") from error
    except (OSError, SafetensorError, ValueError) as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        if isinstance(error, OSError):
            raise unreadable(path, error) from error
        if "os error 24" in str(error):  # from safetensors, which opens the file again
            raise unreadable(path, OSError(errno.EMFILE, os.strerror(errno.EMFILE))) from error
        raise _damaged(path, f"is truncated or damaged ({error})") from error


def _damaged(path: Path, problem: str) -> DamagedCheckpoint:
    if path.parent.name == "average":
        remedy = "recreate it with fasttfm average"
    elif path.parent.name.startswith("step-"):
        remedy = "copy the file back, or use another checkpoint"
    else:
        remedy = "give a checkpoint directory of fasttfm train, or a .safetensors file"
    return DamagedCheckpoint(f"{path}: {problem}", remedy)
