"""The model directory: files for translation, and checks that a resumed run is the same run.

MODEL/config.yaml             the kind of model and the complete configuration
      data.yaml               description of the prepared data
      spm.model               (or spm.src.model and spm.tgt.model; bpe.codes of an imported model)
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

# Settings that may change when a run resumes: they affect neither the updates nor the meaning of earlier validation
# scores.
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
    # decoding settings that validation during training does not use
    *("beam", "nbest", "batch_tokens", "buffer_size", "batch_invariant", "alignment_layer", "coverage_penalty"),
    *("sampling", "sampling_topk", "sampling_topp", "sampling_seed", "temperature", "mbr_samples", "max_source_length"),
}
_LAST_OF_SCHEDULE = {("cosine", "max_update"), ("linear", "max_update"), ("cosine-minutes", "max_minutes")}
"""(schedule, setting) pairs that must not change, because they end the schedule of the learning rate."""


class Data(Protocol):
    """A prepared directory."""

    path: Path
    description: dict[str, Any]
    """Its data.yaml, with the `fingerprint` of its inputs."""

    @property
    def model_files(self) -> list[Path]:
        """The vocabulary's files, which a model directory copies."""


def refuse_strangers(path: Path) -> None:
    """Raise UserError if `path` is a file, a dangling link, or a directory with anything but a training run."""
    refuse_dangling_link(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; --out needs a directory")
    left = unfinished(path / CONFIG_FILE).name  # by a kill
    strangers = [name for name in entries(path) if name not in (LOCK_FILE, left)]
    if strangers and not (path / CONFIG_FILE).exists():
        raise UserError(f"{path}: is neither empty nor a model directory; --out needs a new or empty directory")
    if strangers and has_manifest(path):
        raise UserError(
            f"{path}: is a model written by another command, which training would overwrite: use another --out, and "
            f"--init-from {path} to start from its weights"
        )


def prepare_model_dir(
    path: Path, config: RunConfig, data: Data, resumed_with: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Create `path` for a new run, or check that the existing run can be resumed.

    resumed_with: settings from RESUMABLE that may differ from the run's; those that do are returned with the old and
    new values. Raises UserError if the run has another model, recipe, vocabulary or corpus.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    if saved_steps(path):
        _refuse_other_data(path, data)
        changed = _refuse_other_recipe(path, config, resumed_with)
    elif resumed_with:
        raise UserError(f"--resume-with {resumed_with[0]}: {path} has no checkpoint to resume: use the plain option")
    path.mkdir(parents=True, exist_ok=True)
    # config.yaml first: it marks the directory as a run, which can be resumed after a kill or a full disk
    replace_file(path / CONFIG_FILE, config.to_yaml().encode())
    for file in [*data.model_files, data.path / DATA_FILE]:
        replace_file(path / file.name, file.read_bytes())
    return changed


def read_kind(path: Path) -> str:
    """The kind of model in a model directory; UserError if it is not one."""
    settled(path)
    if not (path / CONFIG_FILE).is_file():
        raise UserError(
            f"{path}: is not a model directory (it has no {CONFIG_FILE}); training and importing create one"
        )
    return kind_of(path / CONFIG_FILE)


def read_config(path: Path, kind: str = TRANSFORMER) -> Values:
    """config.yaml of a model directory; UserError if it is missing or for another kind of model."""
    read_kind(path)
    values = read_yaml(path / CONFIG_FILE, kind)
    for section, cls in sections_of(kind).items():
        for name in field_types(cls):
            if name not in values[section]:
                raise UserError(
                    f"{path / CONFIG_FILE}: is truncated or from another version: it has no {section}.{name}; copy it "
                    "back, or train into another --out"
                )
    return values


def _refuse_other_recipe(path: Path, config: RunConfig, resumed_with: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The changed settings among resumed_with; UserError for any other changed setting."""
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
                    "validation scores would not be comparable: resume with "
                    f"{_flag(name, old)}, and pass the new value to translate instead"
                )
            elif name in FROM_DATA:
                remedy = "use the original --data, or another --out"
            else:
                remedy = f"resume with the old value ({_flag(name, old)}) or use another --out"
                if name in RESUMABLE:
                    remedy = f"change it with --resume-with {name}={written(value)}, {remedy}"
            raise UserError(
                f"{path}: this run was started with {section}.{name} {written(old)}, now it is {written(value)}: "
                f"{remedy}"
            )
    return changed


def _refuse_other_data(path: Path, data: Data) -> None:
    for file in data.model_files:
        copy = path / file.name
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            raise UserError(
                f"{path}: this run was started with another vocabulary than {file}: use the original --data, or "
                "another --out"
            )
    try:
        before = read_plain_yaml(path / DATA_FILE)
    except UserError:
        raise UserError(
            f"{path / DATA_FILE}: is missing or damaged: copy {data.path / DATA_FILE} there if this run was started "
            "with it, or use another --out"
        ) from None
    if before.get("fingerprint") != data.description.get("fingerprint"):
        raise UserError(
            f"{path}: this run was started with other text than that of {data.path}: use the original --data, or "
            "another --out"
        )


def _flag(name: str, value: object) -> str:
    """The command-line option that sets a field to a value."""
    if isinstance(value, bool):
        return flag_name(name if value else f"no_{name}")
    return f"{flag_name(name)} {written(value)}"
