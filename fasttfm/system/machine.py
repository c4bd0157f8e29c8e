"""The machine: package versions, CPU, cores and GPU."""

import os
import platform
import sys
import warnings
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttfm.errors import UserError

if TYPE_CHECKING:
    import torch

_UNITS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_fp16", "amx_int8")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}


def version(package: str) -> str | None:
    """The version of a package, without importing it; None if it is not installed.

    For fasttfm, the version of the running source: an editable installation may have recorded an older one.
    """
    if package == "fasttfm":
        return str(sys.modules[package].__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpuinfo(field: str) -> str:
    """A field of /proc/cpuinfo for the first core; '' on other systems."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
    except OSError:
        return ""


def processor() -> str:
    """The CPU model name."""
    return cpuinfo("model name") or platform.processor()


def processor_units() -> list[str]:
    """Vector and matrix extensions of the CPU, by Linux's names; empty on other systems."""
    flags = cpuinfo("flags").split()
    return [unit for unit in _UNITS if unit in flags]


def emulates_bfloat16(units: Collection[str]) -> bool:
    """Whether a CPU with these extensions emulates bfloat16 in float32; False if they are unknown."""
    return bool(units) and not _BFLOAT16 & set(units)


def multiplies_bfloat16(device: "torch.device") -> bool:
    """Whether the device is known to have bfloat16 matrix units."""
    import torch

    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(_BFLOAT16 & set(processor_units()))


def allowed_cores() -> int:
    """Cores that this process may use, by affinity and cgroup quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(allowed, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return allowed


def pick_device(device: "str | torch.device | None") -> "torch.device":
    """The named device; for None a GPU if available, else the CPU. UserError for an unavailable device."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that mkldnn is deprecated
            chosen = torch.device(device)
    except Exception:  # RuntimeError for a name, ModuleNotFoundError for a backend that is not installed
        raise UserError(f"device {device!r} is unknown: use cpu, cuda or cuda:1") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device!s} is not available ({torch.cuda.device_count()} GPUs are visible): use cpu")
    try:
        torch.zeros((), dtype=torch.float32, device=chosen).item()
    except Exception as error:  # hpu raises ModuleNotFoundError, ideep an internal assertion
        reason = str(error).split("\n", 1)[0]
        detail = f" ({reason})" if chosen.type == "cuda" else ""
        raise UserError(f"device {device!s} cannot be used here{detail}: use cpu or cuda") from None
    return chosen


def gpu() -> "torch.device | None":
    """The current CUDA device; None without one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def describe_gpu() -> dict[str, Any] | None:
    """Name, chip, multiprocessors, memory in GiB and driver of gpu(); None without one."""
    device = gpu()
    if device is None:
        return None
    import torch

    from fasttfm.kernels import choice_cache, launch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "chip": launch.chip(device).name,
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": choice_cache.driver(),
    }
