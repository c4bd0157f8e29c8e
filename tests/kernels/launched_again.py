"""Launches a kernel over and over as if on an H200, and checks what reaches the device each time. See stand_in.py.

Triton compiles here, for sm_90; its launcher writes down what it is given in place of starting anything.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import stand_in
import torch
from fasttfm.kernels import launch, residual_add
from fasttfm.kernels.compile_case import CHIPS
from fasttfm.kernels.jit import Kernel
from triton.runtime import driver

started: list[tuple] = []


class Launcher:
    """What a compiled kernel is started with."""

    def __init__(self, source, metadata) -> None:
        self.warps = metadata.num_warps

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments) -> None:
        started.append((self, (x, y, z), arguments))


class Driver(stand_in.StandInDriver):
    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda name, binary, shared, device: (binary, name, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32},
    )


def main() -> int:
    kernel: Kernel = residual_add._add_dropped
    driver.set_active(Driver("sm_90"))
    run = kernel.run
    by_triton: list[tuple] = []
    kernel.run = lambda *args, **options: (by_triton.append(args), run(*args, **options))[1]
    x, seed = torch.zeros(33, 64, dtype=torch.bfloat16), torch.tensor([7])
    constants = {"ROWS": 16, "COLUMNS": 64, "num_warps": 4, "num_stages": 1}

    def arguments(x=x, seed=seed, stream=0, M=32, N=64):
        return x, x, x, seed, stream, 6554, 1.1, M, N

    def again(*args, grid=(2, 1), **changed) -> tuple[bool, bool]:
        """Whether Triton was asked, and whether the kernel is another one than at first. The arguments must arrive."""
        asked = len(by_triton)
        kernel[grid](*args, **(constants | changed))
        launcher, place, given = started[-1]
        wanted = {**dict(zip(kernel.arg_names, args)), **constants, **changed}
        assert place == (*grid, 1)
        assert len(given) == len(kernel.arg_names)
        for name, value in zip(kernel.arg_names, given):
            assert value is wanted[name] or value == wanted[name], (name, value)
        return len(by_triton) > asked, launcher is not started[0][0]

    y = x.float()
    assert again(*arguments()) == (True, False)
    for same in (arguments(), arguments(stream=3, M=1), arguments(x=x[1:], seed=torch.tensor([8]))):
        assert again(*same) == (False, False), same
        assert again(*same, grid=(1, 3)) == (False, False), same
    for other, changed in (
        (arguments(x=y), {}),
        (arguments(seed=None), {}),
        (arguments(N=63), {}),
        (arguments(N=1), {}),
        (arguments(), {"ROWS": 32}),
        (arguments(), {"num_warps": 8}),
    ):
        assert again(*other, **changed) == (True, True), (other, changed)
        assert again(*other, **changed) == (False, True), (other, changed)
    odd = x.flatten()[1:]  # not aligned to 16 bytes
    assert again(*arguments(x=odd)) == (True, True)
    assert again(*arguments(x=odd)) == (True, True)
    assert again(*arguments()) == (False, False)
    print(f"{len(started)} launches, {len(by_triton)} of them by Triton")
    return 0


if __name__ == "__main__":
    launch.chip = lambda device: CHIPS["sm_90"]
    sys.exit(main())
