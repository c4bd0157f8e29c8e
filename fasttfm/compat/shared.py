"""Shared by the signatures: arguments, keys and values in pages, and the log-sum-exps and weights that they return."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fasttfm.functional import attention_weights
from fasttfm.functional.attention.arguments import check_heads as check_shapes
from fasttfm.functional.attention.arguments import options_of
from fasttfm.functional.attention.call import Sequences, packed_again, padded
from fasttfm.functional.attention.paged import check_pages
from fasttfm.functional.attention.products import log_sum_exp
from fasttfm.functional.backends import values_are_checked
from fasttfm.functional.dropout import wide
from fasttfm.functional.plan import without_autocast
from fasttfm.functional.record import WHOLE
from fasttfm.functional.signature import is_flag

Window = tuple[int | None, int | None] | None


def scoring(
    function: str, causal: bool, window: Window, lengths: tuple[int, int], slopes: Tensor | None, surplus: int | Tensor
) -> dict[str, Any]:
    """attention()'s arguments for causal, window (left, right) and ALiBi slopes, the last query at the last key.

    None, -1, and a side that covers lengths, those of the longest queries and keys, are no bound. surplus: keys minus
    queries. Raises TypeError, ValueError for another window.
    """
    is_flag("causal", causal)
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        raise TypeError(f"{function}: window_size={window!r} must be (left, right), or None")
    left, right = (None if side == -1 else side for side in window or (None, None))
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | torch.SymInt) or side < 0):
            raise ValueError(f"{function}: window_size={window!r} has {side!r}: each side must be 0 or more, or -1")
    queries, keys = lengths
    if left is not None and left >= keys - 1:  # the last query sees the first key
        left = None
    if causal or (right is not None and right >= queries - 1):  # the first query sees the last key
        right = None
    bounded = left is not None or right is not None
    if not causal and not bounded and slopes is None:
        return {}
    options: dict[str, Any] = {"causal": causal, "causal_offset": surplus, "alibi_slopes": slopes}
    return options | {"window": (left, right)} if bounded else options


def surplus_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> int | Tensor:
    """Keys minus queries of each sequence (B,); 0 for wrong cu_seqlens, which varlen_attention() refuses."""
    q, k = ((x.dtype in WHOLE, x.shape, x.device) for x in (cu_seqlens_q, cu_seqlens_k))
    if cu_seqlens_q is cu_seqlens_k or q != k or not q[0]:
        return 0
    return cu_seqlens_k.diff() - cu_seqlens_q.diff()


def check_rank(function: str, rank: int, parts: int | None = None, **tensors: Tensor) -> None:
    """Raise ValueError unless each tensor has rank dimensions, and parts in the third from the right."""
    for name, x in tensors.items():
        if x.dim() != rank or (parts is not None and x.shape[-3] != parts):
            needed = f"{rank} dimensions" + ("" if parts is None else f", {parts} in the third from the right")
            raise ValueError(f"{function}: {name} {tuple(x.shape)} must have {needed}")


def check_heads(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless the heads of keys and values (..., Hk, D) divide those of the query (..., H, D), which
    comes first."""
    (query, x), *others = tensors.items()
    heads = x.shape[-2]
    for name, x in others:
        if x.shape[-2] != heads and (not x.shape[-2] or heads % x.shape[-2]):
            raise ValueError(f"{function}: {name} has {x.shape[-2]} heads, which must divide the {heads} of {query}")


def used_rows(
    function: str,
    key: Tensor,
    value: Tensor,
    batch: int,
    starts: Tensor | None,
    used: Tensor | None,
    block_table: Tensor | None,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (T, Hk, .) of the sequences packed, and their cu_seqlens (B + 1,).

    starts (B + 1,): cu_seqlens of key and value (T, Hk, .); with block_table (B, pages per sequence), whose pages are
    key and value (P, page, Hk, .), only their differences, the lengths, are read. used (B,): shorter lengths. longest:
    upper bound of the lengths. Copies at most B * longest rows without waiting for the device; gradients pass. Raises
    ValueError for arguments that do not agree, values included where values_are_checked().
    """
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{function}: k {tuple(key.shape)} and v {tuple(value.shape)} must agree in rows and heads")
    pages = block_table.shape[-1] if block_table is not None else 1
    shapes = {"cu_seqlens_k": (batch + 1,), "seqused_k": (batch,), "block_table": (batch, pages)}
    for (name, shape), x in zip(shapes.items(), (starts, used, block_table)):
        if x is not None and (x.dtype not in WHOLE or x.shape != shape or x.device != key.device):
            raise ValueError(
                f"{function}: {name} is {x.dtype} {tuple(x.shape)} on {x.device}: int32 or int64 {shape} on "
                f"{key.device} is needed"
            )
    if used is None:
        assert starts is not None
        used = starts.diff()
    _check(function, key, starts, used, block_table, longest)
    ends = pad(used.cumsum(0), (1, 0))
    rows = len(key) if block_table is None else min(batch * longest, block_table.numel() * key.shape[1])
    row = torch.arange(rows, device=key.device)
    if batch:
        sequence = torch.searchsorted(ends[1:], row, right=True).clamp_(max=batch - 1)
        row = row - ends[sequence]
        if block_table is not None:
            page = key.shape[1]
            row = block_table[sequence, (row // page).clamp_(max=pages - 1)] * page + row % page
        elif starts is not None:
            row = row + starts[sequence]
    if block_table is not None:
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    row = row.clamp(0, max(len(key) - 1, 0))  # for rows past the last sequence
    return key.index_select(0, row), value.index_select(0, row), ends


def _check(
    function: str, key: Tensor, starts: Tensor | None, used: Tensor, block_table: Tensor | None, longest: int
) -> None:
    """Raise ValueError for lengths and pages that do not exist, where values_are_checked()."""
    if not len(used) or not values_are_checked(used):
        return
    least, most = (int(x) for x in used.aminmax())
    what = f"{function}: keys of a sequence reach from {least} to {most}"
    if least < 0 or most > longest:
        raise ValueError(f"{what}, and max_seqlen_k is {longest}")
    if block_table is None:
        if starts is not None and (bool((used > starts.diff()).any()) or starts[0] < 0 or starts[-1] > len(key)):
            raise ValueError(f"{what}, more than cu_seqlens_k leaves room for in k {tuple(key.shape)}")
        return
    count, page = key.shape[:2]
    if most > block_table.shape[1] * page:
        raise ValueError(f"{what}: there is room for {block_table.shape[1]} pages of {page} in block_table")
    check_pages(block_table, used, page, count)


@torch.no_grad()
def probabilities(
    query: Tensor, key: Tensor, lengths: Tensor | None, dropout_p: float, seed: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """flash_attn's softmax_lse, the log-sum-exp (B, H, L) float32 of each row's scores, -inf without a key; and its
    S_dmask, exp(scores - row maximum) (B, H, L, S), negative where dropped; empty without dropout. Neither has a
    gradient.

    query (B, H, L, D), key (B, Hk, S, D), lengths (B,); seed and options as in the attention() call. Recomputes Q K^T.
    """
    check_shapes(query, key, lengths, None)
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
