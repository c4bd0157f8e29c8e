"""Cache of `fasttfm tune` in the user's cache directory: one JSON file per device, driver and set of versions.

    $FASTTFM_CACHE, else $XDG_CACHE_HOME/fasttfm, else ~/.cache/fasttfm
        tuned/NVIDIA-H200-<digest of chip, driver and versions>.json

Without a usable file, the tables in tiles/ apply. A file that is damaged, or for another driver or version, gives one
warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm.kernels import choices
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Decision

_FORMAT = 2

System = dict[str, Any]
"""Device, chip, driver and versions for which a measurement is valid: system_of()."""


class Measured(NamedTuple):
    """The fastest answer of a decision, as text, and its time."""

    answer: str
    microseconds: float
    shipped_microseconds: float
    """Time of the shipped answer in the same run."""


def system_of(device: torch.device, chip: Chip) -> System:
    """Return the System of a device."""
    versions = {name: _version(name) for name in ("fasttfm", "torch", "triton")}
    return {"device": torch.cuda.get_device_name(device), "chip": chip.name, "driver": driver(), "versions": versions}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


_DRIVERS = (
    ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),  # "... for x86_64  580.159.04": not the 86
    ("/sys/module/amdgpu/version", r"(\S+)"),
)


def driver() -> str:
    """Return the version of the GPU driver, or of CUDA or ROCm if the driver's is not readable."""
    for file, pattern in _DRIVERS:
        if os.access(file, os.R_OK) and (match := re.search(pattern, Path(file).read_text())):
            return match[1]
    return torch.version.hip or torch.version.cuda or "unknown"


def folder() -> Path:
    """Return the user's cache folder, which need not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttfm"
    return Path(os.environ.get("FASTTFM_CACHE") or cache)


def file_of(system: System) -> Path:
    """Return the file of a system, which need not exist."""
    product = re.sub(r"[^A-Za-z0-9]+", "-", system["device"]).strip("-") or "device"
    digest = hashlib.sha256(json.dumps(system, sort_keys=True).encode()).hexdigest()[:12]
    return folder() / "tuned" / f"{product}-{digest}.json"


def write(system: System, answers: dict[Decision, Measured]) -> Path:
    """Replace the answers of a system atomically. Returns the file."""
    rows = sorted(answers.items(), key=str)
    entries = [{"choice": name, "size_class": size, **each._asdict()} for (name, size), each in rows]
    file = file_of(system)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"format": _FORMAT, **system, "answers": entries}, indent=1) + "\n", encoding="utf-8")
    return part.replace(file)


def parse(file: Path) -> tuple[System, dict[Decision, Measured]]:
    """Read a file. Raises ValueError if it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))  # noqa: TID251 (kernels know nothing of fasttfm)
        if (written := content.pop("format")) != _FORMAT:
            raise ValueError(f"format {written} is not {_FORMAT}")
        answers = {
            (entry["choice"], tuple(entry["size_class"])): Measured(*(entry[name] for name in Measured._fields))
            for entry in content.pop("answers")
        }
        return {name: content[name] for name in ("device", "chip", "driver", "versions")}, answers
    except (LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(f"unexpected content ({error!r})") from None


def read(system: System) -> dict[Decision, Measured]:
    """Return the answers tuned for a system, {} without a file. Raises ValueError for a wrong or damaged file."""
    file = file_of(system)
    if not file.exists():
        return {}
    other, answers = parse(file)
    if other != system:
        raise ValueError(f"it was measured on {other['device']} {other['driver']} with {other['versions']}")
    return answers


def load(device: torch.device, chip: Chip) -> None:
    """Apply the tuned answers of a device. An unusable file gives one warning and is ignored."""
    system = system_of(device, chip)
    file, remedy = file_of(system), "the shipped choices apply; run `fasttfm tune` to measure again"
    answers: dict[Decision, Measured] = {}
    try:
        answers = read(system)
        old = sorted(set(file.parent.glob(file.stem[:-12] + "[0-9a-f]" * 12 + ".json")) - {file})
        if not answers and old:
            message = f"{old[-1]} was measured with another driver or version: {remedy}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    except ValueError as error:
        warnings.warn(f"{file} is damaged: {error}; {remedy}", RuntimeWarning, stacklevel=2)
    choices.keep(chip, {decision: each.answer for decision, each in answers.items()})
