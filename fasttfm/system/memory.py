"""Memory limits and use of this process: available, peak, address space, malloc settings."""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fasttfm.errors import UserError

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

_MIB = 1 << 20
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt() in glibc's malloc.h."""
_NEEDED = 700 * _MIB
"""Address space for importing PyTorch and numpy (600 MB with one thread); with less, their libraries abort the process
without a usable message."""


def refuse_small_limit() -> None:
    """Raise UserError if the address space limit is too small to import PyTorch."""
    limit = _address_space()
    if limit is not None and limit < _NEEDED:
        raise UserError(
            f"out of memory: the address space is limited to {limit // _MIB:,} MiB (ulimit -v), PyTorch alone needs "
            f"{_NEEDED // _MIB:,}: raise the limit"
        )


def limit_remedy() -> str:
    """Advice for out-of-memory messages: raise the address space limit; "" if there is none."""
    limit = _address_space()
    return "" if limit is None else f", or raise the limit of {limit // _MIB:,} MiB of address space (ulimit -v)"


def available_bytes() -> int | None:
    """Memory available to this process without swapping, container limits included; None if unknown."""
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    for limit, used in _CGROUPS:
        try:
            yield max(0, int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no cgroup, or the limit is "max"
            continue


def peak_memory() -> int:
    """Peak resident memory of this process in bytes; 0 if unknown."""
    try:
        # not getrusage, which includes the parent's memory at the fork
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        pass
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, and allocate blocks below 32 MiB from it; other C libraries are unchanged.

    A training step on a CPU frees what the next one allocates; pages returned to the system would be mapped and zeroed
    again every time. Does nothing if the user has set MALLOC_ or GLIBC_TUNABLES variables.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the maximum


def _address_space() -> int | None:
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
