"""Attention over a paged KV cache, to which new keys and values are first appended in place."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention import products
from fasttfm.functional.attention.arguments import options_of, shares
from fasttfm.functional.attention.backend import takes_fused
from fasttfm.functional.attention.call import Options, Window, empty_heads_last
from fasttfm.functional.backends import kernel_route, values_are_checked
from fasttfm.functional.operator import WHOLE, Operator, Overwritten, Whole, without_views
from fasttfm.functional.rotary import rotary
from fasttfm.functional.signature import is_flag, names_arguments

WIDEST_HEAD = 256
"""The kernels' limit, from kernels/attention/launch.py; wider heads are computed by PyTorch."""


@names_arguments
def attention_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_lengths: int | Tensor | None = None,
    cache_starts: Tensor | None = None,
    block_table: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of new queries over a KV cache, to which key and value are first appended in place.

    query (B, H, L, D); key (B, Hk, N, D), value (B, Hk, N, Dv) or neither; float32, float16 or bfloat16, one dtype, any
    strides; H a multiple of Hk, as in attention(). There are no gradients.
    key_cache (P, Hk, page, D), value_cache (P, Hk, page, Dv): key t of sequence b is row t % page of page
    block_table[b, t // page], int32 or int64 (B, pages per sequence). Without a table sequence b is page b.
    cache_lengths (B,) int32 or int64, or an int: keys of each sequence before the call; None: the cache is full.
    cache_starts (B,): keys before it are not attended. Both and the table are checked on a CPU; on a GPU, where the
    check would wait for the device, only with FASTTFM_CHECK=1.
    The last query is aligned with the last key. causal, window (left, right), softcap, alibi_slopes (H,) or (B, H),
    sinks (H,) and scale are attention()'s. A query that sees no key gives zeros.
    cos, sin (T, R / 2), interleaved: rotary() is applied to key and query, key t of a sequence by row t; queries that
    see all keys, neither causal nor windowed, by the row of the first new key.
    Returns (B, H, L, Dv), heads last in memory; with return_lse also the log-sum-exp of each row's scores (B, H, L)
    float32, sinks included, -inf if there are none: weights are exp(score - lse).
    Raises ValueError for arguments that do not agree, before anything is appended.
    """
    is_flag("causal", causal)
    is_flag("interleaved", interleaved)
    is_flag("return_lse", return_lse)
    _check_tensors(query, key_cache, value_cache, key, value, sinks)
    options = options_of(
        query, (*query.shape[:3], 0), causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, scale=scale,
    )  # fmt: skip
    lengths, longest = _checked_lengths(query, key_cache, key, cache_lengths, cache_starts, block_table)
    if cos is not None or sin is not None:
        sees_all = not options.causal and options.window == -1
        query, key = _turned(query, key, cos, sin, lengths, longest, interleaved, sees_all)
    if key is not None and value is not None:
        _append(key_cache, key, lengths, block_table, backends.current)
        _append(value_cache, value, lengths, block_table, backends.current)
        lengths = lengths + key.shape[2]
    tensors = (query, key_cache, value_cache, lengths, cache_starts, block_table)
    output, lse = _attention(*tensors, options, return_lse, backends.current)
    return (output, lse) if return_lse else output


def _turned(
    query: Tensor, key: Tensor | None, cos: Tensor | None, sin: Tensor | None, lengths: Tensor, longest: int | None,
    interleaved: bool, together: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apply rotary() to query and key; together: all queries take the position of the first new key."""
    if cos is None or sin is None or key is None:
        raise ValueError("cos, sin and key belong together: positions are those of the appended keys")
    places = max(1 if together else query.shape[2], key.shape[2])
    if cos.dim() == 2 and (longest or 0) + places > cos.shape[0]:
        raise ValueError(f"cos has {cos.shape[0]} positions, cache_lengths and key need {(longest or 0) + places}")
    first = lengths.long()[:, None]
    steps = torch.arange(places, device=lengths.device)
    positions = first.expand(-1, query.shape[2]) if together else first + steps[: query.shape[2]]
    key = rotary(key, cos, sin, first + steps[: key.shape[2]], interleaved=interleaved)
    return rotary(query, cos, sin, positions, interleaved=interleaved), key


# --------------------------------------------------------------------------------------------------------------- checks


def _check_tensors(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None, value: Tensor | None,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    caches = f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)}"
    if not query.dim() == key_cache.dim() == value_cache.dim() == 4:
        raise ValueError(
            f"query {tuple(query.shape)}, {caches} must have four dimensions: (B, H, L, D), (P, Hk, page, D) and "
            "(P, Hk, page, Dv)"
        )
    if (
        query.shape[3] != key_cache.shape[3] or key_cache.shape[:3] != value_cache.shape[:3]
        or not shares(query.shape[1], key_cache.shape[1])
    ):  # fmt: skip
        raise ValueError(
            f"query {tuple(query.shape)}, {caches} must agree in heads (only the query may have a multiple), query and "
            "key_cache in head size, key_cache and value_cache in pages and rows"
        )
    if not key_cache.shape[2] or not query.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} or key_cache {tuple(key_cache.shape)} is empty: there is no key")
    if (key is None) != (value is None):
        raise ValueError("key and value belong together: give both, or neither")
    named = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    if key is not None and value is not None:
        named |= {"key": key, "value": value}
        rows = (len(query), key_cache.shape[1], *key.shape[2:3])
        expected = (*rows, key_cache.shape[3]), (*rows, value_cache.shape[3])
        if key.dim() != 4 or (key.shape, value.shape) != expected:
            raise ValueError(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} must be (B, Hk, N, D) and (B, Hk, N, Dv) of "
                f"query {tuple(query.shape)}, {caches}"
            )
    for name, x in named.items():
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, query {query.dtype} on {query.device}: one is needed")
    named |= {} if sinks is None else {"sinks": sinks}
    for name, x in named.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and there is none: call it under torch.no_grad()")


def _checked_lengths(
    query: Tensor, key_cache: Tensor, key: Tensor | None, lengths: int | Tensor | None, starts: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, int | None]:  # fmt: skip
    """Check the integer tensors: dtypes, shapes, devices and, if values_are_checked(), that keys and pages lie in the
    cache. Return cache_lengths as a tensor (B,), and the longest; None if values are not checked."""
    batch, (pages, _, page) = len(query), key_cache.shape[:3]
    if lengths is None:
        if key is not None:
            raise ValueError("cache_lengths is needed beside key: keys are appended there")
        lengths = page * (1 if block_table is None else block_table.shape[-1])
    if not isinstance(lengths, Tensor):
        number = operator.index(lengths)
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"cache_lengths={number} must fit 64 bits")
        lengths = torch.full((batch,), number, dtype=torch.int64, device=query.device)
    for name, x, shape in (
        ("cache_lengths", lengths, f"({batch},)"), ("cache_starts", starts, f"({batch},)"),
        ("block_table", block_table, f"({batch}, pages of a sequence)"),
    ):  # fmt: skip
        if x is not None and (
            x.dim() != 1 + (name == "block_table") or len(x) != batch or x.dtype not in WHOLE
            or x.device != query.device
        ):  # fmt: skip
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}: int32 or int64 {shape} on {query.device} is "
                "needed"
            )
    if block_table is None and len(key_cache) != batch:
        raise ValueError(f"key_cache has {len(key_cache)} rows and query {batch}: give a block_table of their pages")
    if not values_are_checked(lengths) or not len(lengths):
        return lengths, None
    capacity = page * (1 if block_table is None else block_table.shape[1])
    new = 0 if key is None else key.shape[2]
    least, longest = (int(x) for x in lengths.aminmax())
    if least < 0 or longest + new > capacity:
        room = f"a page of {page}" if block_table is None else f"{block_table.shape[1]} pages of {page} in block_table"
        raise ValueError(f"cache_lengths reach from {least} to {longest}, and {new} are appended: there is {room}")
    if starts is not None and bool(((starts < 0) | (starts > lengths)).any()):
        raise ValueError("cache_starts must lie between 0 and cache_lengths")
    if block_table is not None:
        check_pages(block_table, lengths + new, page, pages)
    return lengths, longest


def check_pages(block_table: Tensor, lengths: Tensor, page: int, pages: int) -> None:
    """Raise ValueError for a page that does not exist among those that sequences of these lengths use."""
    used = torch.arange(block_table.shape[1], device=lengths.device) * page < lengths[:, None]
    wrong = block_table[used & ((block_table < 0) | (block_table >= pages))]
    if wrong.numel():
        raise ValueError(f"block_table has page {int(wrong[0])}: there are 0 to {pages - 1}")


# ------------------------------------------------------------------------------------------------------------ operators


class _Append(NamedTuple):
    cache: Overwritten
    new: Tensor
    cache_lengths: Whole
    """Before the call."""
    block_table: Whole | None
    route: str


def _plan_append(call: _Append) -> Callable[[_Append], None]:
    if call.route == "torch":
        return _append_by_torch
    from fasttfm.kernels.attention.decode import Append

    append = Append(call.cache, call.new, call.block_table)
    return lambda call: append(*call[:4])


def _append_by_torch(call: _Append) -> None:
    cache, new, lengths, block_table, _ = call
    place = lengths.long()[:, None] + torch.arange(new.shape[2], device=new.device)  # (B, N)
    page = cache.shape[2]
    if block_table is None:
        pages = torch.arange(len(new), device=new.device)[:, None]
    else:
        pages = block_table.gather(1, place // page).long()
    cache[pages, :, place % page] = new.transpose(1, 2)


_append = Operator(
    "append_to_cache", _Append, "()", _plan_append, lambda call: None,
    decide=lambda call: "torch" if call.cache.stride(3) != 1 else _decide(call.route, call.cache),
).call  # fmt: skip


class Call(NamedTuple):
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    cache_lengths: Whole
    """New keys included."""
    cache_starts: Whole | None
    block_table: Whole | None
    options: Options
    """causal_offset is relative to aligning the last query with the last key."""
    with_lse: bool
    route: str

    @property
    def lse(self) -> Tensor:
        """An output buffer for the log-sum-exp; empty if it is not requested."""
        return self.query.new_empty(self.query.shape[:3] if self.with_lse else 0, dtype=torch.float32)


def _decide(route: str, *heads: Tensor) -> str:
    """triton or torch; torch for heads that are empty or wider than the kernels take."""
    widths = [x.shape[3] for x in heads]
    return "torch" if max(widths) > WIDEST_HEAD or not min(widths) else kernel_route(route, *heads)


def _plan(call: Call) -> Callable[[Call], tuple[Tensor, Tensor]]:
    if call.route == "torch":
        return without_views(_each)
    from fasttfm.kernels.attention.decode import Decode

    options = call.options
    scoring: dict[str, Any] = {
        "left": None if options.window == -1 else options.window - options.past,
        "right": options.past if options.causal else None,
        "softcap": options.softcap, "slopes": options.slopes, "sinks": options.sinks, "scale": options.scale,
    }  # fmt: skip
    decode = Decode(*call[:3], call.block_table, **scoring)

    def compute(call: Call) -> tuple[Tensor, Tensor]:
        lse = call.lse
        return decode(*call[:6], call.options.slopes, call.options.sinks, lse if call.with_lse else None), lse

    return compute


def _flops(call: Call) -> int:
    """FLOPs of the products with each sequence's keys."""
    lengths, (batch, heads, queries, width) = call.cache_lengths, call.query.shape
    keys = lengths if call.cache_starts is None else lengths - call.cache_starts
    if type(lengths) is not Tensor or lengths.is_meta:
        page = call.key_cache.shape[2]
        pairs = batch * page * (1 if call.block_table is None else call.block_table.shape[1])
    else:
        pairs = int(keys.sum())
    return 2 * heads * queries * pairs * (width + call.value_cache.shape[3])


def _each(call: Call) -> tuple[Tensor, Tensor]:
    """Compute sequence by sequence, so that nothing past a sequence's end is read: it may hold NaN.

    The host waits for the lengths.
    """
    output, lse = empty_heads_last(call.query, call.value_cache.shape[3]), call.lse
    lengths = call.cache_lengths.tolist()
    starts = [0] * len(lengths) if call.cache_starts is None else call.cache_starts.tolist()
    for b, (first, end) in enumerate(zip(starts, lengths)):
        key, value = (_rows(x, call.block_table, b, first, end) for x in (call.key_cache, call.value_cache))
        query, options = call.query[b : b + 1], call.options
        options = options._replace(causal_offset=options.causal_offset + end - first - query.shape[2])
        if options.slopes is not None and len(options.slopes) > 1:
            options = options._replace(slopes=options.slopes[b : b + 1])
        backend = "fused" if takes_fused(query, key, value, options) else "explicit"
        output[b : b + 1] = products.forward(backend, query, key, value, options, {})[0]
        if call.with_lse:
            lse[b : b + 1] = products.log_sum_exp(query, key, options)
    return output, lse


def _rows(cache: Tensor, block_table: Tensor | None, b: int, first: int, end: int) -> Tensor:
    """Rows first to end of a sequence: (1, Hk, end - first, .)."""
    if block_table is None:
        return cache[b : b + 1, :, first:end]
    page = cache.shape[2]
    skipped = first // page
    pages = block_table[b, skipped : -(-end // page)].tolist()
    rows = torch.cat([cache.new_empty(cache.shape[1], 0, cache.shape[3]), *(cache[p] for p in pages)], 1)
    return rows[None, :, first - skipped * page : end - skipped * page]


_attention = Operator(
    "attention_with_cache", Call, "(Tensor, Tensor)", _plan,
    lambda call: (empty_heads_last(call.query, call.value_cache.shape[3]), call.lse),
    decide=lambda call: _decide(call.route, call.query, call.value_cache), flops=_flops,
    autocast=lambda call, dtype: call,  # marks it as having products
).call  # fmt: skip
