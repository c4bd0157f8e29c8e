"""Attention over a paged KV cache in plain PyTorch: the specification, as in reference.py."""

from typing import Any

import torch
from torch import Tensor

from fasttfm.reference import attention, attention_scores, rotary


def attention_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_lengths: Tensor,
    cache_starts: Tensor | None = None,
    block_table: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() over a KV cache, to which key and value (B, Hk, N, .) are first appended in place.

    Key t of sequence b is row t % page of page block_table[b, t // page] (Kwon et al. 2023, section 4.3) of key_cache
    (P, Hk, page, D) and value_cache (P, Hk, page, Dv); without a table, of page b. cache_lengths (B,): keys before the
    call; cache_starts (B,): the first visible key. The last query is aligned with the last key for causal, window and
    alibi_slopes; options are attention()'s. cos, sin: rotary() is applied to queries and keys; queries that see all
    keys share the position of the first new key. return_lse: also return the log-sum-exp of each row's scores and sink
    (B, H, L).
    """
    sees_all = not causal and window in (None, (None, None))
    outputs, sums = [], []
    for b, length in enumerate(cache_lengths.tolist()):
        q, new = query[b : b + 1], None if key is None else key[b : b + 1]
        place = torch.arange(length + (0 if key is None else key.shape[2]), device=query.device)  # (S,)
        pages = torch.full_like(place, b) if block_table is None else block_table[b, place // key_cache.shape[2]]
        rows = place % key_cache.shape[2]
        if cos is not None and sin is not None and new is not None:
            steps = torch.arange(q.shape[2], device=query.device)
            q = rotary(q, cos, sin, length + steps * (not sees_all), interleaved=interleaved)
            new = rotary(new, cos, sin, place[length:], interleaved=interleaved)
        if new is not None and value is not None:
            key_cache[pages[length:], :, rows[length:]] = new[0].transpose(0, 1)
            value_cache[pages[length:], :, rows[length:]] = value[b].transpose(0, 1)
        first = 0 if cache_starts is None else int(cache_starts[b])
        k, v = (x[pages[first:], :, rows[first:]].transpose(0, 1)[None] for x in (key_cache, value_cache))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        offset = k.shape[2] - q.shape[2]
        options |= {"causal": causal, "causal_offset": offset, "window": window, "alibi_slopes": slopes}
        outputs.append(attention(q, k, v, sinks=sinks, **options)[0])
        scores = attention_scores(q, k, **options)  # (1, H, L, S)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        sums.append(scores.logsumexp(-1))
    return (torch.cat(outputs), torch.cat(sums)) if return_lse else torch.cat(outputs)
