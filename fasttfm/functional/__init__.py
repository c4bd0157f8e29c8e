"""Public functions: each chooses between a Triton kernel and plain PyTorch, and both compute what reference.py says."""

from fasttfm.functional.attention import attention, attention_weights

__all__ = [
    "attention",
    "attention_weights",
]

from fasttfm.functional.feed_forward import feed_forward
from fasttfm.functional.layer_norm import layer_norm, residual_add, residual_layer_norm

__all__ = ["feed_forward", "layer_norm", "residual_add", "residual_layer_norm"]
