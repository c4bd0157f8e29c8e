"""`fasttfm env --check`: finds causes of slowness on this machine, and damaged files in a directory.

Checks threads, other programs, the processor, packages, settings and the GPU.
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
"""Seconds over which CPU usage is measured."""


class Finding(NamedTuple):
    """A problem and its remedy."""

    subject: str
    fault: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """State of this process and machine, collected by gather(), the input of judge()."""

    cores: int
    """Cores that this process may run on."""
    threads: int
    """torch.get_num_threads()."""
    busy_cores: float
    """Cores kept busy by other programs."""
    units: frozenset[str]
    """Instruction sets of the processor, by Linux's names; empty if unknown."""
    missing: frozenset[str] = frozenset()
    """Packages among numba and, on Linux, triton that are not installed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    multiplies_int8: bool = True
    """Whether int8 is computed in integers."""
    gpu_without_driver: bool = False
    """An NVIDIA GPU that this build of torch cannot use."""
    device: str | None = None
    """Name of the GPU that torch uses."""
    tf32: bool = False
    """Whether float32 products may use TF32."""
    has_tf32: bool = False
    """Whether the GPU has TF32 units."""
    is_tuned: bool = True
    """Whether tiles were measured on this GPU model, by `fasttfm tune` or in the shipped tables."""
    assembler_fault: str = ""


def check_folder(folder: Path) -> list[Finding]:
    """Return the files of a model or data directory that are damaged; UserError if it has no checksums."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a directory: give a model or prepared data")
    checked, found = faults(folder)
    if not checked and not found:
        raise UserError(f"{folder}: holds no {MANIFEST} to compare with: give what a command of fasttfm wrote")
    return [Finding(str(folder), fault, remedy) for fault, remedy in found]


def text(findings: Sequence[Finding], folders: Sequence[Path]) -> str:
    if not findings and folders:
        return f"all files match their digests ({', '.join(map(str, folders))})"
    if not findings:
        return "nothing slows this machine down"
    return "\n".join(f"{each.subject}: {each.fault}\n    {each.remedy}".rstrip() for each in findings)


def judge(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each cause of slowness; has no side effects."""
    rules = (*_settings_rules(facts), *(_device_rules(facts) if facts.device else _processor_rules(facts)))
    yield from (Finding(*finding) for applies, *finding in rules if applies)
    if facts.busy_cores > 0.3:
        yield Finding(
            "other programs",
            f"they keep {facts.busy_cores:.1f} of {facts.cores} cores busy",
            "end them: all threads of an operator wait for the one that shares its core",
        )


Rule = tuple[bool, str, str, str]
"""Whether it applies, and the fields of its Finding."""


def _settings_rules(facts: Facts) -> Iterator[Rule]:
    interpret, backend = (facts.environment.get(name) for name in ("TRITON_INTERPRET", "FASTTFM_BACKEND"))
    subject, is_valid = f"FASTTFM_BACKEND={backend}", backend in (None, "auto", "triton", "torch")
    slow = "kernels run in Triton's interpreter, thousands of times slower"
    yield interpret == "1", "TRITON_INTERPRET=1", slow, "unset it"
    yield not is_valid, subject, "commands with a model fail: must be auto, triton or torch", "unset it"
    yield backend in ("triton", "torch"), subject, "used for every operator, even where it is slower", "unset it"


def _processor_rules(facts: Facts) -> Iterator[Rule]:
    threads, cores = facts.threads, facts.cores
    remedy = "install the torch built for its driver: see pytorch.org"
    yield facts.gpu_without_driver, "GPU", "this torch cannot use it", remedy
    yield threads > cores, "threads", f"{threads} threads share {cores} cores", f"set OMP_NUM_THREADS={cores}"
    remedy = f"set OMP_NUM_THREADS={cores}, or leave it unset"
    yield threads < cores, "threads", f"{threads} of {cores} cores are used", remedy
    fault = "not installed: searches and training are slower"
    yield "numba" in facts.missing, "numba", fault, 'pip install "./fasttfm[cpu]"'
    remedy = f"give --precision fp32{' (or int8 to translate)' if facts.multiplies_int8 else ''}"
    yield emulates_bfloat16(facts.units), "bfloat16", "this CPU emulates it in float32", remedy
    fault = "8-bit products need numba and a processor with AVX2"
    yield not facts.multiplies_int8, "int8", fault, "give --precision bf16 or fp32 to translate"


def _device_rules(facts: Facts) -> Iterator[Rule]:
    fault = "not installed: operators run in PyTorch, unfused"
    yield "triton" in facts.missing, "triton", fault, "pip install triton"
    remedy = 'torch.set_float32_matmul_precision("high"), if ten bits of mantissa are enough'
    yield facts.has_tf32 and not facts.tf32, "TF32", "float32 products do not use the tensor cores", remedy
    yield not facts.is_tuned, "tiles", "not measured on this GPU", "fasttfm tune"
    yield bool(facts.assembler_fault), "assembler", facts.assembler_fault, "fasttfm env shows how to override it"


def gather(device: dict[str, Any] | None) -> Facts:
    """Collect the facts of this process and machine. device: output of `fasttfm env` if torch uses a GPU."""
    import torch

    from fasttfm.cpu import int8
    from fasttfm.system.machine import allowed_cores

    tuned: dict[str, Any] = (device or {}).get("tuned") or {}
    assemblers = (device or {}).get("assembler", {}).values()
    packages = ("numba", "triton") if sys.platform == "linux" else ("numba",)
    return Facts(
        cores=allowed_cores(),
        threads=torch.get_num_threads(),
        busy_cores=_busy_cores(),
        units=frozenset(processor_units()),
        missing=frozenset(name for name in packages if importlib.util.find_spec(name) is None),
        environment=dict(os.environ),
        multiplies_int8=int8.route() is not None,
        gpu_without_driver=device is None and Path("/proc/driver/nvidia/version").exists(),
        device=None if device is None else device["device"]["name"],
        tf32=torch.backends.cuda.matmul.allow_tf32,
        has_tf32=device is not None and torch.cuda.get_device_capability() >= (8, 0),
        is_tuned=device is None or bool(tuned.get("answers")),
        assembler_fault=next((each["fault"] for each in assemblers if each["fault"]), ""),
    )


def _busy_cores() -> float:
    """Measure the number of cores kept busy by other programs; 0 if the system does not report it."""
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
    """Return the busy jiffies of all cores: user, nice, system, irq, softirq and steal."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, irq, softirq, steal = (int(each) for each in next(lines).split()[1:9])
    return user + nice + system + irq + softirq + steal
