"""Checks of attention's arguments; each raises a ValueError of one line."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor

from fasttfm.functional.attention.call import LARGEST, Call, Sequences
from fasttfm.functional.backends import values_are_checked
from fasttfm.functional.dropout import dropout_for
from fasttfm.functional.operator import REAL, WHOLE, Size, casts


def check(call: Call) -> None:
    """Check a call of the operator."""
    if call.value is None:
        _check_projections(call)
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        check_packed(*call.apart, call.cu_seqlens_q, call.cu_seqlens_k)
    else:
        query, key, value = call.heads
        check_heads(query, key, call.key_lengths, call.mask)
        if call.value is not None:
            check_value(query, key, value)
    _check_longest(call.max_seqlen_q, call.max_seqlen_k)
    dropout_for(call.query.device, call.dropout_p, call.seed, call.site, "query")
    if not -LARGEST <= call.scale <= LARGEST:
        raise ValueError(f"scale={call.scale!r} must be a number between {-LARGEST} and {LARGEST}")


def check_heads(query: Tensor, key: Tensor, key_lengths: Tensor | None, mask: Tensor | None) -> None:
    """Check the shapes, dtypes and devices of attention()'s query, key and masks."""
    q, k = query.shape, key.shape  # each access makes a tuple
    if len(q) != 4 or len(k) != 4:
        raise ValueError(
            f"query {tuple(q)} and key {tuple(k)} must have four dimensions: (B, H, L, D) and (B, H, S, D)"
        )
    if q[0] != k[0] or q[3] != k[3] or not shares(q[1], k[1]):
        raise ValueError(
            f"query {tuple(q)} and key {tuple(k)} must agree in batch, heads and head size "
            "(only the query may have a multiple of the key's heads)"
        )
    if q[3] == 0:
        raise ValueError(f"query {tuple(q)} has heads of size 0: there is nothing to multiply")
    if query.device != key.device:
        raise ValueError(f"key is on {key.device} and query on {query.device}: both must be on one device")
    if query.dtype != key.dtype and not casts(query):
        raise ValueError(f"query {query.dtype} and key {key.dtype} must have one dtype")
    if query.dtype not in REAL:
        raise ValueError(f"query has dtype {query.dtype}: float32, float16 or bfloat16 is needed")
    for name, x in (("key_lengths", key_lengths), ("mask", mask)):
        if x is not None and x.device != query.device:
            raise ValueError(f"{name} is on {x.device} and query on {query.device}: both must be on one device")
    if key_lengths is not None and (key_lengths.dim() != 1 or key_lengths.shape[0] != q[0]):
        raise ValueError(f"key_lengths {tuple(key_lengths.shape)} must be ({q[0]},), one length a batch row")
    if key_lengths is not None and key_lengths.dtype not in WHOLE:
        raise ValueError(f"key_lengths has dtype {key_lengths.dtype}: int32 or int64 is needed")
    if mask is not None:
        full = (*q[:3], k[2])
        if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(mask.shape[::-1], full[::-1])):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to (B, H, L, S) = {full}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask has dtype {mask.dtype}: bool (True attends) or floats that are added are needed")


def shares(query_heads: Size, key_heads: Size) -> bool:
    """Return whether the number of query heads is a multiple of the number of key heads."""
    return query_heads == key_heads or (key_heads > 0 and query_heads % key_heads == 0)


def check_value(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that value fits query and key."""
    k, v = key.shape, value.shape
    if len(v) != 4 or v[:3] != k[:3]:
        raise ValueError(
            f"value {tuple(v)} and key {tuple(k)} must agree in batch, heads and length: (B, H, S, Dv) and (B, H, S, D)"
        )
    if query.dtype != value.dtype and not casts(query):
        raise ValueError(f"query {query.dtype} and value {value.dtype} must have one dtype")


def _check_projections(call: Call) -> None:
    """Check the shape and dtype of packed projections."""
    projected, query = (call.query, None) if call.key is None else (call.key, call.query)
    parts, dimensions = 3 if query is None else 2, 4 if call.packed else 5
    shape = tuple(projected.shape)
    if len(shape) != dimensions or shape[-3] != parts or (query is not None and query.dim() != dimensions - 1):
        beside = "" if query is None else f" with query {tuple(query.shape)}"
        allowed = "(B, L, 3, H, D), or (B, S, 2, H, D) with query (B, L, H, D)"
        if call.packed:
            allowed = "(T, 3, H, D), or (Tk, 2, H, D) with (Tq, H, D)"
        raise ValueError(f"packed_qkv {shape}{beside} must be {allowed}")
    if projected.dtype not in REAL:
        raise ValueError(f"packed_qkv has dtype {projected.dtype}: float32, float16 or bfloat16 is needed")
    if call.mask is not None and call.mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("packed_qkv_attention's mask takes no gradient: attention() takes one")


def check_packed(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Check the shapes, dtypes and devices of varlen_attention()'s arguments."""
    if not query.dim() == key.dim() == value.dim() == 3:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must have three "
            "dimensions: (Tq, H, D), (Tk, H, D) and (Tk, H, Dv)"
        )
    if query.shape[2] != key.shape[2] or key.shape[:2] != value.shape[:2] or not shares(query.shape[1], key.shape[1]):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must agree in heads "
            "(only the query may have a multiple), query and key in head size, key and value in length"
        )
    if not (query.dtype == key.dtype == value.dtype or casts(query)):
        raise ValueError(f"query {query.dtype}, key {key.dtype} and value {value.dtype} must have one dtype")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts.dim() != 1 or starts.dtype not in WHOLE or starts.device != query.device:
            raise ValueError(
                f"{name} is {starts.dtype} {tuple(starts.shape)} on {starts.device}: int32 or int64 (B + 1,) on "
                f"{query.device} is needed"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape or not cu_seqlens_q.shape[0]:
        both = f"cu_seqlens_q {tuple(cu_seqlens_q.shape)} and cu_seqlens_k {tuple(cu_seqlens_k.shape)}"
        raise ValueError(f"{both} must be (B + 1,)")


def checked_sequences(query: Tensor, key: Tensor | None, value: Tensor | None, sequences: Sequences) -> Sequences:
    """Check packed sequences; where values_are_checked(), return them with max_seqlen lowered to the longest sequence.

    Raises ValueError for a max_seqlen of 2^31 or more and, where values are checked, for cu_seqlens that do not rise
    from 0, that end past the rows, or that contain a sequence longer than max_seqlen.
    """
    queries, keys, *bounds = sequences
    call = Call(
        query, key, value, None, queries, keys, None, None, None, None, None, bounds[0], bounds[1], False, 0, -1,
        0.0, 0, 0.0, 1.0, 0, False, False, "auto",
    )  # fmt: skip
    if value is None:
        _check_projections(call)
    check_packed(*call.apart, queries, keys)
    _check_longest(*bounds)
    if not values_are_checked(queries):
        return sequences
    lowered: list[Size] = []
    counts = query.shape[0], (query if key is None else key).shape[0]
    for name, starts, rows, most in zip("qk", (queries, keys), counts, bounds):
        if name == "k" and keys is queries and counts[0] == counts[1] and bounds[0] == bounds[1]:
            lowered *= 2
            break
        values = starts.tolist()
        longest = max((b - a for a, b in itertools.pairwise(values)), default=0)
        if values[0] < 0 or values[-1] > rows or any(b < a for a, b in itertools.pairwise(values)):
            raise ValueError(f"cu_seqlens_{name} must rise from 0 to at most {rows} rows: {shown(values)}")
        if longest > most:
            raise ValueError(f"max_seqlen_{name} is {most} but a sequence of cu_seqlens_{name} has {longest}")
        lowered.append(min(operator.index(most), max(longest, 1)))  # padding allocates for the longest
    return Sequences(queries, keys, *lowered)


def _check_longest(*bounds: Size) -> None:
    for name, most in zip("qk", bounds):
        if not 0 <= most < 1 << 31:
            raise ValueError(f"max_seqlen_{name} is {most}: it must be below 2^31 and not negative")


def shown(values: list[int]) -> str:
    """The first values, in one line."""
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
