"""Checkpoints of a model directory: names, lookup, pruning."""

import re
import stat
from pathlib import Path

from fasttfm.errors import UserError
from fasttfm.store.checkpoint import MODEL_FILE, STATE_FILE, is_resumable, read_meta
from fasttfm.store.ownership import delete, drop
from fasttfm.system.files import entries, refuse_dangling_link, unreadable
from fasttfm.system.folders import settled

_STATES_KEPT = 2


def checkpoints_folder(model_dir: str | Path) -> Path:
    """The folder with a model directory's checkpoints."""
    return Path(model_dir) / "checkpoints"


def step_folder(model_dir: str | Path, step: int) -> Path:
    """The directory of the checkpoint of update `step`."""
    return checkpoints_folder(model_dir) / f"step-{step:09d}"


def saved_steps(model_dir: str | Path) -> list[int]:
    """Updates with a complete checkpoint, oldest first.

    Raises UserError if they cannot be listed: a run must not start over and replace checkpoints that it cannot see.
    """
    steps = []
    for name in entries(checkpoints_folder(model_dir)):
        match = re.fullmatch(r"step-([0-9]{9,})", name)
        # other names, such as step-12, are the user's copies
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
    """The newest consecutively saved checkpoints, oldest first.

    Excludes older ones kept for their validation score after those in between were deleted.
    """
    steps = saved_steps(model_dir)
    chain = steps[-1:]
    for older, newer in zip(reversed(steps[:-1]), reversed(steps)):
        if read_meta(step_folder(model_dir, newer)).get("previous_step", older) != older:
            break
        chain.insert(0, older)
    return chain


def resolve_checkpoint(model_dir: str | Path, which: str = "best") -> Path:
    """The directory (or .safetensors file) for `last`, `best`, `average`, a step number or a path.

    `best` falls back to `last` if the run never validated; in a directory of Transformer.save_pretrained() both are
    model.safetensors. Raises UserError if there is none.
    """
    model_dir = Path(model_dir)
    settled(model_dir)
    folder = checkpoints_folder(model_dir)
    steps = saved_steps(model_dir)
    if which == "average":
        if not (folder / "average").is_dir():
            raise UserError(f"{model_dir}: has no averaged checkpoint; create it with: fasttfm average {model_dir}")
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
    if which in map(str, steps):
        return step_folder(model_dir, int(which))
    if which and Path(which).exists():
        return Path(which)
    known = ", ".join(map(str, steps)) or "none"
    raise UserError(
        f"checkpoint {which!r} was not found in {model_dir}: give last, best, average, a step ({known}) or a path"
    )


def prune(model_dir: str | Path, keep_last: int, keep: set[int], before: int | None = None) -> None:
    """Delete all checkpoints but the `keep_last` newest (-1: all) and those of the steps in `keep`.

    All remaining ones but the newest two lose their training state, which is two thirds of the bytes. The newest one
    before update `before` is kept complete, because the run may end there.
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
        for step in reversed(steps):  # newest first, so that a kill leaves a run that can be resumed
            if step >= first:
                delete(step_folder(model_dir, step))


def resume_advice(model_dir: str | Path) -> str:
    """Advice for a run whose newest checkpoint cannot be resumed; the named checkpoints have been verified.

    Reads the older checkpoints, newest first, until one is intact.
    """
    steps = saved_steps(model_dir)
    folder = checkpoints_folder(model_dir)
    for index, step in reversed(list(enumerate(steps[:-1]))):
        if is_resumable(step_folder(model_dir, step)):
            newer = " and ".join(step_folder(model_dir, each).name for each in steps[index + 1 :])
            return (
                f"copy the file back, or move {newer} out of {folder} to resume from update {step:,}, the newest that "
                "can be resumed"
            )
    weights = next((step for step in reversed(steps) if is_resumable(step_folder(model_dir, step), state=False)), None)
    reason = f"no checkpoint in {folder} can be resumed (only the newest {_STATES_KEPT} keep the training state)"
    if weights is None:
        return f"{reason}, and none has intact weights: copy the file back, or start again with another --out"
    return (
        f"{reason}: copy the file back, or start a new run from the weights of update {weights:,} with another --out "
        f"and --init-from {step_folder(model_dir, weights)}"
    )
