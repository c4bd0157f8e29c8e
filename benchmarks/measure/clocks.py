"""Clocks of the harness: device events for kernels, the synchronized host clock for everything else.

Both overwrite the last-level cache before a run and return when its work has finished. Providers never see them.
"""

import functools
import itertools
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.case import PURE_PASSES, Case, Setting
from fasttfm.cpu import int8
from fasttfm.kernels.proof.costs import Machine
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.system.timing import DeviceClock, l2_bytes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler would log to stderr

_UNKNOWN_CACHE = 64 << 20


class HostClock:
    """Wall time on the host, from a cold cache until all work of the run has finished."""

    name = "host, synchronized"

    def __init__(self, device: torch.device, overwritten: int | None = None) -> None:
        """overwritten: bytes to overwrite before a run (default: twice the last-level cache)."""
        self._device = device
        size = max(l2_bytes(device), 32 << 20) if device.type == "cuda" else last_level_cache()
        self._flush = torch.empty(overwritten or 2 * size, dtype=torch.int8, device=device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def microseconds(self, run: Callable[[], Any]) -> float:
        """Time of one synchronized run from cold caches."""
        self._flush.add_(1)
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return 1e6 * (time.perf_counter() - start)

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Peak memory allocated by one run beyond what was allocated before; None if unknown."""
        if self._device.type == "cuda":
            return DeviceClock.peak_bytes(self, run)  # type: ignore[arg-type]
        return host_peak_bytes(run)

    def launches(self, run: Callable[[], Any]) -> int | None:
        return count_launches(run) if self._device.type == "cuda" else None  # no launches on a CPU


class EventClock(DeviceClock):
    """Device time by CUDA or ROCm events, without the host's launch time."""

    name = "device events"

    def launches(self, run: Callable[[], Any]) -> int | None:
        return count_launches(run)


Clock = HostClock | EventClock


@functools.cache
def _clock(device: torch.device, events: bool, smoke: bool) -> Clock:
    # a last-level cache may have half a gigabyte, whose overwriting takes longer than a smoke run's measurements
    return EventClock(device) if events else HostClock(device, 1 << 20 if smoke else None)


def clock_of(case: Case, setting: Setting) -> Clock:
    """Device events for kernels and blocks on a GPU; the host clock for whole steps and on a CPU."""
    return _clock(setting.device, setting.on_gpu and case.passes in PURE_PASSES, setting.level == "smoke")


def count_launches(run: Callable[[], Any]) -> int | None:
    """Number of launches: Triton kernels, and ATen operators that compute."""
    with LaunchLog() as log:
        run()
    return log.total


def host_peak_bytes(run: Callable[[], Any]) -> int:
    """Peak memory of torch's CPU allocator above its start, from the profiler's allocation events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def last_level_cache() -> int:
    """Size of the CPU's largest cache in bytes, from Linux's sysfs; 64 MiB if unknown."""
    sizes = [
        int(result[1]) << {"K": 10, "M": 20, "G": 30}[result[2]]
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (result := re.fullmatch(r"(\d+)([KMG])", file.read_text().strip()))
    ]
    return max(sizes, default=_UNKNOWN_CACHE)


_RUNS = 10


@functools.cache
def ceilings(setting: Setting) -> Machine:
    """Measures sustained bandwidth (bytes read and written by a copy) and FLOP/s (of a square product).

    Measured instead of data-sheet peaks, at this machine's clocks. Both are the best of several runs, so a share above
    1 is an error and not luck.
    """
    smoke = setting.level == "smoke"
    clock = _clock(setting.device, setting.on_gpu, smoke)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    largest = (1 << 29) if setting.on_gpu else (2 << 20 if smoke else last_level_cache())
    source = torch.randint(0, 127, (largest,), dtype=torch.int8, device=setting.device, generator=generator)
    target = torch.empty_like(source)
    bytes_per_s = 0.0
    for part in (1, 4, 16):  # the last writes may stay in the cache, as in a kernel of this size
        copy = partial(target[: largest // part].copy_, source[: largest // part])
        bytes_per_s = max(bytes_per_s, 2e6 * (largest // part) / min(clock.microseconds(copy) for _ in range(_RUNS)))
    size = 8192 if setting.on_gpu else (256 if smoke else 1536)
    multiply = _square_product(setting, size, generator)
    product = min(clock.microseconds(multiply) for _ in range(_RUNS))
    return Machine(flops=2 * size**3 / product * 1e6, bandwidth=bytes_per_s)


def _square_product(setting: Setting, size: int, generator: torch.Generator) -> Callable[[], Any]:
    """Square product; int8 by the search's own operator, because torch.mm is slow there."""
    options: dict[str, Any] = {"device": setting.device, "generator": generator}
    if setting.dtype == torch.int8:
        rows = torch.randint(1, 256, (size, size), dtype=torch.uint8, **options)
        return partial(int8.multiplier(torch.ones(size, size, dtype=torch.int8), torch.ones(size)), rows)
    return partial(torch.mm, *(torch.randn(size, size, **options).to(setting.dtype) for _ in range(2)))
