"""Device times of alternating providers, with a cold L2 cache.

Every round runs each provider once, so that changes of clock rate or temperature affect all equally. Before each run
the L2 cache is overwritten and the device is kept busy, so that launches are already queued when the clock starts.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

_BUSY_CYCLES = (1_000_000, 16_000_000)
"""Minimum and maximum busy time before a run: 0.5 to 8 ms at current clock rates."""
_CYCLES_A_SECOND = 2e9


class DeviceClock:
    """Measures time with CUDA (or ROCm) events, and peak memory."""

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
        # 1.5 times the recent host time, which is a millisecond for a backward pass on a slow host
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
    """Size of a GPU's L2 cache in bytes; 0 if torch does not know it."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


def measure(
    providers: Mapping[str, Callable[[], Any]],
    clock: Callable[[Callable[[], Any]], float],
    *,
    seconds: float,
    least_runs: int = 10,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, float | str]:
    """Median times in microseconds of alternating providers over about `seconds`, at least least_runs rounds.

    clock: measures a run in microseconds. The result of a provider that raises is its error message.
    """
    results: dict[str, float | str] = {}
    times: dict[str, list[float]] = {}
    for name, run in providers.items():
        try:
            for _ in range(2):  # compile, then fill the allocator's pools
                run()
            times[name] = []
        except Exception as error:  # not supporting these inputs is a result
            results[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
    end = now() + seconds
    rounds = 0
    while times and (rounds < least_runs or now() < end):
        for name, taken in times.items():
            taken.append(clock(providers[name]))
        rounds += 1
    results |= {name: statistics.median(taken) for name, taken in times.items()}
    return {name: results[name] for name in providers}
