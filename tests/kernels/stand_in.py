"""A stand-in for Triton's driver that names a chip and records launches instead of starting them.

    stand_in("sm_90", started := [])
    layer_norm.layer_norm(x, weight, bias, 1e-5)    # tensors on the CPU; nothing is computed
    started[0].arguments

Triton binds the arguments and compiles for the chip as on a device, unless a cache hook prevents it. Needs a process of
its own, without Triton's interpreter.
"""

from typing import Any, NamedTuple

from triton.runtime import driver

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.executed import take_for_device
from ptx_check.ledger.collect import Compiling


class Start(NamedTuple):
    """A recorded launch."""

    metadata: Any
    """Triton's metadata of the compiled kernel: name, num_warps, shared, ..."""
    grid: tuple[int, int, int]
    arguments: tuple
    """One per parameter, including constants."""


class StandIn(Compiling):
    def __init__(self, chip: str, started: list[Start]) -> None:
        super().__init__(chip)
        self._started = started

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def start(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments):
            self._started.append(Start(metadata, (x, y, z), arguments))

        return start


def stand_in(chip: str, started: list[Start]) -> None:
    """Compiles and launches as if on the chip from now on, and appends launches to `started`. Every kernel file must be
    imported before."""
    driver.set_active(StandIn(chip, started))
    take_for_device(CHIPS[chip])
