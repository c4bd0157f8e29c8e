"""flash_attn's functions (version 2 signatures) on our operators, with dropout, on every device.

    q (B, L, H, D), k and v (B, S, Hk, D), H a multiple of Hk; packed: (T, H, D) with cu_seqlens (B + 1,)

The last query is aligned with the last key for causal, windows and ALiBi, and a query that sees no key gives zeros.
Dropout applies whenever dropout_p is not 0, as in flash_attn, and may be combined with softcap. Outputs are
deterministic; gradients are with deterministic=True, or if no table lists the call for cuDNN. With return_attn_probs a
function returns (output, softmax_lse, S_dmask), see probabilities().
Source: Dao, "FlashAttention-2", 2023, and the package's interface.
"""

from operator import index
from typing import Any

from torch import Tensor

from fasttfm.compat.shared import (
    Window,
    check_heads,
    check_rank,
    packed_probabilities,
    probabilities,
    scoring,
    surplus_of,
    used_rows,
)
from fasttfm.functional import attention, attention_with_cache, draw_seed, varlen_attention
from fasttfm.functional.attention.call import Sequences
from fasttfm.functional.record import WHOLE
from fasttfm.functional.signature import is_flag, names_arguments

_OWN = {"query": "q", "key": "k", "value": "v", "window": "window_size", "scale": "softmax_scale"}
"""flash_attn's argument names by functional's."""
Result = Tensor | tuple[Tensor, Tensor, Tensor]


@names_arguments(**_OWN)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """softmax(Q K^T * softmax_scale) V: (B, L, H, D). Raises ValueError for unsupported arguments."""
    name = "flash_attn_func"
    is_flag("deterministic", deterministic)
    is_flag("return_attn_probs", return_attn_probs)
    check_rank(name, 4, q=q, k=k, v=v)
    check_heads(name, q=q, k=k, v=v)
    lengths = q.shape[1], k.shape[1]
    options: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap}
    options |= scoring(name, causal, window_size, lengths, alibi_slopes, lengths[1] - lengths[0])
    seed = draw_seed(q.device) if dropout_p else None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output = attention(q, k, v, dropout_p=dropout_p, seed=seed, deterministic=deterministic, **options).transpose(1, 2)
    return (output, *probabilities(q, k, None, dropout_p, seed, options)) if return_attn_probs else output


@names_arguments(flash_attn_func="flash_attn_qkvpacked_func", q="qkv", k="qkv", v="qkv")
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func() on qkv (B, L, 3, H, D)."""
    check_rank("flash_attn_qkvpacked_func", 5, 3, qkv=qkv)
    q, k, v = qkv.unbind(2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


@names_arguments(flash_attn_func="flash_attn_kvpacked_func", k="kv", v="kv")
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func() on kv (B, S, 2, Hk, D)."""
    check_rank("flash_attn_kvpacked_func", 5, 2, kv=kv)
    k, v = kv.unbind(2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


@names_arguments(**_OWN)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """flash_attn_func() on packed sequences: q (Tq, H, D), k and v (Tk, Hk, D), cu_seqlens (B + 1,) int32; (Tq, H, D).

    max_seqlen may be an integer tensor (), which the host waits for. block_table (B, pages per sequence): k and v are
    pages (P, page, Hk, D), of any size. Their rows are packed by a copy, and gradients pass; flash_attn_with_kvcache()
    reads pages in place.
    """
    name = "flash_attn_varlen_func"
    max_seqlen_q, max_seqlen_k = (index(x) if isinstance(x, Tensor) else x for x in (max_seqlen_q, max_seqlen_k))
    is_flag("deterministic", deterministic)
    is_flag("return_attn_probs", return_attn_probs)
    check_rank(name, 3, q=q)
    check_rank(name, 3 if block_table is None else 4, k=k, v=v)
    check_heads(name, q=q, k=k, v=v)
    if block_table is not None:
        check_rank(name, 1, cu_seqlens_q=cu_seqlens_q)
        check_rank(name, 2, block_table=block_table)
        k, v, cu_seqlens_k = used_rows(name, k, v, len(cu_seqlens_q) - 1, cu_seqlens_k, None, block_table, max_seqlen_k)
    lengths, surplus = (max_seqlen_q, max_seqlen_k), surplus_of(cu_seqlens_q, cu_seqlens_k)
    options: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap}
    options |= scoring(name, causal, window_size, lengths, alibi_slopes, surplus)
    seed = draw_seed(q.device) if dropout_p else None
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, *lengths)
    output = varlen_attention(q, k, v, *sequences, dropout_p=dropout_p, seed=seed, **options)
    return (output, *packed_probabilities(q, k, sequences, dropout_p, seed, options)) if return_attn_probs else output


@names_arguments(
    flash_attn_varlen_func="flash_attn_varlen_qkvpacked_func", q="qkv", k="qkv", v="qkv",
    cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens", max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen",
)  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func() on qkv (T, 3, H, D)."""
    check_rank("flash_attn_varlen_qkvpacked_func", 4, 3, qkv=qkv)
    q, k, v = qkv.unbind(1)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


@names_arguments(flash_attn_varlen_func="flash_attn_varlen_kvpacked_func", k="kv", v="kv")
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func() on q (Tq, H, D) and kv (Tk, 2, Hk, D)."""
    check_rank("flash_attn_varlen_kvpacked_func", 4, 2, kv=kv)
    k, v = kv.unbind(1)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


@names_arguments(
    **_OWN, key_cache="k_cache", value_cache="v_cache", cache_lengths="cache_seqlens", cache_starts="cache_leftpad",
    cos="rotary_cos", sin="rotary_sin", interleaved="rotary_interleaved",
    attention_with_cache="flash_attn_with_kvcache", return_lse="return_softmax_lse",
)  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, L, H, D) over k_cache and v_cache (B, S, Hk, D); (B, L, H, D), without gradients.

    k and v (B, N, Hk, D) are first appended in place at cache_seqlens. block_table (B, pages per sequence): the caches
    are pages (P, page, Hk, D), of any size; cache_batch_idx (B,): each sequence's row of the caches. The last query is
    aligned with the last key, also for windows and ALiBi. num_splits is ignored. With return_softmax_lse also returns
    the log-sum-exp (B, H, L) float32 of each row's scores, -inf without a key. Raises ValueError for arguments that do
    not agree, and for lengths and pages outside the cache.
    """
    name = "flash_attn_with_kvcache"
    new = {} if k is None or v is None else {"k": k, "v": v}
    check_rank(name, 4, None, q=q, k_cache=k_cache, v_cache=v_cache, **new)
    check_heads(name, q=q, k_cache=k_cache, v_cache=v_cache, **new)
    if cache_batch_idx is not None:
        fits = cache_batch_idx.shape == q.shape[:1] and cache_batch_idx.device == q.device
        if block_table is not None or cache_batch_idx.dtype not in WHOLE or not fits:
            raise ValueError(
                f"{name}: cache_batch_idx is {cache_batch_idx.dtype} {tuple(cache_batch_idx.shape)} on "
                f"{cache_batch_idx.device}: int32 or int64 ({len(q)},) on {q.device} is needed, and no block_table"
            )
        block_table = cache_batch_idx[:, None]
    if window_size is not None:
        window_size = tuple(None if side == -1 else side for side in window_size)  # type: ignore[assignment]
    result = attention_with_cache(
        q.transpose(1, 2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        None if k is None else k.transpose(1, 2),
        None if v is None else v.transpose(1, 2),
        cache_lengths=cache_seqlens,
        cache_starts=cache_leftpad,
        block_table=block_table,
        cos=rotary_cos,
        sin=rotary_sin,
        interleaved=rotary_interleaved,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        scale=softmax_scale,
        return_lse=return_softmax_lse,
    )
    return (result[0].transpose(1, 2), result[1]) if isinstance(result, tuple) else result.transpose(1, 2)
