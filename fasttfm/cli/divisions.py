"""`fasttfm train --workers time`: times a few updates with each split of the cores and trains with the fastest.

Processes synchronize once per update and threads at every operator, but each process has its own model copy and
gradients must be reduced. Which is faster depends on machine, model and batches, so the actual run is timed.
"""

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fasttfm.errors import UserError
from fasttfm.system.children import child_environment, command_line, run_to_end
from fasttfm.system.wording import counted

_UPDATES, _WARM = 6, 2
"""Updates of a trial, and the warm-up updates among them, which compile."""
_FLAGS: dict[str, str | None] = {
    "--valid-interval-updates": str(10**9),
    "--save-interval-updates": str(10**9),
    "--log-interval": "1",
    "--resume-with": None,  # a trial is a new run
}
"""Flags of a trial, chosen to be compatible with all other settings; the trial is stopped from outside."""


class Division(NamedTuple):
    """A split of the cores into processes and threads per process."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"{counted(self.workers, 'worker')} of {counted(self.threads, 'thread')}"

    def of(self, arguments: Sequence[str]) -> list[str]:
        return replaced(arguments, {"--workers": str(self.workers), "--threads": str(self.threads)})


def replaced(arguments: Sequence[str], flags: Mapping[str, str | None]) -> list[str]:
    """Return a command's arguments with these flags set, or left out if None; each takes one value."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        flag, equals, _ = word.partition("=")
        if not skip and flag not in flags:
            kept.append(word)
        skip = not skip and flag in flags and not equals
    return [*kept, *(word for flag, value in flags.items() if value is not None for word in (flag, value))]


def divisions(cores: int) -> list[Division]:
    """Return all even splits of the cores into processes of 1, 2, 4, ... threads."""
    powers = (2**n for n in range(cores.bit_length()))
    return [Division(cores // threads, threads) for threads in powers if cores % threads == 0]


def fastest_division(arguments: Sequence[str], cores: int, note: Callable[[str], None]) -> Division:
    """Return the split of the cores with most target tokens/s in a few updates of `fasttfm ARGUMENTS`.

    note: called with a line for each split. Raises UserError if none can train.
    """
    candidates, speeds = divisions(cores), dict[Division, float]()
    if len(candidates) == 1:
        return candidates[0]
    for division in candidates:
        speed = _target_tokens_per_second(division.of(arguments))
        if isinstance(speed, str):
            note(f"{division}: cannot train ({speed})")
        else:
            note(f"{division}: {speed:,.0f} target tokens/s")
            speeds[division] = speed
    if not speeds:
        raise UserError(f"no division of the cores can train: {speed}")
    return max(speeds, key=speeds.__getitem__)


def _target_tokens_per_second(arguments: Sequence[str]) -> float | str:
    """Return the median speed of a trial's updates, or the last line of stderr if it failed."""
    from fasttfm.store.run_log import read_log

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"

        def speeds() -> list[float]:
            return [entry["tokens_per_second"] for entry in read_log(out) if entry["kind"] == "train"]

        ended = run_to_end(
            command_line(*replaced(arguments, {**_FLAGS, "--out": str(out)})),
            until=lambda: len(speeds()) >= _UPDATES, env=child_environment(),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        results = speeds()
    if not results:
        lines: list[str] = ended.stderr.strip().splitlines()
        return lines[-1] if lines else f"status {ended.returncode}"
    return statistics.median(results[_WARM:] or results)  # an epoch may be shorter than a trial
