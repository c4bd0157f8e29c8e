"""A driver that names a chip and starts nothing, for what can be told of launches on a machine without a device.

    stand_in("sm_90", started := [])
    layer_norm.layer_norm(x, weight, bias, 1e-5)    # tensors on the CPU; nothing is computed
    started[0].arguments

Triton binds the arguments and compiles for the chip as it does on a device, unless a cache hook keeps it from that; a
launcher then writes down what would be started. It needs a process in which Triton is not in its interpreter, and
that does nothing else.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fasttfm.kernels import launch
from fasttfm.kernels.chip import CHIPS, Chip
from fasttfm.kernels.jit import Kernel

_FIRST_DEVICE = 64
"""Above the numbers of devices that a machine has."""


class Start(NamedTuple):
    """A kernel that would have been started."""

    metadata: Any
    """Triton's, of the compiled kernel: name, num_warps, shared, ..."""
    grid: tuple[int, int, int]
    arguments: tuple
    """Of every parameter, constants included."""


class StandIn:
    """A driver with as much as a launch asks for. started: where launches are written down, if anywhere."""

    def __init__(self, chip: str, started: list[Start] | None = None) -> None:
        product = CHIPS[chip]
        self.chip = product
        self._device = _FIRST_DEVICE + list(CHIPS).index(chip)
        self._target = (
            GPUTarget("cuda", product.capability, 32) if product.capability else GPUTarget("hip", chip, product.warp)
        )
        self._started = started
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (binary, name, 32, 0, 1024),
            get_device_properties=lambda device: {
                "max_shared_mem": product.shared_memory,
                "multiprocessor_count": product.processors,
                "warpSize": product.warp,
            },
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """A number of the chip's own: Triton keeps by it what it has compiled."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        started = self._started

        def start(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments):
            if started is not None:
                started.append(Start(metadata, (x, y, z), arguments))

        return start


def stand_in(chip: str, started: list[Start] | None = None) -> None:
    """For the rest of the process kernels are compiled and launched as if on the chip. What is launched goes into
    `started`, where that is given. Every kernel file must have been imported."""
    install(StandIn(chip, started))


def install(stand_in: StandIn) -> Callable[[], None]:
    """Makes Triton and every kernel file that has been imported take the stand-in for their device. Returns what undoes
    it."""
    before = driver._active
    driver.set_active(stand_in)
    undo_chip = take_for_device(stand_in.chip)

    def undo() -> None:
        driver._active = before
        undo_chip()

    return undo


def take_for_device(product: Chip) -> Callable[[], None]:
    """Makes every kernel file that has been imported choose its tiles for a chip, and forget what it has launched.
    Returns what undoes it."""
    undo_chip = replace_everywhere("chip", launch.chip, lambda device: product)
    modules = [module for name, module in sys.modules.items() if name.startswith("fasttfm.")]
    launched = [(k, k._launched) for module in modules for k in vars(module).values() if isinstance(k, Kernel)]
    for kernel, _ in launched:
        kernel._launched = {}

    def undo() -> None:
        undo_chip()
        for kernel, known in launched:
            kernel._launched = known

    return undo


def replace_everywhere(name: str, old: Any, new: Any) -> Callable[[], None]:
    """Gives every module of fasttfm that has `old` under this name the new value. Returns what undoes it."""
    for path, module in list(sys.modules.items()):
        if path.startswith("fasttfm.") and getattr(module, name, None) is old:
            vars(module)[name] = new

    def undo() -> None:
        for module in list(sys.modules.values()):  # those that were imported meanwhile too
            if getattr(module, name, None) is new:
                vars(module)[name] = old

    return undo
