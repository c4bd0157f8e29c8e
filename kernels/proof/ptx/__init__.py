"""Executes the PTX of Triton kernels on a CPU, with checks that neither the interpreter nor a device makes."""

from fasttfm.kernels.proof.ptx.executed import Machine, executed
from fasttfm.kernels.proof.ptx.faults import KINDS, Fault, FaultyKernel, Unsupported

__all__ = ["KINDS", "Fault", "FaultyKernel", "Machine", "Unsupported", "executed"]
