"""The model directory: everything that translating needs, and a guard against mixing two runs in one place.

MODEL/config.yaml             the kind of model, and the resolved configuration, all sections
      data.yaml               what the prepared data were
      spm.model               (or spm.src.model and spm.tgt.model; bpe.codes of an imported one)
      checkpoints/            see fasttfm.store.checkpoint
      train.log.jsonl, hypotheses/, tensorboard/
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fasttfm.config import FROM_DATA, TRANSFORMER, RunConfig, Values, field_types, kind_of, read_yaml, sections_of
from fasttfm.config.fields import flag_name
from fasttfm.config.flags import written
from fasttfm.config.training import RESUMABLE
from fasttfm.errors import UserError
from fasttfm.store.steps import saved_steps
from fasttfm.system.files import entries, read_plain_yaml, refuse_dangling_link, replace_file, unfinished
from fasttfm.system.folders import has_manifest, settled
from fasttfm.system.locks import LOCK_FILE

CONFIG_FILE = "config.yaml"
DATA_FILE = "data.yaml"

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
    "skip_limit",
    "rank_timeout_minutes",
    "shard",
    "checkpoint_activations",
    "tensorboard",
    "threads",
    # of decoding, what validations while training leave alone
    *("beam", "nbest", "batch_tokens", "buffer_size", "batch_invariant", "alignment_layer", "coverage_penalty"),
    *("sampling", "sampling_topk", "sampling_topp", "sampling_seed", "temperature", "mbr_samples", "max_source_length"),
}
_LAST_OF_SCHEDULE = {("cosine", "max_update"), ("linear", "max_update"), ("cosine-minutes", "max_minutes")}
"""Settings that must not change because the learning rate's schedule ends with them."""


class Data(Protocol):
    """A prepared directory."""

    path: Path
    description: dict[str, Any]
    """Its data.yaml, with the `fingerprint` of what it was made from."""

    @property
    def model_files(self) -> list[Path]:
        """The vocabulary's files, which a model directory copies."""


def refuse_strangers(path: Path) -> None:
    """Raise UserError when `path` is a file, a dangling link, or a directory that holds something else than a run."""
    refuse_dangling_link(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; give --out the name of a directory")
    left = unfinished(path / CONFIG_FILE).name  # by a kill in the middle of its writing
    strangers = [name for name in entries(path) if name not in (LOCK_FILE, left)]
    if strangers and not (path / CONFIG_FILE).exists():
        raise UserError(f"{path}: is not empty and no model directory; give --out a new or empty directory")
    if strangers and has_manifest(path):
        raise UserError(
            f"{path}: is a model that another command made, which training would overwrite: give another --out, and "
            f"--init-from {path} to begin with its weights"
        )


def prepare_model_dir(
    path: Path, config: RunConfig, data: Data, resumed_with: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Create `path` for a new run, or check that it may be gone on with.

    resumed_with: settings, of RESUMABLE, that may have another value than the run was begun with. Returns those that
    have, with the old and the new value. Raises UserError for a run that was begun with another model, recipe,
    vocabulary or corpus.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    if saved_steps(path):
        _refuse_other_data(path, data)
        changed = _refuse_other_recipe(path, config, resumed_with)
    elif resumed_with:
        raise UserError(f"--resume-with {resumed_with[0]}: {path} has no checkpoint to go on from: give it as a flag")
    path.mkdir(parents=True, exist_ok=True)
    # config.yaml first: it marks the directory as ours, so that a kill or a full disk behind it can be gone on from
    replace_file(path / CONFIG_FILE, config.to_yaml().encode())
    for file in [*data.model_files, data.path / DATA_FILE]:
        replace_file(path / file.name, file.read_bytes())
    return changed


def read_kind(path: Path) -> str:
    """The kind of model that a model directory holds; UserError where there is none."""
    settled(path)
    if not (path / CONFIG_FILE).is_file():
        raise UserError(
            f"{path}: is not a model directory (it has no {CONFIG_FILE}); a command that trains or imports makes one"
        )
    return kind_of(path / CONFIG_FILE)


def read_config(path: Path, kind: str = TRANSFORMER) -> Values:
    """config.yaml of a model directory; UserError when there is none, or it is of another kind of model."""
    read_kind(path)
    values = read_yaml(path / CONFIG_FILE, kind)
    for section, cls in sections_of(kind).items():
        for name in field_types(cls):
            if name not in values[section]:
                raise UserError(
                    f"{path / CONFIG_FILE}: is cut off or of another version: it has no {section}.{name}; "
                    "copy it back, or train into another --out"
                )
    return values


def _refuse_other_recipe(path: Path, config: RunConfig, resumed_with: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The settings of resumed_with that have changed; UserError for another one that must not."""
    before, now = read_config(path, config.kind), config.to_values()
    changed = {}
    for section in now if config.training.valid_bleu else ("model", "data", "training"):
        for name, value in now[section].items():
            old = before[section][name]
            changes_rate = (config.training.schedule, name) in _LAST_OF_SCHEDULE
            if old == value or (name in _MAY_CHANGE and not changes_rate):
                continue
            if name in resumed_with:
                changed[name] = old, value
                continue
            if section == "decoding":
                remedy = (
                    f"validations would not compare: go on with {_flag(name, old)}, and give it to translate instead"
                )
            elif name in FROM_DATA:
                remedy = "give the --data it was begun with, or another --out"
            else:
                remedy = f"go on with the old value ({_flag(name, old)}) or give another --out"
                if name in RESUMABLE:
                    remedy = f"change it by --resume-with {name}={written(value)}, {remedy}"
            raise UserError(
                f"{path}: this run was begun with {section}.{name} {written(old)}, now it is {written(value)}: {remedy}"
            )
    return changed


def _refuse_other_data(path: Path, data: Data) -> None:
    for file in data.model_files:
        copy = path / file.name
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            raise UserError(
                f"{path}: this run was begun with another vocabulary than {file}: give the --data it was begun with, "
                "or another --out"
            )
    try:
        before = read_plain_yaml(path / DATA_FILE)
    except UserError:
        raise UserError(
            f"{path / DATA_FILE}: is missing or damaged: copy {data.path / DATA_FILE} there if this run was begun with "
            "it, or give another --out"
        ) from None
    if before.get("fingerprint") != data.description.get("fingerprint"):
        raise UserError(
            f"{path}: this run was begun with other text than {data.path} was made from: give the --data it was begun "
            "with, or another --out"
        )


def _flag(name: str, value: object) -> str:
    """The words of the command line that set a field to a value."""
    if isinstance(value, bool):
        return flag_name(name if value else f"no_{name}")
    return f"{flag_name(name)} {written(value)}"
