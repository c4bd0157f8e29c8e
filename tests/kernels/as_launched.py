"""Launches kernels with a stand-in for an H200, checks every launch that reaches the device, and prints JSON.

The stand-in for Triton's driver names a chip and records launches instead of starting them. Triton binds the arguments
and compiles for the chip as on a device.
"""

import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is imported
sys.path.insert(0, str(Path(__file__).parents[2] / "ptx-check" / "tests" / "kernels"))

import pytest
import torch
from gluon_kernels import descriptor, product
from triton.runtime import driver

from fasttfm.kernels.attention import forward
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.parameter import Shape
from fasttfm.kernels.philox import Dropout
from fasttfm.kernels.proof import budgets, compiling
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.executed import take_for_device
from fasttfm.kernels.proof.ledger import counted, report
from fasttfm.kernels.residual_add import _add_dropped as kernel
from ptx_check.ledger.collect import Compiling

SM_90 = CHIPS["sm_90"]
GLUON = {"REGISTERS": True, "CONSUMERS": 160, "PRODUCER": 24, "FAULT": ""}
CASE = CompileCase(
    kernel=product,
    name="product/128x64x64w8s2",
    dtype="bf16",
    arguments={"a": "map bf16 64x64", "b": "map bf16 64x64", "out": "*fp32", "N": "i32:16", "K": "i32:16", **GLUON},
    num_warps=4,
    num_stages=2,
    matrix_product=True,
)
STARTED: list[tuple] = []
"""(metadata, grid, arguments with constants) of every launch."""


class StandIn(Compiling):
    def launcher_cls(self, source, metadata):
        def start(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments):
            STARTED.append((metadata, (x, y, z), arguments))

        return start


def again_and_again() -> dict[str, object]:
    """A cached kernel is started with the arguments of each launch."""
    run, by_triton = kernel.run, []
    kernel.run = lambda *args, **options: (by_triton.append(args), run(*args, **options))[1]
    x, seed = torch.zeros(33, 64, dtype=torch.bfloat16), torch.tensor([7])
    constants = {"ROWS": 16, "COLUMNS": 64, "num_warps": 4, "num_stages": 1}

    def arguments(x=x, seed=seed, site=0, M=32, N=64):
        return x, x, x, Dropout(seed, site, 26, 256 / 230), Shape(M, N)

    def again(*args, grid=(2, 1), **changed) -> tuple[bool, bool]:
        """Launches with arguments, which must arrive. Returns whether Triton was called and the kernel is a new one."""
        calls = len(by_triton)
        kernel[grid](*args, **(constants | changed))
        metadata, started_grid, values = STARTED[-1]
        expected = {**dict(zip(kernel.arg_names, args)), **constants, **changed}
        assert started_grid == (*grid, 1)
        for name, value in zip(kernel.arg_names, values, strict=True):
            assert value is expected[name] or value == expected[name], (name, value)
        return len(by_triton) > calls, metadata is not STARTED[0][0]

    assert again(*arguments()) == (True, False)
    for same in (arguments(), arguments(site=3, M=1), arguments(x=x[1:], seed=torch.tensor([8]))):
        assert again(*same) == (False, False), same
        assert again(*same, grid=(1, 3)) == (False, False), same
    for other, changed in (
        (arguments(x=x.float()), {}),
        (arguments(seed=None), {}),
        (arguments(N=63), {}),
        (arguments(N=1), {}),
        (arguments(), {"ROWS": 32}),
        (arguments(), {"num_warps": 8}),
    ):
        assert again(*other, **changed) == (True, True), (other, changed)
        assert again(*other, **changed) == (False, True), (other, changed)
    kernel[2, 1](*arguments(), COLUMNS=16, ROWS=64, num_warps=4, num_stages=1)  # the same values in another order
    assert STARTED[-1][0] is not STARTED[0][0]
    assert STARTED[-1][2][-2:] == (64, 16)
    odd = x.flatten()[1:]  # not aligned to 16 bytes
    assert again(*arguments(x=odd)) == (True, True)
    assert again(*arguments(x=odd, site=1, M=16)) == (True, True)
    assert STARTED[-1][0] is STARTED[-2][0]
    for wrong in ({"site": 1 << 31}, {"M": 1 << 31}, {"site": -(1 << 31) - 1}, {"N": 1 << 40}):
        with pytest.raises(ValueError, match="kernels take 32-bit integers"):
            again(*arguments(**wrong))
    assert again(*arguments()) == (False, False)
    return {"launches": len(STARTED), "by Triton": len(by_triton)}


def as_a_case(result: counted.Counted) -> dict[str, object]:
    """A warp-specialized kernel compiles as a case, counted before any launch, as it is launched."""
    a, b = torch.empty(128, 320, dtype=torch.bfloat16), torch.empty(320, 64, dtype=torch.bfloat16)
    given = descriptor(a, [64, 64]), descriptor(b, [64, 64]), torch.empty(128, 64), 64, 320
    product[1, 1](*given, **GLUON, num_warps=4, num_stages=2)
    launched, listed = STARTED[-1][0], compiling.compiled(SM_90, CASE).metadata._asdict()
    return {
        "registers": result.resources.registers,
        "matrix": result.resources.matrix,
        "broken": budgets.broken_rules(SM_90, CASE, result.resources, result.count.loops),
        "loops": [loop.tensor for loop in result.count.loops],
        "orders": result.count.orders,
        "counted again": counted.of_case(SM_90, CASE) == result,
        "sources": [name in str(counted.source_of(forward._forward)) for name in ("def hide(", "1.4426", "at 0x", "#")],
        "as launched": all(getattr(launched, name) == value for name, value in listed.items() if name != "hash"),
        "last cells": [
            line.rpartition("%")[2].strip() for line in report.table([(SM_90, CASE, result)]).splitlines()[1:]
        ],
    }


if __name__ == "__main__":
    result = counted.of_case(SM_90, CASE)
    driver.set_active(StandIn("sm_90"))  # from now on, with every kernel file imported
    take_for_device(SM_90)
    print(json.dumps({"again": again_and_again(), "gluon": as_a_case(result)}))
