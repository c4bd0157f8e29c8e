"""Checkpoints of a model directory: their names, what these mean, and which of them are kept."""

import re
import stat
from pathlib import Path

from fasttfm.errors import UserError
from fasttfm.store.checkpoint import MODEL_FILE, STATE_FILE, is_resumable, read_meta, read_weights
from fasttfm.store.ownership import delete, drop
from fasttfm.system.files import entries, refuse_dangling_link, unreadable
from fasttfm.system.folders import settled

_STATES_KEPT = 2


def checkpoints_folder(model_dir: str | Path) -> Path:
    """Return the folder of a model directory's checkpoints."""
    return Path(model_dir) / "checkpoints"


def step_folder(model_dir: str | Path, step: int) -> Path:
    """The directory of the checkpoint of update `step`."""
    return checkpoints_folder(model_dir) / f"step-{step:09d}"


def saved_steps(model_dir: str | Path) -> list[int]:
    """Updates that have a complete checkpoint, oldest first.

    Raises UserError when they cannot be listed, because a run must not begin anew over checkpoints that it cannot see.
    """
    steps = []
    for name in entries(checkpoints_folder(model_dir)):
        match = re.fullmatch(r"step-([0-9]{9,})", name)
        # a copy under another name, such as step-12, is the user's
        if match and name == step_folder(model_dir, int(match[1])).name:
            folder = checkpoints_folder(model_dir) / name
            refuse_dangling_link(folder)
            try:
                is_folder = stat.S_ISDIR(folder.stat().st_mode)
            except FileNotFoundError:
                continue  # pruned by a trainer meanwhile
            except OSError as error:
                raise unreadable(folder, error) from error
            if is_folder:
                steps.append(int(match[1]))
    return sorted(steps)


def consecutive_steps(model_dir: str | Path) -> list[int]:
    """The newest checkpoints that were saved one after the other, oldest first.

    An older one that was kept for its validation score, with those between deleted, is not among them.
    """
    steps = saved_steps(model_dir)
    chain = steps[-1:]
    for older, newer in zip(reversed(steps[:-1]), reversed(steps)):
        if read_meta(step_folder(model_dir, newer)).get("previous_step", older) != older:
            break
        chain.insert(0, older)
    return chain


def resolve_checkpoint(model_dir: str | Path, which: str = "best") -> Path:
    """The directory (or .safetensors file) that `last`, `best`, `average`, a step number or a path means.

    `best` falls back to `last` when the run never validated, and both mean model.safetensors in a directory of
    Transformer.save_pretrained(). Raises UserError when there is none.
    """
    model_dir = Path(model_dir)
    settled(model_dir)
    folder = checkpoints_folder(model_dir)
    steps = saved_steps(model_dir)
    if which == "average":
        if not (folder / "average").is_dir():
            raise UserError(f"{model_dir}: has no averaged checkpoint; make one with: fasttfm average {model_dir}")
        return folder / "average"
    if which in ("last", "best"):
        if not steps and (model_dir / MODEL_FILE).is_file():
            return model_dir / MODEL_FILE
        if not steps:
            raise UserError(f"{model_dir}: has no checkpoint: train a model into it first")
        last = step_folder(model_dir, steps[-1])
        if which == "last":
            return last
        best = read_meta(last).get("best_step")
        return step_folder(model_dir, best) if best in steps else last
    if which.isdecimal() and int(which) in steps:
        return step_folder(model_dir, int(which))
    if which and Path(which).exists():
        return Path(which)
    known = ", ".join(map(str, steps)) or "none"
    raise UserError(
        f"checkpoint {which!r} was not found in {model_dir}: give last, best, average, a step ({known}) or a path"
    )


def prune(model_dir: str | Path, keep_last: int, keep: set[int], before: int | None = None) -> None:
    """Delete all but the `keep_last` newest checkpoints (-1: none) and those of the steps in `keep`.

    Of the checkpoints that stay, all but the newest two lose their optimizer state, which is two thirds of the bytes.
    The newest one of the updates before update `before` stays as it is: the run may end there.
    """
    steps = saved_steps(model_dir)
    good = max((step for step in steps if before is not None and step < before), default=None)
    old = steps[:-keep_last] if keep_last > 0 else []
    for step in steps:
        folder = step_folder(model_dir, step)
        if step == good:
            continue
        if step in old and step not in keep:
            delete(folder)
        elif step in steps[:-_STATES_KEPT]:
            drop(folder, STATE_FILE)


def delete_since(model_dir: str | Path, first: int) -> None:
    """Delete the checkpoints of update `first` and later ones, if there is an earlier one."""
    steps = saved_steps(model_dir)
    if steps and steps[0] < first:
        for step in reversed(steps):  # the newest first: what a kill leaves is a run that can be gone on from
            if step >= first:
                delete(step_folder(model_dir, step))


def way_on(model_dir: str | Path) -> str:
    """Say what can be done when training cannot go on from the newest checkpoint; each remedy was checked to work.

    Reads the older checkpoints, newest first, until one is whole.
    """
    steps = saved_steps(model_dir)
    folder = checkpoints_folder(model_dir)
    for index, step in reversed(list(enumerate(steps[:-1]))):
        if is_resumable(step_folder(model_dir, step)):
            newer = " and ".join(step_folder(model_dir, each).name for each in steps[index + 1 :])
            return (
                f"copy the file back, or move {newer} out of {folder} to go on from update {step:,}, the newest that "
                "can be gone on from"
            )
    weights = next((step for step in reversed(steps) if _has_weights(step_folder(model_dir, step))), None)
    reason = f"no checkpoint in {folder} can be gone on from (only the newest {_STATES_KEPT} keep the training state)"
    if weights is None:
        return f"{reason}, and none has whole weights: copy the file back, or train anew into another --out"
    return (
        f"{reason}: copy the file back, or start a new run from the weights of update {weights:,} with another --out "
        f"and --init-from {step_folder(model_dir, weights)}"
    )


def _has_weights(checkpoint: Path) -> bool:
    try:
        read_weights(checkpoint)
    except UserError:
        return False
    return True
