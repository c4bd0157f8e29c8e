"""Peak rates of the GPUs that the kernels are compiled for, as their vendors print them.

A floor computed from them is a time that the device cannot beat; what large products and copies sustain is less (an
H200: 790 of 989 TFLOP/s, 4.3 of 4.8 TB/s). Rates are dense, without the doubling for structured sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="P100",
            chip="sm_60",
            fp32=10.6,
            half=21.2,
            bandwidth=732,
            processors=56,
            source="NVIDIA Tesla P100 data sheet, SXM2 (no matrix units; float16 two to an instruction)",
        ),
        Device(
            name="V100",
            chip="sm_70",
            fp32=15.7,
            half=125,
            bandwidth=900,
            processors=80,
            source="NVIDIA Tesla V100 data sheet, SXM2",
        ),
        Device(
            name="T4", chip="sm_75", fp32=8.1, half=65, bandwidth=320, processors=40, source="NVIDIA T4 product brief"
        ),
        Device(
            name="A100",
            chip="sm_80",
            fp32=19.5,
            half=312,
            tf32=156,
            bandwidth=2039,
            processors=108,
            source="NVIDIA A100 data sheet, SXM, 80 GB",
        ),
        Device(
            name="RTX 3090",
            chip="sm_86",
            fp32=35.6,
            half=71,
            tf32=35.6,
            bandwidth=936,
            processors=82,
            source="NVIDIA Ampere GA102 architecture whitepaper (float32 sums)",
        ),
        Device(
            name="RTX 4090",
            chip="sm_89",
            fp32=82.6,
            half=165.2,
            tf32=82.6,
            bandwidth=1008,
            processors=128,
            source="NVIDIA Ada architecture whitepaper (float32 sums)",
        ),
        Device(
            name="H100",
            chip="sm_90",
            fp32=67,
            half=989,
            tf32=494,
            bandwidth=3350,
            processors=132,
            source="NVIDIA H100 data sheet, SXM, half of the rates with sparsity",
        ),
        Device(
            name="H200",
            chip="sm_90",
            fp32=67,
            half=989,
            tf32=494,
            bandwidth=4800,
            processors=132,
            source="NVIDIA H200 data sheet, SXM, half of the rates with sparsity",
        ),
        Device(
            name="B200",
            chip="sm_100",
            fp32=80,
            half=2250,
            tf32=1100,
            bandwidth=8000,
            processors=148,
            source="NVIDIA Blackwell architecture technical brief, HGX B200",
        ),
        Device(
            name="RTX 5090",
            chip="sm_120",
            fp32=104.8,
            half=209.5,
            tf32=104.8,
            bandwidth=1792,
            processors=170,
            source="NVIDIA RTX Blackwell architecture whitepaper (float32 sums)",
        ),
        Device(
            name="MI250X die",
            chip="gfx90a",
            fp32=23.9,
            half=191.5,
            bandwidth=1638,
            processors=110,
            source="AMD Instinct MI250X data sheet, one of its two dies, which are devices of their own to PyTorch",
        ),
        Device(
            name="MI300X",
            chip="gfx942",
            fp32=163.4,
            half=1307.4,
            tf32=653.7,
            bandwidth=5300,
            processors=304,
            source="AMD Instinct MI300X data sheet",
        ),
    )
}

H200_SUSTAINED = replace(
    DEVICES["H200"],
    name="H200 sustained",
    half=SUSTAINED_H200.flops / 1e12,
    bandwidth=SUSTAINED_H200.bandwidth / 1e9,
    source="published for large cuBLAS products and copies: what the plan's floors are computed from",
)
