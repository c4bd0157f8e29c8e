"""Operators of StepLayers as kernel launches, bound to their buffers: a call only launches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fasttfm.kernels import layer_norm
from fasttfm.kernels.attention.ancestors import Ancestors
from fasttfm.kernels.attention.decode import Decode
from fasttfm.models.step_layers import Call, Norm, Operations


class KernelOperations(Operations):
    """Operations by kernels."""

    def norm(self, x: Tensor, residual: Tensor | None, norm: Norm, y: Tensor, s: Tensor | None) -> Call:
        """See Operations."""
        forward = layer_norm.Forward(x, residual)
        mean, rstd = torch.empty(2, len(x), dtype=torch.float32, device=x.device)
        dropout = None, 0, *forward.dropout
        return partial(
            forward.launch, x, None, residual, norm.weight, norm.bias, y, s, mean, rstd, dropout, norm.eps,
            forward.numbers,
        )  # fmt: skip

    def attend_to_ancestors(self, joint: Tensor, cache: Tensor, heads: int, out: Tensor) -> Call:
        """See Operations."""
        args = joint, cache, self.past.ancestors, self.past.position
        launch = Ancestors(*args, heads=heads, scale=(out.shape[1] // heads) ** -0.5)
        return partial(launch, *args, out)

    def attend_to_memory(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Call:
        """See Operations."""
        table, (_, heads, _, size) = self.past.sentence[:, None], keys.shape
        query, out = (x.view(len(table), -1, heads, size).transpose(1, 2) for x in (query, out))
        launch = Decode(query, keys, values, table, left=None, right=None, scale=size**-0.5)
        return partial(launch, query, keys, values, self.past.source_lengths, None, table, output=out)
