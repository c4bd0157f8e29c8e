"""Tensor maps, by which sm_90 copies tiles of a tensor to shared memory, for kernels in Gluon.

A copy names the first element of its tile; elements outside of the tensor are filled with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.kernels.tiles.table import compiler


class Mapped(NamedTuple):
    """Memory with the map by which a kernel copies it; Triton's launcher reads it as a TensorDescriptor, whose checks
    take longer than a launch."""

    base: Tensor
    """Where it begins; a multiple of 16 bytes."""
    shape: tuple[int, ...]
    """Of the map, at most five numbers."""
    strides: tuple[int, ...]
    """In elements; multiples of 16 bytes but for the last, which is 1."""
    block: tuple[int, ...]
    """Shape of the tile that a copy brings."""
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    def described(self) -> Any:
        """Triton's TensorDescriptor, with which it compiles a kernel."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[self.base.dtype]
        layout = gl.NVMMASharedLayout.get_default_for(list(self.block), element)
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block), layout)


def usable() -> bool:
    """True if the installed Triton compiles this project's kernels in Gluon: from 3.7 on."""
    return compiler() >= (3, 7)
