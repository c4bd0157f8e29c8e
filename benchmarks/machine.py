"""Where a measurement was made: device, driver, versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def describe() -> dict[str, Any]:
    """What a stranger needs to judge or repeat a measurement, as JSON can hold it."""
    described: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        **{package: _version(package) for package in ("fasttfm", "torch", "triton")},
    }
    if torch.cuda.is_available():
        from fasttfm.kernels import choice_cache, launch

        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "device": torch.cuda.get_device_name(device),
            "chip": launch.chip(device).name,
            "processors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": choice_cache.driver(),
            "cuda": torch.version.cuda or torch.version.hip,
        }
    return described


def _command() -> str:
    """How this process was started, without the folders of the machine it ran on."""
    program = Path(sys.argv[0]).resolve()
    if program.is_relative_to(ROOT):
        program = Path(".".join(program.relative_to(ROOT).with_suffix("").parts))
        return " ".join(["python", "-m", str(program), *sys.argv[1:]])
    return " ".join(["python", program.name, *sys.argv[1:]])


def _processor() -> str:
    """The CPU's name, as Linux tells it."""
    try:
        names = [
            line.split(":", 1)[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
