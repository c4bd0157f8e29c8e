"""Launches a kernel repeatedly with a stand-in for an H200, and checks every launch that reaches the device."""

import sys

import pytest
import torch
from stand_in import Start, stand_in

from fasttfm.kernels import residual_add
from fasttfm.kernels.jit import Kernel
from fasttfm.kernels.parameter import Shape
from fasttfm.kernels.philox import Dropout


def main() -> int:
    kernel: Kernel = residual_add._add_dropped
    started: list[Start] = []
    stand_in("sm_90", started)
    run = kernel.run
    by_triton: list[tuple] = []
    kernel.run = lambda *args, **options: (by_triton.append(args), run(*args, **options))[1]
    x, seed = torch.zeros(33, 64, dtype=torch.bfloat16), torch.tensor([7])
    constants = {"ROWS": 16, "COLUMNS": 64, "num_warps": 4, "num_stages": 1}

    def arguments(x=x, seed=seed, site=0, M=32, N=64):
        return x, x, x, Dropout(seed, site, 26, 256 / 230), Shape(M, N)

    def again(*args, grid=(2, 1), **changed) -> tuple[bool, bool]:
        """Launches with arguments, which must arrive. Returns whether Triton was called and the kernel is a new one."""
        calls = len(by_triton)
        kernel[grid](*args, **(constants | changed))
        metadata, started_grid, values = started[-1]
        expected = {**dict(zip(kernel.arg_names, args)), **constants, **changed}
        assert started_grid == (*grid, 1)
        assert len(values) == len(kernel.arg_names)
        for name, value in zip(kernel.arg_names, values):
            assert value is expected[name] or value == expected[name], (name, value)
        return len(by_triton) > calls, metadata is not started[0].metadata

    y = x.float()
    assert again(*arguments()) == (True, False)
    for same in (arguments(), arguments(site=3, M=1), arguments(x=x[1:], seed=torch.tensor([8]))):
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
    kernel[2, 1](*arguments(), COLUMNS=16, ROWS=64, num_warps=4, num_stages=1)  # the same values in another order
    assert started[-1].metadata is not started[0].metadata
    assert started[-1].arguments[-2:] == (64, 16)
    odd = x.flatten()[1:]  # not aligned to 16 bytes
    assert again(*arguments(x=odd)) == (True, True)
    assert again(*arguments(x=odd, site=1, M=16)) == (True, True)
    assert started[-1].metadata is started[-2].metadata
    for wrong in ({"site": 1 << 31}, {"M": 1 << 31}, {"site": -(1 << 31) - 1}, {"N": 1 << 40}):
        with pytest.raises(ValueError, match="kernels take 32-bit integers"):
            again(*arguments(**wrong))
    assert again(*arguments()) == (False, False)
    print(f"{len(started)} launches, {len(by_triton)} of them by Triton")
    return 0


if __name__ == "__main__":
    sys.exit(main())
