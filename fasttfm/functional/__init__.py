"""Public functions: each chooses between a Triton kernel and plain PyTorch, and both compute what reference.py says."""

from fasttfm.functional._backend import backend
from fasttfm.functional.attention import attention, attention_weights
from fasttfm.functional.cross_entropy import cross_entropy, linear_cross_entropy
from fasttfm.functional.embedding import embed
from fasttfm.functional.feed_forward import feed_forward
from fasttfm.functional.layer_norm import layer_norm, residual_add, residual_layer_norm
from fasttfm.functional.random import draw_seed

__all__ = [
    "attention",
    "attention_weights",
    "backend",
    "cross_entropy",
    "draw_seed",
    "embed",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "residual_add",
    "residual_layer_norm",
]
