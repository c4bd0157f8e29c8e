"""Tensor maps for Gluon kernels: the descriptors with which TMA on sm_90 copies tiles to shared memory.

A copy gives the coordinates of the tile's first element; elements outside the tensor are filled with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.kernels.tiles.table import compiler


class Mapped(NamedTuple):
    """Memory and its tensor map; stands in for Triton's TensorDescriptor at a launch, because the latter's checks take
    longer than a launch."""

    base: Tensor
    """Tensor at whose address the map begins; aligned to 16 bytes."""
    shape: tuple[int, ...]
    """Shape of the map, at most five dimensions."""
    strides: tuple[int, ...]
    """In elements; multiples of 16 bytes, except the last, which is 1."""
    block: tuple[int, ...]
    """Shape of the tile of a copy."""
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    def described(self) -> Any:
        """Return the TensorDescriptor for which Triton compiles a kernel."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[self.base.dtype]
        layout = gl.NVMMASharedLayout.get_default_for(list(self.block), element)
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block), layout)


def usable() -> bool:
    """Return whether the installed Triton compiles this project's Gluon kernels: from 3.7 on."""
    return compiler() >= (3, 7)
