"""Attention of a few new queries over cached keys, at inference: the step of a search.

There is nothing to mask but what a cache's padding hides, and no gradient. Where the operator would compute it in plain
PyTorch on a CPU, few keys cost more in calls than in arithmetic, and torch's own fused kernel is quicker; with many it
is slower. It takes one row after the other, so that a batch-invariant search always takes it.
"""

import torch
from torch import Tensor
from torch.nn import functional as nnF

from fasttfm.cpu.linear import batch_invariant
from fasttfm.cpu.thresholds import fixed
from fasttfm.functional.attention.dense import attention
from fasttfm.functional.backends import use_triton

_MOST = {torch.float32: fixed("step_keys_float32"), torch.bfloat16: fixed("step_keys_bfloat16")}
"""Numbers in the keys that torch's kernel is quicker with."""


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, key_lengths: Tensor | None = None) -> Tensor:
    """attention() of query (B, H, L, D) over keys and values (B, H, S, D), without gradient; (B, H, L, D).

    key_lengths (B,) int: keys at or past it are not attended; None: all are.
    """
    if (
        key_lengths is None
        and query.device.type == "cpu"
        and (keys.numel() <= _MOST.get(keys.dtype, 0) or batch_invariant(query))
        and keys.dtype == query.dtype
        and not torch.is_grad_enabled()
        and not use_triton(query.device)
    ):
        return nnF.scaled_dot_product_attention(query, keys, values)
    return attention(query, keys, values, key_lengths=key_lengths)
