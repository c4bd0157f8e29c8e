"""Somebody else's Triton kernel with a race, and the lines that find it without a GPU.

    python examples/check_your_kernel.py

The kernel sums each row, leaves the sums in memory and reads its neighbour's sum back. Nothing orders the programs, so
what is read back may not be there yet: right in Triton's interpreter, right on most runs on a device, and wrong.
"""

import torch
import triton
import triton.language as tl

from ptx_check import FaultyKernel, executed


@triton.jit
def neighbours(x, sums, out, N: tl.constexpr):
    row = tl.program_id(0)
    tl.store(sums + row, tl.sum(tl.load(x + row * N + tl.arange(0, N)), 0))
    neighbour = (row + 1) % tl.num_programs(0)
    tl.store(out + row, tl.load(sums + neighbour))


def main() -> None:
    x = torch.randn(8, 64)
    try:
        with executed("sm_80"):  # sm_60 to sm_90, sm_120
            sums, out = torch.zeros(8), torch.empty(8)
            neighbours[(8,)](x, sums, out, N=64)
    except FaultyKernel as error:
        print(error)


if __name__ == "__main__":
    main()
