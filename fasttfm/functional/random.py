"""Where dropout seeds come from."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(device: torch.device | str | None = None) -> Tensor:
    """A fresh (1,) int64 seed from the device's default torch generator.

    torch.manual_seed therefore decides every dropout mask, and a captured CUDA graph draws anew at each replay because
    the seed lies in device memory.
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
