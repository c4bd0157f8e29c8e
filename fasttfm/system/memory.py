"""Memory of the machine and of this process: what it can still get, has taken at most, keeps, and may take."""

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
"""Of mallopt(), as glibc's malloc.h numbers them."""
_NEEDED = 700 * _MIB
"""Address space that importing PyTorch and numpy takes (600 MB with one thread); with less their libraries end the
process on their own, without a word or with a page of them."""


def refuse_small_limit() -> None:
    """Raise UserError when this process may not take the address space that PyTorch needs before it can do anything."""
    limit = _address_space()
    if limit is not None and limit < _NEEDED:
        raise UserError(
            f"out of memory: only {limit // _MIB:,} MiB of address space are allowed (ulimit -v), PyTorch alone "
            f"needs {_NEEDED // _MIB:,}: raise the limit"
        )


def limit_remedy() -> str:
    """Say what else can be done when memory has not sufficed: to raise the limit, where there is one; else ""."""
    limit = _address_space()
    return "" if limit is None else f", or raise the limit of {limit // _MIB:,} MiB of address space (ulimit -v)"


def available_bytes() -> int | None:
    """Memory that this process can still get without swapping, limits of its container included; None if unknown."""
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
        except (OSError, ValueError):  # not in a container, or the limit is the word max
            continue


def peak_memory() -> int:
    """The most resident memory that this process has had so far, in bytes; 0 where nothing tells."""
    try:
        # not getrusage, which counts what the parent had when it started this process
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        pass
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, for good, and take less than 32 MiB from what it keeps, if it is glibc.

    A training step on a CPU frees what the next one takes; given back, its pages are mapped and cleared anew each time.
    What a user's MALLOC_ variables say stands.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the most that it takes


def _address_space() -> int | None:
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
