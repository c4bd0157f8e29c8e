"""Times on a device: by its own events, with a cold L2 cache, providers taking turns.

The providers of a case run one after the other in every round, so that a change of clocks or temperature hits all
alike. Before each run the L2 cache is overwritten, and the device is kept busy for a moment so that the host's launches
are queued by the time the clock starts: what is measured is device time, not the host's.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

_BUSY_CYCLES = (1_000_000, 16_000_000)
"""Least and most of the device before a run: from half a millisecond to eight on today's clocks."""
_CYCLES_A_SECOND = 2e9


class Clock(Protocol):
    """Interface of a device's clock for measure(); tests bring their own."""

    def microseconds(self, run: Callable[[], Any]) -> float:
        """Return how long one run takes."""

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Most memory that one run has allocated beyond what there was before."""


class DeviceClock:
    """CUDA's (and ROCm's) events."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(max(2 * l2_bytes(device), 64 << 20), dtype=torch.int8, device=device)
        self._device = device
        self._busy = _BUSY_CYCLES[0]

    def microseconds(self, run: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(self._busy)
        begin.record()
        started = time.perf_counter()
        run()
        taken = time.perf_counter() - started
        end.record()
        end.synchronize()
        # Half as long again as the slowest host of late needed: a backward pass takes a slow host a millisecond.
        least, most = _BUSY_CYCLES
        self._busy = min(most, max(least, int(0.9 * self._busy), int(1.5 * taken * _CYCLES_A_SECOND)))
        return 1e3 * begin.elapsed_time(end)

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class HostClock:
    """The processor's own time, for what it computes itself."""

    def microseconds(self, run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begin)

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Not measured: 0."""
        return 0


def l2_bytes(device: torch.device) -> int:
    """Bytes of a GPU's last cache; 0 where torch does not tell."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


@dataclass(frozen=True, slots=True)
class Timing:
    """One provider of one case."""

    median_us: float
    p20_us: float
    runs: int
    peak_bytes: int


def measure(
    providers: Mapping[str, Callable[[], Any]],
    clock: Clock,
    *,
    seconds: float,
    warm_up: int = 3,
    least_runs: int = 10,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Timing | str]:
    """Times the providers in turns for about `seconds` altogether, at least least_runs rounds.

    A provider that raises is given its error as text in place of a timing, and the others go on.
    """
    results: dict[str, Timing | str] = {}
    peaks: dict[str, int] = {}
    for name, run in providers.items():
        try:
            for _ in range(warm_up):  # compiles, tunes, fills the allocator's pools
                run()
            peaks[name] = clock.peak_bytes(run)
        except Exception as error:  # a backend that refuses these inputs is a result
            results[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
    times: dict[str, list[float]] = {name: [] for name in peaks}
    end = now() + seconds
    rounds = 0
    while peaks and (rounds < least_runs or now() < end):
        for name in peaks:
            times[name].append(clock.microseconds(providers[name]))
        rounds += 1
    for name, taken in times.items():
        p20, median = np.quantile(taken, (0.2, 0.5)).tolist()
        results[name] = Timing(median, p20, len(taken), peaks[name])
    return {name: results[name] for name in providers}
