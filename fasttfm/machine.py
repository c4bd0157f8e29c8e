"""Facts of where this process runs: versions of packages, the processor and the GPU."""

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def version(package: str) -> str | None:
    """The version of a package, which is not imported; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpuinfo(field: str) -> str:
    """Return what Linux says of the first core; '' elsewhere."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
    except OSError:
        return ""


def processor() -> str:
    """The CPU's name."""
    return cpuinfo("model name") or platform.processor()


def gpu() -> "torch.device | None":
    """The one that torch computes on; None without one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def describe_gpu() -> dict[str, Any] | None:
    """Name, chip, processors, memory in GiB and driver of gpu(); None without one."""
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
