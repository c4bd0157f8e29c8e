"""Precision of matrix products in training."""

import torch

from fasttfm.system.machine import multiplies_bfloat16


def resolved_precision(precision: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16; `auto` is bf16 if the device has bf16 units, else fp32.

    A CPU without them emulates bf16, several times slower.
    """
    if precision != "auto":
        return precision
    return "bf16" if multiplies_bfloat16(device) else "fp32"


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype for torch.autocast on the device; None: float32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(resolved_precision(precision, device))
