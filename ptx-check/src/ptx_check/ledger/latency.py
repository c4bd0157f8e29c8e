"""Latency bound from the stall counts in NVIDIA's control codes.

The control code of each instruction has the cycles that the warp stalls before its next one. One warp cannot run a loop
iteration faster than their sum; other resident warps, limited by registers and shared memory, fill the stalls. Waits
for memory (scoreboards) come on top and are not counted.
"""

from ptx_check.ledger import units
from ptx_check.ledger.count import Usage
from ptx_check.ledger.resources import MULTIPROCESSORS, Resources, occupancy


def latency(chip: str, used: Usage, needs: Resources, warps: int) -> float:
    """Return the stall cycles of one warp divided by the resident warps per scheduler.

    0 for AMD chips, whose assembly has no control codes, and for a kernel with an occupancy of 0.
    """
    if chip not in units.RATES:
        return 0.0
    resident = occupancy(chip, needs, warps) * MULTIPROCESSORS[chip].warps / units.RATES[chip].schedulers
    return used.stall / resident if resident else 0.0
