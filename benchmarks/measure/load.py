"""What else a machine did while something was timed, and when a time is too noisy to be claimed.

Linux's load averages; of the CPUs' time the share that a hypervisor took (steal) and the share that other processes
had; and the cores' clock. Elsewhere, and where a span is too short to tell, a value is None.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

MOST_SPREAD = 0.25
"""Of a row's times: (p80 - p20) / p50."""
MOST_STEAL = 0.05
MOST_OTHERS = 0.15
"""Shares of all CPUs' time."""
_LEAST_SECONDS = 0.2
"""Linux counts CPU time in hundredths of a second: a shorter span says nothing."""


def _text(file: Path) -> str:
    """The text of a file of /proc; '' where its process or thread has ended, or where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _ticks() -> tuple[float, float] | None:
    """Seconds of all CPUs so far: stolen, and busy with any process."""
    words = _text(Path("/proc/stat")).split("\n", 1)[0].split()[1:9]
    if len(words) < 8:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, steal = (int(word) / os.sysconf("SC_CLK_TCK") for word in words)
    return steal, user + nice + system + irq + softirq


def _own(process: str = "self") -> float:
    """CPU seconds of a process and its descendants, those that live and those that it has waited for."""
    folder = Path("/proc") / process
    fields = _text(folder / "stat").rpartition(")")[2].split()
    if not fields:
        return 0.0
    children = [child for file in folder.glob("task/*/children") for child in _text(file).split()]
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK") + sum(map(_own, children))


def _megahertz() -> int | None:
    """The mean clock of the cores as Linux tells it now."""
    clocks = re.findall(r"^cpu MHz\s*: ([\d.]+)", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return round(sum(map(float, clocks)) / len(clocks)) if clocks else None


def _average() -> float | None:
    """Processes that ran or waited, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


class Watch:
    """The load from its making on."""

    def __init__(self) -> None:
        self._before, self._began = _average(), time.monotonic()
        self._ticks, self._own = _ticks(), _own()

    def read(self) -> dict[str, float | None]:
        """before and during: load averages; steal and others: shares of all CPUs' time; mhz."""
        now, seconds = _ticks(), time.monotonic() - self._began
        steal = others = None
        if now is not None and self._ticks is not None and seconds >= _LEAST_SECONDS:
            whole = seconds * (os.cpu_count() or 1)
            stolen, busy = (after - before for after, before in zip(now, self._ticks))
            steal = round(stolen / whole, 3)
            others = round(max(0.0, busy - (_own() - self._own)) / whole, 3)
        return {"before": self._before, "during": _average(), "steal": steal, "others": others, "mhz": _megahertz()}


SINCE_START = Watch()
"""Since this process imported the benchmarks."""


def disturbed(load: dict[str, Any] | None) -> bool:
    """Whether the hypervisor or other processes took more than may be."""
    return load is not None and ((load["steal"] or 0) > MOST_STEAL or (load["others"] or 0) > MOST_OTHERS)


def spread(time_us: dict[str, Any]) -> float:
    """The spread of a row's times, as a share of their median."""
    return (time_us["p80"] - time_us["p20"]) / time_us["p50"]


def noisy(record: dict[str, Any]) -> bool:
    """Whether a row of the suite is too noisy to be claimed; records from before the mark by their spread alone."""
    times = record.get("time_us")
    return times is not None and (bool(record.get("noisy")) or spread(times) > MOST_SPREAD)
