"""Peak rates of the GPUs that the kernels are compiled for, as their vendors print them.

A floor computed from them is a time that the device cannot beat; what large products and copies sustain is less (an
H200: 790 of 989 TFLOP/s, 4.3 of 4.8 TB/s). Rates are dense, without the doubling for structured sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fasttfm.kernels.proof.costs import H200 as SUSTAINED_H200
from fasttfm.kernels.proof.costs import Machine
from fasttfm.parsing import parse_yaml

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


_TABLE = parse_yaml((Path(__file__).parent / "devices.yaml").read_bytes())
DEVICES = {name: Device(name=name, **rates) for name, rates in _TABLE.items()}

H200_SUSTAINED = replace(
    DEVICES["H200"],
    name="H200 sustained",
    half=SUSTAINED_H200.flops / 1e12,
    bandwidth=SUSTAINED_H200.bandwidth / 1e9,
    source="published for large cuBLAS products and copies: what the plan's floors are computed from",
)
