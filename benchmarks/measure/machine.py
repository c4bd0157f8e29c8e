"""The machine of a measurement: device, driver, versions, commit, and load during the run."""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
from psutil import NoSuchProcess, Process

from fasttfm.system.machine import allowed_cores, describe_gpu, processor, processor_units, version

ROOT = Path(__file__).parents[2]
_NOT_RECORDS = ":(exclude)benchmarks/results"  # new records do not change the measured code


def describe() -> dict[str, Any]:
    """Description of this machine and checkout, for a record."""
    described: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", _NOT_RECORDS)),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "instruction_sets": processor_units(),
        "cores": os.cpu_count(),
        "load": SINCE_START.read(),
        **{package: version(package) for package in ("fasttfm", "torch", "triton")},
    }
    if (gpu := describe_gpu()) is not None:
        described |= {"device": gpu.pop("name"), **gpu, "cuda": torch.version.cuda or torch.version.hip}
        described["clocks"] = _clocks(torch.cuda.current_device())
    return described


_CLASSES = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Instruction set -> name of its class of machines, widest first."""


def is_cpu(machine: dict[str, Any]) -> bool:
    return not machine.get("device")


def machine_name(machine: dict[str, Any]) -> str:
    """ "NVIDIA H200", or "CPU: AMD EPYC with AVX-512, 2 cores"; without a set in records before November 23, 2026.

    Clouds give one processor name to chips with and without AMX, whose speeds differ several times.
    """
    if not is_cpu(machine):
        return str(machine["device"])
    sets, cores = machine.get("instruction_sets", ()), machine["cores"]
    widest = next((f" with {name}" for flag, name in _CLASSES.items() if flag in sets), "")
    return f"CPU: {machine['processor']}{widest}, {cores} core{'s' * (cores != 1)}"


def slug(name: str) -> str:
    """A machine's name for file names: nvidia-h200, amd-epyc-avx-512-2-cores."""
    words = name.removeprefix("CPU: ").replace(" with ", " ").lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def _clocks(index: int) -> dict[str, str] | None:
    """Clocks and power by nvidia-smi; None without it."""
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "persistence_mode")
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields, (value.strip() for value in done.stdout.split(","))))


def _command() -> str:
    """Shell command of this process, without the machine's folders."""
    program = Path(sys.argv[0]).resolve()
    if program.is_relative_to(ROOT):
        parts = program.relative_to(ROOT).with_suffix("").parts
        program = Path(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
        return shlex.join(["python", "-m", str(program), *without_folders(sys.argv[1:])])
    return shlex.join(["python", program.name, *without_folders(sys.argv[1:])])


def without_folders(words: Sequence[str]) -> list[str]:
    """The words of a command line, with absolute paths reduced to their last part."""
    parts = (re.fullmatch(r"(--[\w-]+=)?(.*)", word, re.DOTALL) for word in words)
    return [f"{part[1] or ''}{Path(part[2]).name if os.path.isabs(part[2]) else part[2]}" for part in parts if part]


def git(*arguments: str) -> str | None:
    """Output of git in this checkout; None without git, outside a repository, or for an unknown object."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# The load of a run: load averages, the share of CPU time taken by the hypervisor (steal, Linux only) and by other
# processes; None for spans too short to measure. Virtual machines that share the cores appear in none of these, so the
# speed of the cores is measured, too.

MOST_SPREAD = 0.25
"""Bound on (p80 - p20) / p50 of a row's times."""
MOST_STEAL = 0.05
MOST_OTHERS = 0.15
"""Bounds on shares of all CPUs' time."""
_SIDE = 1024
"""Size of the matrices whose product measures the cores."""
_LEAST_SECONDS = 0.2
"""Shortest measurable span: Linux counts CPU time in hundredths of a second."""


def _ticks() -> tuple[float, float]:
    """(stolen, busy) seconds of all CPUs so far."""
    times = psutil.cpu_times()._asdict()
    return times.get("steal", 0.0), sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))


def family(process: int | None = None) -> list[Process]:
    """A process (default: this one) and its living descendants."""
    try:
        parent = Process(process)
        return [parent, *parent.children(recursive=True)]
    except NoSuchProcess:
        return []


def _own() -> float:
    """CPU seconds of this process and its descendants, living or waited for."""
    seconds = 0.0
    for process in family():
        with suppress(NoSuchProcess):  # ended since
            seconds += sum(process.cpu_times()[:4])
    return seconds


def speed() -> float | None:
    """Current GFLOP/s of a float32 product on all cores, best of ten; None on a machine with a GPU."""
    if torch.cuda.is_available():
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(allowed_cores())
    x = torch.full((_SIDE, _SIDE), 0.5)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(x, x)
        times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return round(2 * _SIDE**3 / min(times) / 1e9, 1)


class Watch:
    """Measures the load since its construction."""

    def __init__(self) -> None:
        self._before, self._began = psutil.getloadavg()[0], time.monotonic()
        self._ticks, self._own = _ticks(), _own()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Count processes that end in this context as the run's own, such as a server's orphaned workers."""
        before = _own()
        yield
        self._own -= max(0.0, before - _own())

    def read(self) -> dict[str, float | None]:
        """before and during: load averages; steal and others: shares of all CPUs' time; gflop_per_s: speed()."""
        seconds = time.monotonic() - self._began
        steal = others = None
        if seconds >= _LEAST_SECONDS:
            whole = seconds * (os.cpu_count() or 1)
            stolen, busy = (after - before for after, before in zip(_ticks(), self._ticks))
            steal = round(stolen / whole, 3)
            others = round(max(0.0, busy - (_own() - self._own)) / whole, 3)
        averages = {"before": round(self._before, 2), "during": round(psutil.getloadavg()[0], 2)}
        return averages | {"steal": steal, "others": others, "gflop_per_s": speed()}


SINCE_START = Watch()
"""Load since the benchmarks were imported."""


def disturbed(load: dict[str, Any] | None) -> bool:
    """Return whether the hypervisor or other processes took too much CPU time."""
    return load is not None and ((load["steal"] or 0) > MOST_STEAL or (load["others"] or 0) > MOST_OTHERS)


def spread(time_us: dict[str, Any]) -> float:
    """Spread of a row's times relative to the median."""
    return (time_us["p80"] - time_us["p20"]) / time_us["p50"]


def noisy(record: dict[str, Any]) -> bool:
    """Return whether a row of the suite is marked noisy, or spreads too much (records from before the mark)."""
    times = record.get("time_us")
    return times is not None and (bool(record.get("noisy")) or spread(times) > MOST_SPREAD)
