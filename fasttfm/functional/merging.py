"""Facts that a model needs to merge launches: what the kernels leave in parts, and what a norm adds.

A gradient that a kernel sums over rows is left as one partial sum a program. The node that reads all parameters
(parameters.py) adds up all of them in one launch, where each alone would be a launch. These functions tell how many
parts there will be.
"""

import torch
from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention import routes
from fasttfm.functional.residual_norm import norm_route


def norm_adds_bias(x: Tensor) -> bool:
    """Return whether residual_layer_norm() adds x_bias to x, so that the product before it leaves its bias out."""
    return norm_route(backends.current, x) == "triton"


def norm_parts(rows: int, width: int, device: torch.device) -> int | None:
    """Parts of the gradients of a norm's parameters over (rows, width), which it then takes as read_parameters()
    repeats them; None where they come summed."""
    from fasttfm.kernels import layer_norm as kernel

    return kernel.sum_programs(rows, width, device)


def attention_bias_parts(batch: int, keys: int, head_size: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Parts of the gradients of joint_attention()'s biases; None where attention does not sum them.

    batch: rows, or packed sequences; keys: of the longest; dtype: of the projections.
    """
    like = torch.empty(0, head_size, dtype=dtype, device=device)
    return batch if routes.decide(backends.current, like, like, keys) == "short" else None


def feed_forward_bias_parts(rows: int, hidden: int, out: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Parts of the gradient of bias1 for x (rows, N), weight1 (hidden, N), weight2 (out, hidden), products in dtype."""
    from fasttfm.kernels import product as kernel

    return kernel.sum_programs(rows, hidden, out, dtype, device, "fused" if backends.current == "triton" else "table")
