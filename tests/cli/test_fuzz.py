"""Random hostile situations: no traceback, no lost file, no exit 0 after a refusal.

Every run has the same 400. FASTTFM_FUZZ=$RANDOM draws others, FASTTFM_FUZZ="SEED NUMBER" repeats one situation.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from any_command import PLANTED, add_to_world, commands, draw_situation
from situations import OTHERS, Outcome, Situation, run_here, run_with_little_memory, working_folder
from waiting import PATIENCE

CHUNK = 20
"""Situations per test."""
CHUNKS = 20
LITTLE_MEMORY_EVERY = 50
"""One situation in this many runs in a new process with little memory, which takes seconds."""
ENOUGH = 10
"""Seconds after which a command gets SIGTERM; 3 for a server, which is idle."""
LONGEST = 600
"""Seconds after which a situation counts as hanging."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full and POSIX signals")


@pytest.fixture(scope="session")
def world(world, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "world"
    shutil.copytree(world, folder, symlinks=True)
    add_to_world(folder)
    return folder


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
    known = list(commands())
    assert len(known) < CHUNK * CHUNKS / 4, "each comes four times"
    position = folder / "user" / "world"
    shutil.copytree(world, position, symlinks=True)
    with working_folder(position):
        situation = draw_situation(draw, *known[number % len(known)])
        before = snapshot(folder / "user")
        if number % LITTLE_MEMORY_EVERY == LITTLE_MEMORY_EVERY - 1:
            kilobytes = draw.randrange(300_000, 3_000_000, 10_000)
            situation.faults.append(f"{kilobytes} kB of memory")
            outcome = run_with_little_memory(situation, kilobytes)
        else:
            with time_limit(), ended_after(3 if situation.command == "serve" else ENOUGH):
                outcome = run_here(situation, folder)
        after = snapshot(folder / "user")
    shutil.rmtree(folder, ignore_errors=True)
    wrong = ["a planted .py file was run"] if "world/planted" in after else []
    wrong += [*wrong_ends(situation, outcome), *lost_files(situation, outcome, before, after)]
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


@contextlib.contextmanager
def time_limit():
    def stop(number, frame):
        raise AssertionError(f"a situation takes longer than {LONGEST} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Return the content of every file in a directory and the target of every link."""
    results: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            results[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            results[str(path.relative_to(folder))] = path.read_bytes()
    return results


def wrong_ends(situation: Situation, outcome: Outcome) -> list[str]:
    """Return what is wrong with status and messages of a command."""
    errors = outcome.errors
    refusals = re.findall(r"^fasttfm(?: [a-z-]+){0,2}: (?!warning)(?!reading).*", errors, re.MULTILINE)
    wrong = []
    for word in ("Traceback", "Exception ignored", "terminate called", "INTERNAL ASSERT", "Segmentation"):
        if word in errors:
            wrong.append(f"{word!r} was printed")
    found = situation.command == "env"  # 1: --check has found something
    if situation.streams == "no stderr":
        return [*wrong, *([] if outcome.status is not None else ["an exception left it"])]
    if outcome.status not in (0, 2, 129, 130, 141, 143) and not (found and outcome.status == 1):
        wrong.append(f"ended with {outcome.status}")
    if refusals and outcome.status == 0:
        wrong.append("exit 0 after a refusal")
    if outcome.status == 2 and len(refusals) != 1:
        wrong.append(f"{len(refusals)} lines of refusal")
    if outcome.status == 2 and not errors.rstrip("\n").split("\n")[-1].startswith("fasttfm"):
        wrong.append("the refusal is not the last line")
    return wrong


def lost_files(
    situation: Situation, outcome: Outcome, before: dict[str, bytes | str], after: dict[str, bytes | str]
) -> list[str]:
    """Return files that the command deleted or changed without being allowed to."""
    names = [name for name in before if after.get(name) != before[name] and not may_change(situation, outcome, name)]
    if not names:
        return []
    return [f"lost or changed are {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"]


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


@pytest.mark.whole
def test_a_real_process_runs_nothing_of_the_working_folder(world, tmp_path):
    """Also in worker processes; those of training are tested with training."""
    command = shutil.which("fasttfm", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the command is not installed")
    shutil.copytree(world, tmp_path / "world", symlinks=True)
    for name in PLANTED:
        (tmp_path / "world" / f"{name}.py").write_text("open('planted', 'a').write(__name__)\n")
    translate = "translate model --device cpu --max-len-b 3 --workers 2"
    for words in (translate, "score --ref valid.tgt", "tokenize model", "env"):
        done = subprocess.run(
            [command, *words.split()], cwd=tmp_path / "world", input=(world / "valid.src").read_bytes(),
            capture_output=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "world" / "planted").exists(), words
