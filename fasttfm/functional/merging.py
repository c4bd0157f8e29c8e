"""What a model has to know before it merges launches: what the kernels leave in parts, and what a norm adds.

A gradient that a kernel sums over rows is left as one partial sum a program. The node that reads all parameters
(parameters.py) adds up all of them in one launch, where each alone would be a launch. These functions tell how many
parts there will be. None, or False, wherever the switch is off: a model then reads every parameter by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fasttfm.functional.attention import joint
from fasttfm.functional.feed_forward import bias1_programs
from fasttfm.functional.layer_norm import adds_x_bias, parameter_programs

_on = True


@contextlib.contextmanager
def merged_launches(on: bool) -> Iterator[None]:
    """Whether models merge launches inside the block, in the whole process; they do by default.

    Off, a training step has more launches and the same gradients up to the rounding of their sums.
    """
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def norm_adds_bias(x: Tensor) -> bool:
    """Whether residual_layer_norm() adds x_bias to x in passing, so that the product before it leaves its bias out."""
    return _on and adds_x_bias(x)


def norm_parts(rows: int, width: int, device: torch.device) -> int | None:
    """Parts of the gradients of a norm's parameters over (rows, width); None where they come summed."""
    return parameter_programs(rows, width, device) if _on else None


def attention_bias_parts(batch: int, keys: int, head_size: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Parts of the gradients of joint_attention()'s biases; None where attention does not sum them.

    batch: rows, or packed sequences; keys: of the longest; dtype: of the projections.
    """
    return joint.bias_programs(batch, keys, head_size, dtype, device) if _on else None


def feed_forward_bias_parts(rows: int, hidden: int, out: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Parts of the gradient of bias1 for x (rows, N), weight1 (hidden, N), weight2 (out, hidden), products in dtype."""
    return bias1_programs(rows, hidden, out, dtype, device) if _on else None
