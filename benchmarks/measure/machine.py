"""Where a measurement was made: device, driver, versions and commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.load import SINCE_START
from fasttfm.machine import cpuinfo, describe_gpu, processor, version

ROOT = Path(__file__).parents[2]
_NOT_RECORDS = ":(exclude)benchmarks/results"  # a run that writes its own record has not changed what it measured


def describe() -> dict[str, Any]:
    """What a stranger needs to judge or repeat a measurement, as JSON can hold it."""
    described: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", _NOT_RECORDS)),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "instruction_sets": instruction_sets(cpuinfo("flags")),
        "cores": os.cpu_count(),
        "load": SINCE_START.read(),
        **{package: version(package) for package in ("fasttfm", "torch", "triton")},
    }
    if (gpu := describe_gpu()) is not None:
        described |= {"device": gpu.pop("name"), **gpu, "cuda": torch.version.cuda or torch.version.hip}
        described["clocks"] = _clocks(torch.cuda.current_device())
    return described


_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")
"""Those that decide which products a CPU library takes."""
_CLASSES = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Set -> name of the class of machines that have it, the widest first."""


def instruction_sets(flags: str) -> list[str]:
    """Those of a CPU that decide its products; flags: as /proc/cpuinfo has them."""
    return [name for name in _INSTRUCTION_SETS if name in flags.split()]


def is_cpu(machine: dict[str, Any]) -> bool:
    return not machine.get("device")


def machine_name(machine: dict[str, Any]) -> str:
    """ "NVIDIA H200", or "CPU: AMD EPYC with AVX-512, 2 cores"; records of before November 23, 2026 may name no sets.

    A processor's name is not enough: clouds give one to chips with and without AMX, which are several times apart.
    """
    if not is_cpu(machine):
        return str(machine["device"])
    sets, cores = machine.get("instruction_sets", ()), machine["cores"]
    widest = next((f" with {name}" for flag, name in _CLASSES.items() if flag in sets), "")
    return f"CPU: {machine['processor']}{widest}, {cores} core{'s' * (cores != 1)}"


def _clocks(index: int) -> dict[str, str] | None:
    """What nvidia-smi says of clocks and power; None where there is none to ask."""
    wanted = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "persistence_mode")
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(wanted, (value.strip() for value in done.stdout.split(","))))


def _command() -> str:
    """How this process was started, as a shell takes it, without the folders of the machine it ran on."""
    program = Path(sys.argv[0]).resolve()
    if program.is_relative_to(ROOT):
        parts = program.relative_to(ROOT).with_suffix("").parts
        program = Path(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
        return shlex.join(["python", "-m", str(program), *sys.argv[1:]])
    return shlex.join(["python", program.name, *sys.argv[1:]])


def git(*arguments: str, folder: Path = ROOT) -> str | None:
    """git's answer in a folder; None where there is no git, no repository or no such object."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
