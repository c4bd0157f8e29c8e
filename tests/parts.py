"""Checkpoints in parts, as train --shard once wrote them: of several ranks, by torch.distributed.checkpoint."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from fasttfm.checkpoints.checkpoint import META_FILE, MODEL_FILE, STATE_FILE, read_state, read_weights
from fasttfm.checkpoints.ownership import DIGESTS_FILE, describe
from fasttfm.checkpoints.shards import MODEL, SHARDS, STATE, VALUES_FILE
from fasttfm.files import sha256


def write_parts(
    folder: Path, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], values: Any, meta: Mapping[str, Any]
) -> None:
    """A checkpoint of these, by one rank."""
    tensors = {f"{MODEL}{name}": each for name, each in weights.items()}
    tensors |= {f"{STATE}{name}": each for name, each in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(tensors, storage_writer=FileSystemWriter(folder / SHARDS), no_dist=True)
    (folder / VALUES_FILE).write_text(json.dumps(values))
    names = [VALUES_FILE, *(f"{SHARDS}/{path.name}" for path in (folder / SHARDS).iterdir())]
    describe(folder, {name: sha256(folder / name) for name in names}, meta)


def divide(checkpoint: Path) -> None:
    """Put the same checkpoint in parts into its place."""
    weights, state = read_weights(checkpoint), read_state(checkpoint)
    meta = json.loads((checkpoint / META_FILE).read_text())
    for name in (MODEL_FILE, STATE_FILE, DIGESTS_FILE, META_FILE):
        (checkpoint / name).unlink()
    write_parts(checkpoint, weights, state.tensors, state.values, meta)
