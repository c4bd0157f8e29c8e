"""attention()'s arguments: their checks, each a ValueError of one line, and causal alignment, windows, soft caps, ALiBi
slopes and sinks as Options."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention.call import LARGEST, Call, Options, Sequences, Window
from fasttfm.functional.backends import values_are_checked
from fasttfm.functional.dropout import dropout_for, wide
from fasttfm.functional.operator import REAL, WHOLE, Size, casts
from fasttfm.functional.signature import is_flag

Causal = bool | str
"""False; True or "top_left": query i at key i + causal_offset; "bottom_right": the last query at the last key."""


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


# ------------------------------------------------------------------------------------------------------------- scoring


def without_bias(
    mask: Tensor | None, causal: Causal, causal_offset: int | Tensor, queries: Any, keys: Any
) -> tuple[Tensor | None, Causal, int | Tensor]:
    """Return mask, causal and causal_offset, with a torch.nn.attention.bias.CausalBias over (L, S) replaced by causal.

    Its memory holds no values. Raises ValueError for other lengths, or if causal is given too.
    """
    if mask is None or type(mask).__name__ != "CausalBias":
        return mask, causal, causal_offset
    bias: Any = mask
    if causal or (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise ValueError(
            f"mask is a CausalBias of {(bias.seq_len_q, bias.seq_len_kv)} beside causal={causal!r}: it must be of "
            f"(L, S) = {(queries, keys)}, and causal left out"
        )
    return None, True, keys - queries if bias.variant.name == "LOWER_RIGHT" else 0


def options_of(
    query: Tensor, shape: tuple[Any, Any, Any, Any], *, key_lengths: Tensor | None = None, mask: Tensor | None = None,
    causal: Causal = False, causal_offset: int | Tensor = 0, window: Window | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    seed: Tensor | None = None, site: int = 0, surplus: Tensor | int | None = None,
) -> Options:  # fmt: skip
    """Convert attention()'s arguments to Options, for scores of shape (B, H, L, S).

    surplus: keys minus queries per batch row, if known; else computed from key_lengths or S. Raises TypeError,
    ValueError.
    """
    dropout_p, seed, site = dropout_for(query.device, dropout_p, seed, site, "query")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    elif not -LARGEST <= scale <= LARGEST:
        raise ValueError(f"scale={scale!r} must be a number between {-LARGEST} and {LARGEST}")
    scale = scale * 1.0  # an int may exceed 64 bits
    batch, heads, queries, keys = shape
    for name, x in (("causal_offset", causal_offset), ("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if isinstance(x, Tensor) and x.device != query.device:
            raise ValueError(f"{name} is on {x.device} and query on {query.device}: both must be on one device")
    left, right = _sides(window)
    offset: Any = causal_offset
    offsets: Tensor | None = None
    if isinstance(offset, Tensor):
        if offset.shape != (batch,) or offset.dtype not in WHOLE:
            what = f"causal_offset {offset.dtype} {tuple(offset.shape)}"
            raise ValueError(f"{what} must be an int, or int32 or int64 {(batch,)}")
        offset, offsets = 0, offset
    elif (
        isinstance(offset, int) and abs(offset) >= 1 << 61  # plus a window's side it would exceed 64 bits
        and (isinstance(causal, str) or softcap != 0.0 or not window is alibi_slopes is sinks is None)
    ):  # fmt: skip
        raise ValueError(f"causal_offset={offset} must be below 2^61 in size with a window, softcap, slopes or sinks")
    if causal == "bottom_right":
        if surplus is None and key_lengths is not None:
            surplus = key_lengths.clamp(0, keys) - queries
        if not isinstance(surplus, Tensor):
            offset = offset + (keys - queries if surplus is None else surplus)
        else:
            offsets = surplus if offsets is None else offsets + surplus
    elif isinstance(causal, str) and causal != "top_left":
        raise ValueError(f'causal={causal!r} must be False, True, "top_left" or "bottom_right"')
    elif not isinstance(causal, str):
        is_flag("causal", causal)
    if causal:
        right = 0
    if not (isinstance(softcap, int | float) and (softcap == 0 or 1e-30 <= softcap <= LARGEST)):
        raise ValueError(f"softcap={softcap!r} must be 0 (off) or a number from 1e-30 to {LARGEST}")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_floating_point()):
        raise ValueError(f"sinks {sinks.dtype} {tuple(sinks.shape)} must be floats ({heads},), one per head")
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, batch, heads).to(wide(query.dtype))
    window_size = -1 if left is None else left + (right or 0)
    return Options(
        key_lengths, mask, right is not None, offset + (right or 0), dropout_p, scale, seed, site, offsets, window_size,
        float(softcap), slopes, right or 0, sinks,
    )  # fmt: skip


def _sides(window: Window | None) -> Window:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(
            f"window={window!r} must be (left, right): keys before and past the diagonal, None for no bound"
        )
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | torch.SymInt) or side < 0):
            raise ValueError(f"window={tuple(window)} has {side!r}: each side must be an int from 0 up, or None")
        if side is not None and side >= 1 << 62:
            raise ValueError(f"window={tuple(window)} has {side!r}: it must be below 2^62; None is no bound")
    return window[0], window[1]


def _slopes(slopes: Tensor, batch: Any, heads: Any) -> Tensor:
    """Check alibi_slopes and return them as (B, H) or (1, H)."""
    if slopes.shape not in ((heads,), (batch, heads)) or not slopes.is_floating_point():
        raise ValueError(
            f"alibi_slopes {slopes.dtype} {tuple(slopes.shape)} must be floats ({heads},), one per head, or "
            f"({batch}, {heads})"
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient, but none is computed: give alibi_slopes.detach()")
    if values_are_checked(slopes) and not bool((slopes.abs() <= LARGEST).all()):
        raise ValueError(f"alibi_slopes must hold numbers between {-LARGEST} and {LARGEST}")
    return slopes if slopes.dim() == 2 else slopes[None]
