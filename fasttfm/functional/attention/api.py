"""Fused attention, softmax(Q K^T * scale) V: on heads, on packed projections and on packed sequences.

A model projects queries, keys and values at once, to (B, L, 3, H, D). Passed to attention() as three views, autograd
copies their three gradients together; packed_qkv_attention() allocates one gradient, and the kernels write into it.
The varlen_ functions take unpadded sequences, whose lengths the host never reads.
"""

from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention.arguments import (
    Causal,
    check_heads,
    check_value,
    checked_sequences,
    options_of,
    without_bias,
)
from fasttfm.functional.attention.call import Sequences, Window
from fasttfm.functional.attention.operator import attend
from fasttfm.functional.attention.operator import attention as operator
from fasttfm.functional.dropout import LEAST_P, draw_seed
from fasttfm.functional.signature import is_flag, names_arguments


@names_arguments
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: Causal = False,
    causal_offset: int | Tensor = 0,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
    deterministic: bool = False,
) -> Tensor:
    """softmax(Q K^T * scale) V with masking and dropout fused (Vaswani et al. 2017, equation 1).

    query (B, H, L, D), key (B, Hk, S, D), value (B, Hk, S, Dv); float32, float16 or bfloat16, one dtype, any strides.
    Hk divides H: each key head serves H / Hk neighbouring query heads, without a copy (grouped-query attention, Ainslie
    et al. 2023; multi-query attention if Hk is 1).
    key_lengths (B,) int: keys at or past it are not attended. mask, broadcastable to (B, H, L, S): bool, True where
    the query may attend, or floats that are added to the scaled scores and may take a gradient; values below -2.36e38
    hide a key, as -inf does.
    causal: query i sees keys up to the diagonal, key i + causal_offset; the offset is an int or (B,) int per batch row.
    causal="bottom_right" aligns the last query with the last key, that of key_lengths if given.
    window (left, right): keys before and past the diagonal that a query sees, None for no bound (Beltagy et al. 2020);
    kernels skip tiles outside it.
    softcap, above 0: scores become softcap * tanh(score / softcap), before anything is added (Gemma 2, 2024).
    alibi_slopes (H,) or (B, H): slope times a key's distance from the diagonal is subtracted (Press et al. 2022).
    sinks (H,): an extra score per head that takes weight from a row's keys and has no value: no weight if -inf, all if
    inf; may take a gradient (Xiao et al. 2024; gpt-oss). All of these combine. A query with no key to attend gives
    zeros and passes no gradient.
    dropout_p in [0, 1], on the weights; seed (1,) int64 on the same device, drawn from torch's generator if None;
    site, below 2^31, tells the calls of one model apart. scale defaults to D^-0.5.
    deterministic: bitwise reproducible gradients: cuDNN, which sums by atomics, is never used.
    Returns (B, H, L, Dv) in memory order (B, L, H, Dv), so that .transpose(1, 2).flatten(2) copies nothing.
    Raises ValueError for shapes, dtypes or numbers that do not agree, TypeError for a window that is not two numbers.
    """
    if key is None or value is None:
        raise TypeError("key and value must be tensors")
    if deterministic is not False:
        is_flag("deterministic", deterministic)
    seed = None if dropout_p <= LEAST_P else draw_seed(query.device) if seed is None else seed
    if scale is None:
        scale = (query.shape[-1] or 1) ** -0.5
    if mask is not None and type(mask) is not Tensor:
        mask, causal, causal_offset = without_bias(mask, causal, causal_offset, query.shape[2], key.shape[2])
    if (
        window is not None or softcap != 0.0 or alibi_slopes is not None or sinks is not None
        or type(causal) is not bool or type(causal_offset) is not int
    ):  # fmt: skip
        check_heads(query, key, key_lengths, mask)
        check_value(query, key, value)
        options = options_of(
            query, (*query.shape[:3], key.shape[2]), key_lengths=key_lengths, mask=mask, causal=causal,
            causal_offset=causal_offset, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_p=dropout_p, scale=scale, seed=seed, site=site,
        )  # fmt: skip
        return attend(query, key, value, options, backends.current)  # cuDNN takes none of these
    backend = "triton" if deterministic and backends.current == "auto" and query.is_cuda else backends.current
    return operator(
        query, key, value, key_lengths, None, None, mask, None, None, None, seed, 0, 0, causal, causal_offset, -1, 0.0,
        0, dropout_p, scale * 1.0, site, False, False, backend,
    )[0]  # fmt: skip


@names_arguments
def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: Causal = False,
    causal_offset: int | Tensor = 0,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """The weights of attention(), dropout applied: softmax(Q K^T * scale), (B, H, L, S), computed in float32 and
    rounded to query's dtype.

    Arguments, errors and gradients are attention()'s: attention_weights(q, k, ...) @ v equals attention(q, k, v, ...)
    if Hk is H. The weight of a sink is left out: its row sums to less than 1.
    """
    if mask is not None and type(mask) is not Tensor:
        mask, causal, causal_offset = without_bias(mask, causal, causal_offset, query.shape[2], key.shape[2])
    check_heads(query, key, key_lengths, mask)
    options = options_of(
        query, (*query.shape[:3], key.shape[2]), key_lengths=key_lengths, mask=mask, causal=causal,
        causal_offset=causal_offset, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, scale=scale, seed=seed, site=site,
    )  # fmt: skip
    # detached: compiled autograd cannot add the keys' gradient to the values', which is None
    return attend(query, key, key.detach(), options, backends.current, only_weights=True)


@names_arguments
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal = False,
    causal_offset: int | Tensor = 0,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """attention() over packed sequences: queries and keys of all sequences concatenated, without padding.

    query (Tq, H, D), key (Tk, Hk, D), value (Tk, Hk, Dv); float32, float16 or bfloat16, one dtype, any strides; H a
    multiple of Hk, as in attention().
    cu_seqlens_q, cu_seqlens_k (B + 1,) int32 or int64 on the same device: the start of each sequence, and the end of
    the last. max_seqlen_q, max_seqlen_k: upper bounds of the sequence lengths. The values in cu_seqlens are checked on
    a CPU; on a GPU, where the check would wait for the device, only with FASTTFM_CHECK=1. Rows past the last sequence
    are padding to a fixed token budget and give zeros.
    Other arguments are attention()'s; causal="bottom_right" uses each sequence's own lengths, and the dropout mask is
    that of the padded batch. There is no mask: pad and call attention() for one. Returns (Tq, H, Dv). Raises ValueError
    for shapes, dtypes or numbers that do not agree, TypeError for a window that is not two numbers.
    """
    if key is None or value is None:
        raise TypeError("key and value must be tensors")
    seed = None if dropout_p <= LEAST_P else draw_seed(query.device) if seed is None else seed
    if scale is None:
        scale = (query.shape[-1] or 1) ** -0.5
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scored = (
        window is not None or softcap != 0.0 or alibi_slopes is not None or sinks is not None
        or type(causal) is not bool or type(causal_offset) is not int
    )  # fmt: skip
    if scored or cu_seqlens_q.is_cpu or backends.checks_on_gpu:
        sequences = checked_sequences(query, key, value, sequences)
    if scored:
        options = options_of(
            query, (cu_seqlens_q.shape[0] - 1, query.shape[1], *sequences[2:]), causal=causal,
            causal_offset=causal_offset, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_p=dropout_p, scale=scale, seed=seed, site=site,
            surplus=0 if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.diff() - cu_seqlens_q.diff(),
        )  # fmt: skip
        return attend(query, key, value, options, backends.current, sequences)
    return operator(
        query, key, value, None, sequences[0], sequences[1], None, None, None, None, seed, sequences[2], sequences[3],
        causal, causal_offset, -1, 0.0, 0, dropout_p, scale * 1.0, site, False, False, backends.current,
    )[0]  # fmt: skip


@names_arguments
def packed_qkv_attention(
    packed_qkv: Tensor,
    query: Tensor | None = None,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """attention() on packed projections, as one matrix product writes them; returns joined heads.

    packed_qkv (B, L, 3, H, D): queries, keys and values; or (B, S, 2, Hk, D), keys and values, with query (B, L, H, D).
    key_lengths, mask, causal, dropout_p, scale, seed, site as in attention(), but a mask takes no gradient.
    Inputs may be batch-first or sequence-first in memory; outputs and gradients use the same layout.
    Returns (B, L, H * D). Raises ValueError for shapes or dtypes that do not agree.
    """
    seed = None if dropout_p <= LEAST_P else draw_seed(packed_qkv.device) if seed is None else seed
    if scale is None:
        scale = (packed_qkv.shape[-1] or 1) ** -0.5
    offset: int | Tensor = 0
    if mask is not None and type(mask) is not Tensor:
        queries = (packed_qkv if query is None else query).shape[1]
        mask, causal, offset = without_bias(mask, causal, 0, queries, packed_qkv.shape[1])  # type: ignore[assignment]
    query, key = (packed_qkv, None) if query is None else (query, packed_qkv)
    return operator(
        query, key, None, key_lengths, None, None, mask, None, None, None, seed, 0, 0, causal, offset, -1, 0.0, 0,
        dropout_p, scale * 1.0, site, False, False, backends.current,
    )[0]  # fmt: skip


@names_arguments
def varlen_packed_qkv_attention(
    packed_qkv: Tensor,
    query: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    covered: bool = False,
    causal: bool = False,
    causal_offset: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """varlen_attention() on packed projections, as one matrix product writes them; returns joined heads.

    packed_qkv (T, 3, H, D): queries, keys and values; or (Tk, 2, Hk, D), keys and values, with query (Tq, H, D).
    cu_seqlens_q to site as in varlen_attention(); covered: the sequences cover all rows, so no padding is zeroed.
    Returns (Tq, H * D). Raises ValueError for shapes or dtypes that do not agree.
    """
    seed = None if dropout_p <= LEAST_P else draw_seed(packed_qkv.device) if seed is None else seed
    if scale is None:
        scale = (packed_qkv.shape[-1] or 1) ** -0.5
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    query, key = (packed_qkv, None) if query is None else (query, packed_qkv)
    if cu_seqlens_q.is_cpu or backends.checks_on_gpu:
        sequences = checked_sequences(query, key, None, sequences)
    return operator(
        query, key, None, None, sequences[0], sequences[1], None, None, None, None, seed, sequences[2], sequences[3],
        causal, causal_offset, -1, 0.0, 0, dropout_p, scale * 1.0, site, covered, False, backends.current,
    )[0]  # fmt: skip
