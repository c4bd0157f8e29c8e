"""Time of a scheduler's resident warps by their control codes: a bound that no unit sets.

Beside every instruction NVIDIA's compiler writes how many cycles the warp waits before its next one. One warp cannot go
through a loop faster than the sum; others fill the gaps, as many as registers and shared memory let reside. What a warp
waits for memory, which scoreboards tell and no count knows, comes on top.
"""

from ptx_check.ledger import units
from ptx_check.ledger.count import Usage
from ptx_check.ledger.resources import MULTIPROCESSORS, Resources, occupancy


def latency(chip: str, used: Usage, needs: Resources, warps: int) -> float:
    """Cycles of a scheduler for one warp's trip when the warps that can reside take turns. 0 for AMD's chips, whose
    assembly has no such codes, and for a kernel of which nothing can reside."""
    if chip not in units.RATES:
        return 0.0
    resident = occupancy(chip, needs, warps) * MULTIPROCESSORS[chip].warps / units.RATES[chip].schedulers
    return used.stall / resident if resident else 0.0
