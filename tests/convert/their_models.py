"""Hugging Face models with random weights."""

from typing import Any

import torch


@torch.no_grad()
def randomized(model: Any) -> Any:
    """Add noise to all parameters, norms and biases included, and select eager attention."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation("eager")
    return model
