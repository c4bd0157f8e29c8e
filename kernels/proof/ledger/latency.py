"""Time of a scheduler's resident warps by their control codes: a bound that no unit sets.

Beside every instruction NVIDIA's compiler writes how many cycles the warp waits before its next one. One warp cannot go
through a loop faster than the sum; others fill the gaps, as many as registers and shared memory let reside. What a warp
waits for memory, which scoreboards tell and no count knows, comes on top.
"""

from __future__ import annotations

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.ledger import units
from fasttfm.kernels.proof.ledger.count import Usage
from fasttfm.kernels.proof.resources import Resources, occupancy

_WARPS = {75: 32, 86: 48, 89: 48, 120: 48}
"""That can reside on a multiprocessor, where they are not 64 (CUDA C++ programming guide, compute capabilities)."""


def latency(chip: Chip, used: Usage, needs: Resources, warps: int) -> float:
    """Cycles of a scheduler for one warp's trip when the warps that can reside take turns. 0 for AMD's chips, whose
    assembly has no such codes, and for a kernel of which nothing can reside."""
    if not chip.capability:
        return 0.0
    resident = occupancy(chip, needs, warps) * _WARPS.get(chip.capability, 64) / units.RATES[chip.capability].schedulers
    return used.stall / resident if resident else 0.0
