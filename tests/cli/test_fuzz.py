"""Random hostile situations: no traceback, no lost file, no exit 0 after a refusal.

Every run has the same 400. FASTTFM_FUZZ=$RANDOM draws others, FASTTFM_FUZZ="SEED NUMBER" repeats one situation.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from any_command import PARSERS, draw_situation
from situations import OTHERS, Outcome, Situation, run_here, working_folder

CHUNK = 20
"""Situations per test."""
CHUNKS = 20
ENOUGH = 10
"""Seconds after which a command gets SIGTERM; 3 for a server, which is idle."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full and POSIX signals")


@pytest.mark.sample(2)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_hostile_situations_end_in_a_line_and_lose_nothing(chunk, world, tmp_path):
    seed, _, only = os.environ.get("FASTTFM_FUZZ", "1").partition(" ")
    complaints = []
    for number in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        if not only or number == int(only):
            wrong = complaints_about(world, tmp_path / str(number), number, random.Random(f"{seed} {number}"))
            complaints += [f'FASTTFM_FUZZ="{seed} {number}": {complaint}' for complaint in wrong]
    assert not complaints, "\n".join(complaints)


def complaints_about(world: Path, folder: Path, number: int, draw: random.Random) -> list[str]:
    """Run one situation in a temporary copy of the world; commands and verbs take turns."""
    assert len(PARSERS) < CHUNK * CHUNKS / 4, "each comes four times"
    shutil.copytree(world, folder / "user" / "world", symlinks=True)
    with working_folder(folder / "user" / "world"):
        situation = draw_situation(draw, [*PARSERS][number % len(PARSERS)].split())
        before = snapshot(folder / "user")
        with ended_after(3 if situation.command == "serve" else ENOUGH):
            outcome = run_here(situation, folder)
        after = snapshot(folder / "user")
    shutil.rmtree(folder, ignore_errors=True)
    lost = [name for name in before if after.get(name) != before[name] and not may_change(situation, outcome, name)]
    wrong = [*wrong_ends(situation, outcome), *(f"lost or changed is {name}" for name in lost[:4])]
    return [f"{situation}: {what}\n    status {outcome.status}: {outcome.errors[-1500:]}" for what in wrong]


@contextlib.contextmanager
def ended_after(seconds: float):
    """Send SIGTERM after this time, for commands such as a server."""

    def end():
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # a command with its own handler is running
            os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Return the content of every file in a directory and the target of every link."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def wrong_ends(situation: Situation, outcome: Outcome) -> list[str]:
    """Return what is wrong with status and messages of a command."""
    errors = outcome.errors
    refusals = re.findall(r"^fasttfm(?: [a-z-]+){0,2}: (?!warning)(?!reading).*", errors, re.MULTILINE)
    words = ("Traceback", "Exception ignored", "terminate called", "INTERNAL ASSERT", "Segmentation")
    wrong = [f"{word!r} was printed" for word in words if word in errors]
    found = situation.command == "env" and outcome.status == 1  # --check has found something
    if outcome.status not in (0, 2, 143) and not found:
        wrong.append(f"ended with {outcome.status}")
    if refusals and outcome.status == 0:
        wrong.append("exit 0 after a refusal")
    if outcome.status == 2 and len(refusals) != 1:
        wrong.append(f"{len(refusals)} lines of refusal")
    if outcome.status == 2 and not errors.rstrip("\n").split("\n")[-1].startswith("fasttfm"):
        wrong.append("the refusal is not the last line")
    return wrong


def may_change(situation: Situation, outcome: Outcome, name: str) -> bool:
    """Return whether a command may replace a file, named relative to the user's directory."""
    name = name.removeprefix("world/")
    if name in OTHERS:
        return False
    if situation.command == "prepare":  # its own files, when it is done
        return outcome.status == 0 and name.startswith("data/")
    if situation.command in ("train", "lm", "mlm", "finetune"):
        if name == "model/train.log.jsonl":  # of a run that is gone on with, or of none that was saved
            return "resuming from update" in outcome.errors or "is kept as" in outcome.errors
        made = ("checkpoints/", "train.log.jsonl", "config.yaml", "data.yaml", "hypotheses/", "curve.", ".lock")
        return name.startswith(tuple(f"model/{each}" for each in made))
    if situation.command == "average":
        return name.startswith("model/checkpoints/average/")
    return situation.command == "plot" and outcome.status == 0
