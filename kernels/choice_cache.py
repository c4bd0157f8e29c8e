"""Results of `fasttfm tune`, in the user's cache directory: one JSON file a device, driver and set of versions.

    $FASTTFM_CACHE, else $XDG_CACHE_HOME/fasttfm, else ~/.cache/fasttfm
        tuned/NVIDIA-H200-<digest of chip, driver and versions>.json
        tuned/AMD-EPYC-8-threads-<the same of a processor, which cpu/thresholds.py reads>.json

A file that cannot be used (damaged, or of another driver or version) is left alone, with one warning, and what ships is
in force: the tables, and before them what others have measured on the same product and sent in, in such files too
(kernels/tiles/tuned).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fasttfm.kernels import choices
from fasttfm.kernels.chip import Chip

_FORMAT = 2

SHIPPED = Path(__file__).parent / "tiles" / "tuned"
"""The files that were sent in; proof/tuned.py checks them."""


@dataclass(frozen=True, slots=True)
class System:
    """Device, driver and versions that a measurement holds for."""

    device: str
    """The product's name, as the driver says it."""
    chip: str
    driver: str
    versions: dict[str, str] = field(hash=False)
    """fasttfm, torch, triton."""

    @property
    def file(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return folder() / f"{self._product}-{digest}.json"

    @property
    def _product(self) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", self.device).strip("-") or "device"

    def others(self) -> list[Path]:
        """Files of the same device under another driver or other versions."""
        return sorted(set(folder().glob(f"{self._product}-{'[0-9a-f]' * 12}.json")) - {self.file})


@dataclass(frozen=True, slots=True)
class Answer:
    """One measured decision."""

    choice: str
    size_class: tuple
    answer: Any
    """A tile or a name, as text; of a processor a number."""
    microseconds: float
    shipped_microseconds: float
    """What the shipped answer took in the same run."""


def folder() -> Path:
    """Return the folder of the measurements; it need not exist."""
    if chosen := os.environ.get("FASTTFM_CACHE"):
        return Path(chosen) / "tuned"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttfm" / "tuned"


def system_of(device: torch.device, chip: Chip) -> System:
    """The device as it is now."""
    versions = {name: _version(name) for name in ("fasttfm", "torch", "triton")}
    return System(torch.cuda.get_device_name(device), chip.name, driver(), versions)


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
    """The driver's version, or that of CUDA or ROCm where it is hidden."""
    for file, pattern in _DRIVERS:
        try:
            match = re.search(pattern, Path(file).read_text())
        except OSError:
            continue
        if match:
            return match[1]
    return torch.version.hip or torch.version.cuda or "unknown"


def write(system: System, answers: list[Answer]) -> Path:
    """Keeps the answers in place of those kept before, all or nothing. Returns the file."""
    folder().mkdir(parents=True, exist_ok=True)
    content = {"format": _FORMAT, **asdict(system), "answers": [asdict(answer) for answer in answers]}
    with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".part", delete=False) as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    os.replace(file.name, system.file)
    return system.file


def read(system: System) -> list[Answer]:
    """The answers kept for a place; none where nothing is kept. Raises ValueError for a file that is damaged or of
    another place."""
    if not system.file.exists():
        return []
    other, answers = parse(system.file)
    if other != system:
        raise ValueError(f"it was measured on {other.device} {other.driver} with {other.versions}")
    return answers


def parse(file: Path) -> tuple[System, list[Answer]]:
    """Read the content of a file. Raises ValueError where it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))  # noqa: TID251 (kernels know nothing of fasttfm)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']} is not {_FORMAT}")
        answers = [Answer(**{**entry, "size_class": tuple(entry["size_class"])}) for entry in content["answers"]]
        hash(tuple((answer.choice, answer.size_class) for answer in answers))  # they are looked up by these
        return System(*(content[name] for name in ("device", "chip", "driver", "versions"))), answers
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"unexpected content ({error!r})") from None


def shipped(system: System) -> list[Answer]:
    """Return what was sent in for this product, whatever its driver and versions."""
    measured = [parse(file) for file in sorted(SHIPPED.glob("*.json"))]
    product = system.device, system.chip
    return [answer for other, answers in measured if (other.device, other.chip) == product for answer in answers]


def merged(kept: list[Answer], fresh: list[Answer]) -> list[Answer]:
    """kept, with what was measured anew in place of its old answer."""
    table = {(answer.choice, answer.size_class): answer for answer in (*kept, *fresh)}
    return [table[key] for key in sorted(table, key=str)]


def load(device: torch.device, chip: Chip) -> None:
    """Puts in force what was tuned on this device; warns once, and changes nothing, when it cannot be used."""
    system = system_of(device, chip)
    remedy = "what ships is in force; run `fasttfm tune` to measure again"
    known = shipped(system)
    if known:
        choices.keep(chip, {(a.choice, a.size_class): a.answer for a in known})
    try:
        answers = read(system)
    except ValueError as error:
        warnings.warn(f"{system.file} is damaged: {error}; {remedy}", RuntimeWarning, stacklevel=2)
        return
    if answers:
        choices.keep(chip, {(a.choice, a.size_class): a.answer for a in (*known, *answers)})
    elif old := system.others():
        warnings.warn(f"{old[-1]} was measured with another driver or version: {remedy}", RuntimeWarning, stacklevel=2)
