"""Permutation of the channels of a model's residual stream.

The paper's sinusoids alternate sine and cosine; Marian has the same values with all sines first. Permuting every weight
that reads or writes the residual stream leaves the model's output unchanged, so neither needs the other's table.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_READERS = ("in_proj_weight", "linear1.weight", "embedding.weight", "output.weight")
_WRITERS = ("out_proj.weight", "out_proj.bias", "linear2.weight", "linear2.bias")


def halves_from_pairs(weights: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Convert weights from alternating sinusoids to all sines first."""
    channels = torch.arange(width, device="cpu")
    return _ordered(weights, torch.cat([channels[0::2], channels[1::2]]))


def pairs_from_halves(weights: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Convert weights from all sines first to alternating sinusoids."""
    return _ordered(weights, torch.arange(width, device="cpu").view(2, -1).T.reshape(-1))


def _ordered(weights: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Permute the channels: channel i of the result is channel order[i]."""
    result = dict(weights)
    for name, weight in weights.items():
        if name.endswith(_READERS):
            result[name] = weight[:, order]
        elif name.endswith(_WRITERS) or "norm" in name:
            result[name] = weight[order]
    return result
