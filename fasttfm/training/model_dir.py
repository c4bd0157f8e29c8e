"""The model directory: everything that translating needs, and a guard against mixing two runs in one place.

MODEL/config.yaml             the resolved configuration, all sections
      data.yaml               what the prepared data were
      spm.model               (or spm.src.model and spm.tgt.model)
      checkpoints/            see fasttfm.training.checkpoint
      train.log.jsonl, hypotheses/, tensorboard/
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from fasttfm.config import SECTIONS, Config, Values, field_types, read_yaml
from fasttfm.data import PreparedData
from fasttfm.errors import UserError
from fasttfm.training.checkpoint import saved_steps

CONFIG_FILE = "config.yaml"
DATA_FILE = "data.yaml"
_LOCK_FILE = ".lock"

# What may change between two sessions of one run, because it decides neither what an
# update does to the weights nor what the scores of earlier validations mean.
_MAY_CHANGE = {
    "max_update",
    "max_epoch",
    "max_minutes",
    "patience",
    "valid_interval_updates",
    "save_interval_updates",
    "keep_interval_updates",
    "keep_best",
    "average_last",
    "log_interval",
    "tensorboard",
    "threads",
}


def refuse_strangers(path: Path) -> None:
    """Raise UserError when `path` is a file, or a directory that holds something else than a model."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; give --out the name of a directory")
    # .config.yaml is what a kill in the middle of its writing leaves
    own = (_LOCK_FILE, f".{CONFIG_FILE}")
    strangers = [name for name in os.listdir(path) if name not in own] if path.is_dir() else []
    if strangers and not (path / CONFIG_FILE).exists():
        raise UserError(f"{path}: is not empty and no model directory; give --out a new or empty directory")


def prepare_model_dir(path: Path, config: Config, data: PreparedData) -> None:
    """Create `path` for a new run, or check that it may be gone on with.

    Raises UserError for a run that was begun with another model, recipe, vocabulary or corpus.
    """
    if saved_steps(path):
        _refuse_other_recipe(path, config)
        _refuse_other_data(path, data)
    path.mkdir(parents=True, exist_ok=True)
    # config.yaml first: it marks the directory as ours, so that a kill or a full disk behind it can be gone on from
    _replace(path / CONFIG_FILE, config.to_yaml().encode())
    for file in [*data.model_files, data.path / DATA_FILE]:
        _replace(path / file.name, file.read_bytes())


def read_config(path: Path) -> Values:
    """config.yaml of a model directory; UserError when there is none."""
    if not (path / CONFIG_FILE).is_file():
        raise UserError(f"{path}: is not a model directory (it has no {CONFIG_FILE}); fasttfm train --out makes one")
    values = read_yaml(path / CONFIG_FILE)
    for section, cls in SECTIONS.items():
        for name in field_types(cls):
            if name not in values[section]:
                raise UserError(
                    f"{path / CONFIG_FILE}: is cut off: it has no {section}.{name}; copy it back, or train into "
                    "another --out"
                )
    return values


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let only one process train into `path` at a time. The lock ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nothing to lock with
        yield
        return
    path.mkdir(parents=True, exist_ok=True)
    with (path / _LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{path}: another process is training into it; wait for it or give another --out"
            ) from error
        yield


def _refuse_other_recipe(path: Path, config: Config) -> None:
    before, now = read_config(path), config.to_values()
    for section in ("model", "data", "training"):
        for name, value in now[section].items():
            old = before[section][name]
            changes_rate = name == "max_update" and config.training.schedule == "cosine"
            if old != value and (name not in _MAY_CHANGE or changes_rate):
                raise UserError(
                    f"{path}: this run was begun with {section}.{name} {_show(old)}, now it is {_show(value)}: go on "
                    f"with the old value (--{name.replace('_', '-')} {_show(old)}) or give another --out"
                )


def _refuse_other_data(path: Path, data: PreparedData) -> None:
    for file in data.model_files:
        copy = path / file.name
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            raise UserError(
                f"{path}: this run was begun with another vocabulary than {file}: give the --data it was begun with, "
                "or another --out"
            )
    try:
        before = yaml.safe_load((path / DATA_FILE).read_bytes())
    except (OSError, yaml.YAMLError):
        before = None
    if not isinstance(before, dict):
        raise UserError(
            f"{path / DATA_FILE}: is missing or damaged: copy {data.path / DATA_FILE} there if this run was begun with "
            "it, or give another --out"
        )
    if before.get("fingerprint") != data.description.get("fingerprint"):
        raise UserError(
            f"{path}: this run was begun with other text than {data.path} was made from: give the --data it was begun "
            "with, or another --out"
        )


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a kill leaves the old or the new one."""
    if path.exists() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}; make room or give another --out") from error
