"""The type of a run's matrix products, and what `auto` stands for on a device."""

import torch

from fasttfm.system.machine import multiplies_bfloat16

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolved_precision(precision: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16: what was asked for, and for `auto` bf16 where the device has units for it, else fp32.

    A processor without them computes bf16 by way of fp32, which takes several times as long.
    """
    if precision != "auto":
        return precision
    return "bf16" if multiplies_bfloat16(device) else "fp32"


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast is to cast to on the device; None: products stay in float32."""
    return _AUTOCAST[resolved_precision(precision, device)]
