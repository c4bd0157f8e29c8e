"""Attention of a few new queries over cached keys, at inference: the step of a search.

There is nothing to mask but what a cache's padding hides, and no gradient. Where the operator would compute it in plain
PyTorch on a CPU, few keys cost more in calls than in arithmetic, and torch's own fused kernel is quicker; with many it
is slower. It takes one row after the other, so that a batch-invariant search always takes it.
"""

import torch
from torch import Tensor
from torch.nn import functional as nnF

from fasttfm.cpu.linear import batch_invariant
from fasttfm.functional.attention.dense import attention
from fasttfm.functional.backends import use_triton

STEP_KEYS = {torch.float32: 1 << 18, torch.bfloat16: 1 << 16}
"""Numbers in the keys up to which torch's kernel is taken. On two cores of an AMD EPYC with AVX-512 in float32 64 -> 18
us for 4 rows of 8 heads and 14 keys, 56 -> 26 for one row of 4 queries and 27 keys. A search's last bits depend on
it."""


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, key_lengths: Tensor | None = None) -> Tensor:
    """attention() of query (B, H, L, D) over keys and values (B, H, S, D), without gradient; (B, H, L, D).

    key_lengths (B,) int: keys at or past it are not attended; None: all are.
    """
    if (
        key_lengths is None
        and query.device.type == "cpu"
        and (keys.numel() <= STEP_KEYS.get(keys.dtype, 0) or batch_invariant(query))
        and keys.dtype == query.dtype
        and not torch.is_grad_enabled()
        and not use_triton(query.device)
    ):
        return nnF.scaled_dot_product_attention(query, keys, values)
    return attention(query, keys, values, key_lengths=key_lengths)
