"""The order of the channels of a model's residual stream.

The sinusoids of the paper alternate, sine and cosine; Marian has the same numbers with all sines first. A model
computes the same when all that reads and writes its stream is put into another order, so neither needs the other's
table.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_READERS = ("in_proj_weight", "linear1.weight", "embedding.weight", "output.weight")
_WRITERS = ("out_proj.weight", "out_proj.bias", "linear2.weight", "linear2.bias")


def halves_from_pairs(weights: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """The weights of a model whose positions alternate, for positions that have all sines first."""
    channels = torch.arange(width, device="cpu")
    return _ordered(weights, torch.cat([channels[0::2], channels[1::2]]))


def pairs_from_halves(weights: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """The weights of a model whose positions have all sines first, for positions that alternate."""
    return _ordered(weights, torch.arange(width, device="cpu").view(2, -1).T.reshape(-1))


def _ordered(weights: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Channel i of the new stream is channel order[i] of the old one."""
    changed = {}
    for name, weight in weights.items():
        if name.endswith(_READERS):
            changed[name] = weight[:, order]
        elif name.endswith(_WRITERS) or "norm" in name:
            changed[name] = weight[order]
        else:
            changed[name] = weight
    return changed
