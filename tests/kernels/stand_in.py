"""Triton's launch path up to a driver that names a chip and starts nothing.

    stand_in("sm_90", started := [])
    layer_norm.layer_norm(x, weight, bias, 1e-5)    # tensors on the CPU; nothing is computed
    started[0].arguments

Triton binds the arguments and compiles for the chip as it does on a device, unless a cache hook keeps it from that; a
launcher then writes down what would be started. It needs a process in which Triton is not in its interpreter, and
that does nothing else.
"""

from typing import Any, NamedTuple

from triton.runtime import driver

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.executed import take_for_device
from ptx_check.ledger.collect import Compiling


class Start(NamedTuple):
    """A kernel that would have been started."""

    metadata: Any
    """Triton's, of the compiled kernel: name, num_warps, shared, ..."""
    grid: tuple[int, int, int]
    arguments: tuple
    """Of every parameter, constants included."""


class StandIn(Compiling):
    def __init__(self, chip: str, started: list[Start]) -> None:
        super().__init__(chip)
        self._started = started

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def start(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments):
            self._started.append(Start(metadata, (x, y, z), arguments))

        return start


def stand_in(chip: str, started: list[Start]) -> None:
    """For the rest of the process kernels are compiled and launched as if on the chip; what is launched goes into
    `started`. Every kernel file must have been imported."""
    driver.set_active(StandIn(chip, started))
    take_for_device(CHIPS[chip])
