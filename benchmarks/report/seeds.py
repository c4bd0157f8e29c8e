"""Means of end-to-end runs that differ in the seed alone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.measure.machine import machine_name
from benchmarks.measure.records import Entry

LEAST = 3
"""Fewest seeds of a mean."""
_SEED = re.compile(r" --seed (\d+)")


@dataclass(frozen=True, slots=True)
class Mean:
    """The newest run of each seed of one command on one machine."""

    command: str
    """Training command without the seed."""
    test: str | None
    """Test set, None for the corpus's own."""
    runs: tuple[Entry, ...]

    def words(self) -> str:
        """The mean in words, with the worst and best run; without minutes from the text if a run was resumed."""
        scores = [run.record["bleu"] for run in self.runs]
        minutes = [sum(run.record["minutes_of"].values()) for run in self.runs if "minutes_of" in run.record]
        taken = f" in {fmean(minutes):.1f} minutes from the text" if len(minutes) == len(scores) else ""
        spread = f"{min(scores):.2f} to {max(scores):.2f}"
        return f"**{fmean(scores):.2f} BLEU**{taken}, mean of {len(scores)} seeds ({spread})"


def means(entries: Sequence[Entry]) -> list[Mean]:
    """Means of all commands that were run with at least LEAST seeds, the newest last."""
    groups: dict[tuple, dict[str, Entry]] = {}
    for entry in entries:
        if entry.kind != "end_to_end":
            continue
        command, seeds = _SEED.sub("", entry.record["train_command"]), _SEED.findall(entry.record["train_command"])
        if seeds:  # of a flag given twice, the last counts
            key = machine_name(entry.machine), command, entry.record.get("test")
            groups.setdefault(key, {})[seeds[-1]] = entry
    found = [Mean(key[1], key[2], tuple(runs.values())) for key, runs in groups.items() if len(runs) >= LEAST]
    return sorted(found, key=lambda mean: max(str(run.machine["time"]) for run in mean.runs))
