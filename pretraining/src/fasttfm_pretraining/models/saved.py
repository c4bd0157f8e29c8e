"""Model directories of any kind: reading a configuration and the weights of a checkpoint; writing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fasttfm.config import RunConfig, build
from fasttfm.store.checkpoint import MODEL_FILE, write_tensors
from fasttfm.store.model_dir import CONFIG_FILE, DATA_FILE, read_config
from fasttfm.store.vocabulary import read_checkpoint
from fasttfm.system.files import write_file
from fasttfm.system.folders import reading, replacing
from fasttfm.system.parsing import write_yaml


def read_run(folder: Path, kind: str, checkpoint: str = "best") -> tuple[RunConfig, dict[str, Tensor], Path]:
    """Read configuration, weights, and which checkpoint they are: best, last, average, an update's number, or a path.

    Raises UserError for missing or damaged files, or another kind of model.
    """
    with reading(folder):
        config = build(read_config(folder, kind))
        return config, *read_checkpoint(folder, checkpoint)


def write_run(
    folder: Path,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    description: Mapping[str, Any] | None = None,
    card: str = "",
) -> None:
    """Write a model directory without checkpoints, atomically.

    tokenizer: a TextTokenizer. description: of the data that it was trained on. card: README.md.
    """
    with replacing(folder, "writing a model into it", "model") as fresh:
        write_file(fresh.path / CONFIG_FILE, config.to_yaml().encode())
        write_tensors(fresh.path / MODEL_FILE, weights)
        if description is not None:
            write_file(fresh.path / DATA_FILE, write_yaml(dict(description), sort_keys=False).encode())
        if card:
            write_file(fresh.path / "README.md", card.encode())
        tokenizer.save(fresh.path)
