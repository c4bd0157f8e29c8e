"""Public functions: each chooses between a Triton kernel and plain PyTorch, and both compute what reference.py says."""

from fasttfm.functional.attention import attention, attention_weights

__all__ = [
    "attention",
    "attention_weights",
]
