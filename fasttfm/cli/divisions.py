"""`fasttfm train --workers time`: a few updates with each division of the cores, and the run with the fastest.

Processes wait for one another once an update and threads at every operator, but processes have a model each and add up
their gradients. Which is faster depends on the machine, the model and the batches: so the run itself is timed.
"""

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fasttfm.errors import UserError
from fasttfm.system.children import child_environment, command_line, run_to_end

_UPDATES, _WARM = 6, 2
"""Updates of a trial, and the first of them, which compile and are not counted."""
_FLAGS = {flag: str(10**9) for flag in ("--valid-interval-updates", "--save-interval-updates")} | {
    "--log-interval": "1"
}
"""Flags of a trial: none is checked against other settings; the trial is stopped from outside."""


class Division(NamedTuple):
    """Processes, and the threads of each."""

    workers: int
    threads: int

    def __str__(self) -> str:
        kinds = (self.workers, "worker"), (self.threads, "thread")
        return " of ".join(f"{count} {kind}{'s' * (count != 1)}" for count, kind in kinds)

    def of(self, arguments: Sequence[str]) -> list[str]:
        """A command's arguments, divided so."""
        return replaced(arguments, {"--workers": str(self.workers), "--threads": str(self.threads)})


def replaced(arguments: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """The arguments of a command with these flags in place of those given; each takes one value."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        flag, equals, _ = word.partition("=")
        if not skip and flag not in flags:
            kept.append(word)
        skip = not skip and flag in flags and not equals
    return [*kept, *(word for flag in flags.items() for word in flag)]


def divisions(cores: int) -> list[Division]:
    """All ways to divide the cores evenly among processes of 1, 2, 4, ... threads."""
    powers = (2**n for n in range(cores.bit_length()))
    return [Division(cores // threads, threads) for threads in powers if cores % threads == 0]


def fastest_division(arguments: Sequence[str], cores: int, note: Callable[[str], None]) -> Division:
    """The division of the cores with most target tokens/s in a few updates of `fasttfm ARGUMENTS`; what was found is
    told line by line. Raises UserError where none can train."""
    ways, speeds = divisions(cores), dict[Division, float]()
    if len(ways) == 1:
        return ways[0]
    for way in ways:
        speed = _target_tokens_per_second(way.of(arguments))
        note(f"{way}: {f'cannot train ({speed})' if isinstance(speed, str) else f'{speed:,.0f} target tokens/s'}")
        if not isinstance(speed, str):
            speeds[way] = speed
    if not speeds:
        raise UserError(f"no division of the cores can train: {speed}")
    return max(speeds, key=speeds.__getitem__)


def _target_tokens_per_second(arguments: Sequence[str]) -> float | str:
    """The median of the updates of a trial; where it failed, the last line that it wrote."""
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
        found = speeds()
    if not found:
        lines: list[str] = ended.stderr.strip().splitlines()
        return lines[-1] if lines else f"status {ended.returncode}"
    return statistics.median(found[_WARM:] or found)  # an epoch may be shorter than a trial
