"""`fasttfm env --check`: what slows this machine down, and which files of a folder are damaged.

Of the machine: threads, other programs, the processor, packages, settings and the GPU.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fasttfm.errors import UserError
from fasttfm.system.folders import MANIFEST, faults
from fasttfm.system.machine import emulates_bfloat16, processor_units

_SAMPLE = 0.5
"""Seconds for which the processors' counters are watched."""


class Finding(NamedTuple):
    """A fault, and what mends it."""

    subject: str
    fault: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that are judged: gather() gathers all of it before judge() judges, without side effects."""

    cores: int
    """Cores that this process may run on."""
    threads: int
    """Of torch."""
    busy_cores: float
    """Cores kept busy by other programs."""
    units: frozenset[str]
    """Instruction sets of the processor, by Linux's names; empty if unknown."""
    system: str = "linux"
    """sys.platform."""
    missing: frozenset[str] = frozenset()
    """Packages that are not installed, of numba and triton."""
    environment: Mapping[str, str] = field(default_factory=dict)
    multiplies_int8: bool = True
    """Whether products of 8-bit integers are exact here, and faster than float32."""
    gpu_without_driver: bool = False
    """There is an NVIDIA GPU, and this torch cannot use it."""
    device: str | None = None
    """Name of the GPU that torch uses."""
    tf32: bool = False
    """Whether float32 products may take the GPU's TF32 units, which it has."""
    has_tf32: bool = False
    is_tuned: bool = True
    """Whether tiles for this GPU were measured, by `fasttfm tune` or by others."""
    assembler_fault: str | None = None


def check_machine(device: dict[str, Any] | None) -> list[Finding]:
    """Return what slows this machine down. device: what `fasttfm env` says, where torch uses a GPU."""
    return list(judge(gather(device)))


def check_folder(folder: Path) -> list[Finding]:
    """Files of a model or of prepared data that differ from what was written; UserError where no checksum tells."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a directory: give a model or prepared data")
    checked, found = faults(folder)
    if not checked and not found:
        raise UserError(f"{folder}: holds no {MANIFEST} to compare with: give what a command of fasttfm wrote")
    return [Finding(str(folder), fault, "" if "anew" in fault else "copy it back, or make it anew") for fault in found]


def text(findings: Sequence[Finding], folders: Sequence[Path]) -> str:
    """The findings for people."""
    if not findings and folders:
        return f"every file with a digest is the one that was written ({', '.join(map(str, folders))})"
    if not findings:
        return "nothing slows this machine down"
    return "\n".join(f"{each.subject}: {each.fault}\n    {each.remedy}".rstrip() for each in findings)


def judge(facts: Facts) -> Iterator[Finding]:
    """Return a finding for each thing that slows this machine down."""
    yield from _of_settings(facts.environment)
    yield from _of_device(facts) if facts.device else _of_processor(facts)
    if facts.busy_cores > 0.3:
        yield Finding(
            "other programs",
            f"they keep {facts.busy_cores:.1f} of {facts.cores} cores busy",
            "end them: threads of one product wait for the one that shares its core",
        )


def _of_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("TRITON_INTERPRET") == "1":
        yield Finding(
            "TRITON_INTERPRET=1", "kernels run in Triton's interpreter, thousands of times slower", "unset it"
        )
    backend = environment.get("FASTTFM_BACKEND", "auto")
    if backend not in ("auto", "triton", "torch"):
        yield Finding(
            f"FASTTFM_BACKEND={backend}", "no command with a model runs: it is none of auto, triton, torch", "unset it"
        )
    elif backend != "auto":
        yield Finding(f"FASTTFM_BACKEND={backend}", "every operator goes one way, also where it is slower", "unset it")


def _of_processor(facts: Facts) -> Iterator[Finding]:
    if facts.gpu_without_driver:
        yield Finding("GPU", "this torch cannot use it", "install the torch built for its driver: see pytorch.org")
    if facts.threads > facts.cores:
        yield Finding(
            "threads", f"{facts.threads} threads share {facts.cores} cores", f"set OMP_NUM_THREADS={facts.cores}"
        )
    if facts.threads < facts.cores:
        yield Finding(
            "threads",
            f"{facts.threads} of {facts.cores} cores are used",
            f"set OMP_NUM_THREADS={facts.cores}, or leave it unset",
        )
    if "numba" in facts.missing:
        yield Finding("numba", "not installed: searches and training are slower", 'pip install "./fasttfm[cpu]"')
    if emulates_bfloat16(facts.units):
        yield Finding(
            "bfloat16",
            "this processor computes it by way of float32",
            f"give --precision fp32{' (or int8 to translate)' if facts.multiplies_int8 else ''}",
        )
    if not facts.multiplies_int8:
        yield Finding(
            "int8", "no product here is exact and faster than float32", "give --precision bf16 or fp32 to translate"
        )


def _of_device(facts: Facts) -> Iterator[Finding]:
    if "triton" in facts.missing and facts.system == "linux":
        yield Finding("triton", "not installed: operators go by PyTorch, unfused", "pip install triton")
    if facts.has_tf32 and not facts.tf32:
        yield Finding(
            "TF32",
            "float32 products do not take the matrix units",
            'torch.set_float32_matmul_precision("high"), where ten bits of mantissa are enough',
        )
    if not facts.is_tuned:
        yield Finding("tiles", "nobody has measured them on this GPU", "fasttfm tune")
    if facts.assembler_fault:
        yield Finding("assembler", facts.assembler_fault, "fasttfm env says how to take another")


def gather(device: dict[str, Any] | None) -> Facts:
    """The facts of this process and machine."""
    import torch

    from fasttfm.cpu import int8
    from fasttfm.system.machine import allowed_cores

    tuned: dict[str, Any] = (device or {}).get("tuned") or {}
    faults = [each["fault"] for each in (device or {}).get("assembler", {}).values()]
    return Facts(
        cores=allowed_cores(),
        threads=torch.get_num_threads(),
        busy_cores=_busy_cores(),
        units=frozenset(processor_units()),
        system=sys.platform,
        missing=frozenset(name for name in ("numba", "triton") if importlib.util.find_spec(name) is None),
        environment=dict(os.environ),
        multiplies_int8=int8.route() is not None,
        gpu_without_driver=device is None and Path("/proc/driver/nvidia/version").exists(),
        device=None if device is None else device["device"]["name"],
        tf32=torch.backends.cuda.matmul.allow_tf32,
        has_tf32=device is not None and torch.cuda.get_device_capability() >= (8, 0),
        is_tuned=device is None or bool(tuned.get("answers") or tuned.get("shipped")),
        assembler_fault=next((fault for fault in faults if fault), None),
    )


def _busy_cores() -> float:
    """Cores that other programs keep busy, watched for a moment; 0 where the system does not tell."""
    try:
        before, used, began = _jiffies(), time.process_time(), time.monotonic()
        time.sleep(_SAMPLE)
        after = _jiffies()
    except (OSError, ValueError):
        return 0.0
    seconds = time.monotonic() - began
    ours = time.process_time() - used
    return max(0.0, (after - before) / os.sysconf("SC_CLK_TCK") - ours) / seconds


def _jiffies() -> int:
    """The jiffies, over all cores, in which some program ran: user, nice, system, irq, softirq and steal."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, irq, softirq, steal = (int(each) for each in next(lines).split()[1:9])
    return user + nice + system + irq + softirq + steal
