"""Checkpoints of a model that is divided among ranks (FSDP2), written by all through torch.distributed.checkpoint.

    MODEL/checkpoints/step-000001000/shards/      torch's files: weights as model.NAME, training state as state.NAME
                                     values.json  what of the state is not a tensor
                                     sha256sums, meta.json    as in any checkpoint

As any checkpoint it is complete or not there at all, and read as one: read_weights and read_state of checkpoint.py put
the parts together. All ranks must see the same directory.
"""

import json
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fasttfm.checkpoints.ownership import DIGESTS_FILE, claimed, completed, read_digests, recover
from fasttfm.errors import UserError
from fasttfm.files import sha256, sync, write_file
from fasttfm.parsing import parse_json

SHARDS = "shards"
VALUES_FILE = "values.json"
MODEL, STATE = "model.", "state."


class Ranks(Protocol):
    """Operations that ranks need to write one checkpoint together (see fasttfm.training.workers)."""

    @property
    def is_first(self) -> bool: ...
    def broadcast(self, value: Any) -> Any: ...
    def wait(self) -> None: ...


def is_sharded(checkpoint: Path) -> bool:
    """Return whether a checkpoint directory holds parts of several ranks."""
    return (checkpoint / SHARDS).is_dir()


def save_sharded(
    target: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any], meta: Mapping[str, Any], ranks: Ranks
) -> None:
    """Write one checkpoint directory by all ranks, all or nothing.

    tensors: this rank's, DTensors or the same on all ranks, by names that begin with MODEL or STATE. The rest is looked
    at on the first rank alone. Raises UserError when the disk is full or the directory cannot be written.
    """
    from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save

    try:
        with ExitStack() as stack:
            folder = None
            if ranks.is_first:
                target.parent.mkdir(parents=True, exist_ok=True)
                recover(target.parent)
                folder = stack.enter_context(claimed(target.parent, target.name))
            folder = ranks.broadcast(folder)
            # sync_files: each file is on the disk before this ends
            save(dict(tensors), storage_writer=FileSystemWriter(folder / SHARDS, sync_files=True))
            ranks.wait()
            if not ranks.is_first:
                return
            write_file(folder / VALUES_FILE, json.dumps(dict(values)).encode())
            names = [VALUES_FILE, *sorted(f"{SHARDS}/{path.name}" for path in (folder / SHARDS).iterdir())]
            sync(folder / SHARDS)
            completed(folder, target, {name: sha256(folder / name) for name in names}, meta)
        recover(target.parent)
    except (OSError, CheckpointException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(
            f"{target}: cannot save the checkpoint: {reason}; earlier checkpoints are untouched: make room, or give "
            "all ranks one directory that they can write, then run the same command again to go on from the last one"
        ) from error


def read_shards(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors whose names begin with `prefix`, whole and on the CPU, without it.

    Raises ValueError for a file that is not what was written, OSError for one that cannot be read.
    """
    from torch.distributed.checkpoint import FileSystemReader, load

    check_shards(checkpoint)
    reader = FileSystemReader(checkpoint / SHARDS)
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():  # that no process group is there, which is as it should be
        warnings.simplefilter("ignore")
        load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def read_values(checkpoint: Path) -> dict[str, Any]:
    """Return the training state apart from its tensors; errors as in read_shards."""
    return dict(parse_json((checkpoint / VALUES_FILE).read_bytes(), dict, finite=False))


def check_shards(checkpoint: Path) -> None:
    """Raise ValueError when a file is not, bit for bit, what was written."""
    written = read_digests(checkpoint)
    present = {VALUES_FILE, *(f"{SHARDS}/{path.name}" for path in (checkpoint / SHARDS).iterdir())}
    for name in sorted({*written} | present):
        if name not in present or written.get(name) != sha256(checkpoint / name):
            raise ValueError(f"{name} is missing, or its SHA-256 is not the one in {DIGESTS_FILE}")
