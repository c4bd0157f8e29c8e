"""Times on a device: by its own events, with a cold L2 cache, providers taking turns.

The providers of a case run one after the other in every round, so that a change of clocks or temperature hits all
alike. Before each run the L2 cache is overwritten, and the device is kept busy for a moment so that the host's launches
are queued by the time the clock starts: what is measured is device time, not the host's.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

_BUSY_CYCLES = (1_000_000, 16_000_000)
"""Least and most of the device before a run: from half a millisecond to eight on today's clocks."""
_CYCLES_A_SECOND = 2e9


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


def l2_bytes(device: torch.device) -> int:
    """Bytes of a GPU's last cache; 0 where torch does not tell."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


def measure(
    providers: Mapping[str, Callable[[], Any]],
    clock: Callable[[Callable[[], Any]], float],
    *,
    seconds: float,
    least_runs: int = 10,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, float | str]:
    """Median times of the providers, which take turns for about `seconds` altogether, at least least_runs rounds.

    clock: how many microseconds a run takes.
    A provider that raises is given its error as text in place of a time, and the others go on.
    """
    results: dict[str, float | str] = {}
    times: dict[str, list[float]] = {}
    for name, run in providers.items():
        try:
            for _ in range(2):  # compiles, then fills the allocator's pools
                run()
            times[name] = []
        except Exception as error:  # a backend that refuses these inputs is a result
            results[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
    end = now() + seconds
    rounds = 0
    while times and (rounds < least_runs or now() < end):
        for name, taken in times.items():
            taken.append(clock(providers[name]))
        rounds += 1
    results |= {name: statistics.median(taken) for name, taken in times.items()}
    return {name: results[name] for name in providers}
