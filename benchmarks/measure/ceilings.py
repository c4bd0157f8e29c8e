"""What this device sustains, measured in the run that it is compared with: a copy for bytes, a large product for FLOPs.

Not the data sheet's peaks: a share of these ceilings is what was left on the table on this very machine, at these
clocks. Both are the best of several runs, so that a share above 1 would be a fault and not a lucky run.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.measure.case import Clock, Setting
from benchmarks.measure.clocks import EventClock, HostClock, last_level_cache
from fasttfm.kernels.proof.costs import Machine

_RUNS = 10


def of(setting: Setting) -> Machine:
    """Bytes a second of a copy, counted as read and written, and FLOP/s of a square product in the setting's dtype.

    By the clock that the device's kernels are timed with.
    """
    clock: Clock = EventClock(setting.device) if setting.on_gpu else HostClock(setting.device)
    smoke = setting.level == "smoke"
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    largest = (1 << 29) if setting.on_gpu else (2 << 20 if smoke else last_level_cache())
    source = torch.randint(0, 127, (largest,), dtype=torch.int8, device=setting.device, generator=generator)
    target = torch.empty_like(source)
    bytes_per_s = 0.0
    for part in (1, 4, 16):  # what is written last may stay in the cache, and does so in a kernel of that size too
        copy = partial(target[: largest // part].copy_, source[: largest // part])
        bytes_per_s = max(bytes_per_s, 2e6 * (largest // part) / min(clock.microseconds(copy) for _ in range(_RUNS)))
    size = 8192 if setting.on_gpu else (256 if smoke else 1536)
    one, other = (
        torch.randn(size, size, dtype=torch.float32, device=setting.device, generator=generator).to(setting.dtype)
        for _ in range(2)
    )
    product = min(clock.microseconds(partial(torch.mm, one, other)) for _ in range(_RUNS))
    return Machine(flops=2 * size**3 / product * 1e6, bandwidth=bytes_per_s)
