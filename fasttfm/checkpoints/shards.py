"""Checkpoints in parts of several ranks (torch.distributed.checkpoint), as train --shard wrote them: read, not written.

MODEL/checkpoints/step-000001000/shards/      torch's files: weights as model.NAME, training state as state.NAME
                                 values.json  what of the state is not a tensor
                                 sha256sums, meta.json    as in any checkpoint
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.checkpoints.ownership import DIGESTS_FILE, read_digests
from fasttfm.files import sha256
from fasttfm.parsing import parse_json

SHARDS = "shards"
VALUES_FILE = "values.json"
MODEL, STATE = "model.", "state."


def is_sharded(checkpoint: Path) -> bool:
    """Return whether a checkpoint directory holds parts of several ranks."""
    return (checkpoint / SHARDS).is_dir()


def read_shards(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors whose names begin with `prefix`, whole and on the CPU, without it.

    Raises ValueError for a file that is not what was written, OSError for one that cannot be read.
    """
    from torch.distributed.checkpoint import FileSystemReader, load

    _check(checkpoint)
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


def _check(checkpoint: Path) -> None:
    """Raise ValueError when a file is not, bit for bit, what was written."""
    written = read_digests(checkpoint)
    present = {VALUES_FILE, *(f"{SHARDS}/{path.name}" for path in (checkpoint / SHARDS).iterdir())}
    for name in sorted({*written} | present):
        if name not in present or written.get(name) != sha256(checkpoint / name):
            raise ValueError(f"{name} is missing, or its SHA-256 is not the one in {DIGESTS_FILE}")
