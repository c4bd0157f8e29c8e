"""flash_attn's softmax_lse and S_dmask, which it returns for testing."""

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import attention_weights
from fasttfm.functional.attention.arguments import check_heads, options_of
from fasttfm.functional.attention.call import Sequences, packed_again, padded
from fasttfm.functional.attention.products import log_sum_exp
from fasttfm.functional.dropout import wide
from fasttfm.functional.plan import without_autocast


@torch.no_grad()
def probabilities(
    query: Tensor, key: Tensor, lengths: Tensor | None, dropout_p: float, seed: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp (B, H, L) float32 of each row's scores, -inf without a key, and exp(scores - row maximum)
    (B, H, L, S), negative where dropped; empty without dropout. Neither has a gradient.

    query (B, H, L, D), key (B, Hk, S, D), lengths (B,); seed and options as in the attention() call. Recomputes Q K^T.
    """
    check_heads(query, key, lengths, None)
    shape, dtype = (*query.shape[:3], key.shape[2]), query.dtype
    query, key = query.to(wide(dtype)), key.to(wide(key.dtype))
    with without_autocast(query.device.type):
        lse = log_sum_exp(query, key, options_of(query, shape, key_lengths=lengths, **options))
    if seed is None:
        return lse, query.new_empty(0, dtype=dtype)
    options = {"key_lengths": lengths, **options}
    weights = attention_weights(query, key, **options)
    kept = attention_weights(query, key, dropout_p=dropout_p, seed=seed, **options)
    if not weights.numel():
        return lse, weights.to(dtype)
    weights = (weights / weights.amax(-1, keepdim=True)).nan_to_num(0.0)
    return lse, torch.where(kept != 0, weights, -weights).to(dtype)


@torch.no_grad()
def packed_probabilities(
    query: Tensor, key: Tensor, sequences: Sequences, dropout_p: float, seed: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """probabilities() of packed query (Tq, H, D) and key (Tk, Hk, D): log-sum-exps (H, Tq), and padded weights."""
    q = padded(query, sequences.cu_seqlens_q, sequences.max_seqlen_q)
    k = padded(key, sequences.cu_seqlens_k, sequences.max_seqlen_k)
    lse, weights = probabilities(q, k, sequences.cu_seqlens_k.diff(), dropout_p, seed, options)
    return packed_again(lse[..., None], sequences.cu_seqlens_q, len(query))[..., 0].T, weights
