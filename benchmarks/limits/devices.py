"""Peak rates of the GPUs that the kernels are compiled for, as their vendors print them.

A floor computed from them is a time that the device cannot beat; what large products and copies sustain is less (an
H200: 790 of 989 TFLOP/s, 4.3 of 4.8 TB/s). Rates are dense, without the doubling for structured sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fasttfm.kernels.proof.costs import H200 as SUSTAINED_H200
from fasttfm.kernels.proof.costs import Machine

_HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What bounds a kernel on one GPU."""

    name: str
    chip: str
    """As in the compile matrix: sm_90, gfx942."""
    fp32: float
    """TFLOP/s of float32 multiply-adds outside matrix units."""
    half: float
    """TFLOP/s of float16 products with float32 sums where the chip has matrix units for it, else of packed float16."""
    tf32: float | None = None
    """TFLOP/s of TF32 products; None where the chip has none."""
    bandwidth: float
    """GB/s between the chip and its memory."""
    processors: int
    """Streaming multiprocessors or compute units."""
    source: str
    """Where the rates are printed, or what measured them."""

    def tflop_per_s(self, dtype: str) -> float:
        """The rate of matrix products of a dtype: float32, tf32, float16, bfloat16."""
        if dtype in _HALF:
            return self.half
        if dtype == "tf32" and self.tf32 is not None:
            return self.tf32
        if dtype in ("float32", "tf32"):
            return self.fp32
        raise ValueError(f"dtype {dtype!r}: one of float32, tf32, float16, bfloat16")

    def machine(self, dtype: str) -> Machine:
        """The device as kernels.costs counts with it."""
        return Machine(flops=self.tflop_per_s(dtype) * 1e12, bandwidth=self.bandwidth * 1e9)


_FIELDS = ("name", "chip", "fp32", "half", "tf32", "bandwidth", "processors", "source")
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("P100", "sm_60", 10.6, 21.2, None, 732, 56,
     "NVIDIA Tesla P100 data sheet, SXM2 (no matrix units; float16 two to an instruction)"),
    ("V100", "sm_70", 15.7, 125, None, 900, 80, "NVIDIA Tesla V100 data sheet, SXM2"),
    ("T4", "sm_75", 8.1, 65, None, 320, 40, "NVIDIA T4 product brief"),
    ("A100", "sm_80", 19.5, 312, 156, 2039, 108, "NVIDIA A100 data sheet, SXM, 80 GB"),
    ("RTX 3090", "sm_86", 35.6, 71, 35.6, 936, 82, "NVIDIA Ampere GA102 architecture whitepaper (float32 sums)"),
    ("RTX 4090", "sm_89", 82.6, 165.2, 82.6, 1008, 128, "NVIDIA Ada architecture whitepaper (float32 sums)"),
    ("H100", "sm_90", 67, 989, 494, 3350, 132, "NVIDIA H100 data sheet, SXM, half of the rates with sparsity"),
    ("H200", "sm_90", 67, 989, 494, 4800, 132, "NVIDIA H200 data sheet, SXM, half of the rates with sparsity"),
    ("B200", "sm_100", 80, 2250, 1100, 8000, 148, "NVIDIA Blackwell architecture technical brief, HGX B200"),
    ("RTX 5090", "sm_120", 104.8, 209.5, 104.8, 1792, 170,
     "NVIDIA RTX Blackwell architecture whitepaper (float32 sums)"),
    ("MI250X die", "gfx90a", 23.9, 191.5, None, 1638, 110,
     "AMD Instinct MI250X data sheet, one of its two dies, which are devices of their own to PyTorch"),
    ("MI300X", "gfx942", 163.4, 1307.4, 653.7, 5300, 304, "AMD Instinct MI300X data sheet"),
)  # fmt: skip

DEVICES: dict[str, Device] = {row[0]: Device(**dict(zip(_FIELDS, row))) for row in _ROWS}

H200_SUSTAINED = replace(
    DEVICES["H200"],
    name="H200 sustained",
    half=SUSTAINED_H200.flops / 1e12,
    bandwidth=SUSTAINED_H200.bandwidth / 1e9,
    source="published for large cuBLAS products and copies: what the plan's floors are computed from",
)
