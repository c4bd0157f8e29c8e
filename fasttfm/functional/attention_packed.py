"""Attention over packed sequences: no padding, and no length ever read by the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import _attention_kernels as kernels
from fasttfm.functional import _attention_torch as plain
from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import seed_for
from fasttfm.functional._operators import Operator
from fasttfm.functional.attention import autocast_products, casts, kernel_options, nothing


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    *,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """attention() over sequences that lie one after the other, on both sides.

    query (Tq, H, D), key (Tk, H, D), value (Tk, H, Dv); float32, float16 or bfloat16, one dtype, any strides.
    query_starts, key_starts (B + 1,) int32 or int64 on the same device: where each sequence begins, and the end of the
    last. max_query, max_key: no sequence has more queries or keys; they are trusted, because checking would make the
    host wait for the device. Rows past the last sequence are filler of a fixed token budget and give zeros.
    causal, dropout_p, scale, seed, stream as attention() takes them; the dropout mask is that of the padded batch.
    Returns (Tq, H, Dv). Raises ValueError for shapes or dtypes that do not agree.
    """
    check(query, key, value, query_starts, key_starts, dropout_p)
    seed = seed_for(query, dropout_p, seed)
    return _forward(
        query,
        key,
        value,
        query_starts,
        key_starts,
        max_query,
        max_key,
        causal,
        dropout_p,
        query.shape[-1] ** -0.5 if scale is None else scale,
        seed,
        stream,
        chosen(),
    )[0]


def check(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, dropout_p: float
) -> None:
    if not query.dim() == key.dim() == value.dim() == 3:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must have three "
            "dimensions: (Tq, H, D), (Tk, H, D) and (Tk, H, Dv)"
        )
    if query.shape[1:] != key.shape[1:] or key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must agree in heads, "
            "query and key in head size, key and value in length"
        )
    if not (query.dtype == key.dtype == value.dtype or casts(query)):
        raise ValueError(f"query {query.dtype}, key {key.dtype} and value {value.dtype} must have one dtype")
    for name, starts in (("query_starts", query_starts), ("key_starts", key_starts)):
        if starts.dim() != 1 or starts.dtype not in (torch.int32, torch.int64) or starts.device != query.device:
            raise ValueError(
                f"{name} is {starts.dtype} {tuple(starts.shape)} on {starts.device}: int32 or int64 (B + 1,) on "
                f"{query.device} is needed"
            )
    if query_starts.shape != key_starts.shape or not query_starts.shape[0]:
        raise ValueError(
            f"query_starts {tuple(query_starts.shape)} and key_starts {tuple(key_starts.shape)} must both be (B + 1,)"
        )
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p {dropout_p} must lie in [0, 1]")


def _padded(x: Tensor, starts: Tensor, length: int) -> Tensor:
    """(T, H, D) to (B, H, length, D). Past its end a sequence repeats its last row: of other sequences and of filler it
    must not even see what is not a number."""
    index = starts[:-1, None] + torch.arange(length, device=x.device)
    return x[torch.minimum(index, starts[1:, None] - 1).clamp_(min=0)].transpose(1, 2)


def _joined(x: Tensor, starts: Tensor, like: Tensor) -> Tensor:
    """The inverse: (B, H, length, D) to (T, H, D), like's T; zero past the last sequence."""
    rows = like.shape[0]
    position = torch.arange(x.shape[2], device=x.device)
    index = starts[:-1, None] + position
    index = torch.where(position < (starts[1:] - starts[:-1])[:, None], index, rows)  # the rest goes to a row too many
    x = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return x.new_zeros(rows + 1, *x.shape[1:]).index_copy_(0, index.flatten(), x)[:rows].clone()


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    causal: bool,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
    covered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """covered: the sequences reach to the last row."""
    route = kernels.route(query, value, max_key, backend)
    if not kernels.saves_weights(route):
        packed = (query_starts, key_starts, max_query, max_key)
        options = {"causal": causal, "dropout_p": dropout_p, "seed": seed, "stream": stream}
        return *kernels.packed_forward(route, query, key, value, scale, packed, options, covered), nothing(query)
    if not query.numel() or not key.numel():
        batch = query_starts.shape[0] - 1
        weights = query.new_zeros(batch, query.shape[1], max_query, max_key)
        kept = torch.zeros_like(weights) if route == "torch" and seed is not None else nothing(query)
        return query.new_zeros(*query.shape[:2], value.shape[-1]), weights, kept
    sides = _sides(query_starts, key_starts, max_query, max_key)
    q, k, v = (_padded(x, *of) for x, of in zip((query, key, value), sides))
    lengths = key_starts[1:] - key_starts[:-1]
    if route == "torch":
        output, weights, dropped = plain.forward(q, k, v, lengths, None, causal, 0, dropout_p, scale, seed, stream)
        kept = nothing(query) if dropped is None else dropped
    else:
        options = kernel_options(lengths, None, causal, 0, dropout_p, seed, stream)
        output, weights = kernels.forward(route, q, k, v, scale, options)
        kept = nothing(query)
    return _joined(output, query_starts, query), weights, kept


def _sides(query_starts: Tensor, key_starts: Tensor, max_query: int, max_key: int) -> tuple:
    """Starts and greatest length of query, key and value."""
    return (query_starts, max_query), (key_starts, max_key), (key_starts, max_key)


def fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    causal: bool,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    route = kernels.route(query, value, max_key, backend)
    if not kernels.saves_weights(route):
        return output, query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32), nothing(query)
    weights = query.new_empty(query_starts.shape[0] - 1, query.shape[1], max_query, max_key)
    return output, weights, torch.empty_like(weights) if route == "torch" and seed is not None else nothing(query)


def _save(ctx: Any, args: tuple, outputs: tuple) -> None:
    *tensors, max_query, max_key, causal, dropout_p, scale, seed, stream, backend = args
    ctx.save_for_backward(*tensors[:3], *outputs, *tensors[3:], seed)
    ctx.options = (max_query, max_key, causal, dropout_p, scale, stream, backend)
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return (None,) * 13
    *tensors, seed = ctx.saved_tensors
    *options, stream, backend = ctx.options
    return *_backward(grad, *tensors, *options, seed, stream, backend), *(None,) * 10


def compute_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    saved: Tensor,
    kept: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    causal: bool,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    route = kernels.route(query, value, max_key, backend)
    if not kernels.saves_weights(route):
        packed = (query_starts, key_starts, max_query, max_key)
        options = {"causal": causal, "dropout_p": dropout_p, "seed": seed, "stream": stream}
        gradients = kernels.packed_backward(route, grad, query, key, value, output, saved, scale, packed, options)
        return gradients[0], gradients[1], gradients[2]
    if not query.numel() or not key.numel():
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    sides = _sides(query_starts, key_starts, max_query, max_key)
    q, k, v = (_padded(x, *of) for x, of in zip((query, key, value), sides))
    past = torch.arange(max_query, device=grad.device) >= (query_starts[1:] - query_starts[:-1])[:, None]
    g = _padded(grad, *sides[0]).masked_fill(past[:, None, :, None], 0.0)
    if route == "torch":
        d_query, d_key, d_value, _ = plain.backward(g, q, k, v, saved, kept if seed is not None else None, None, scale)
    else:
        options = kernel_options(key_starts[1:] - key_starts[:-1], None, causal, 0, dropout_p, seed, stream)
        d_query, d_key, d_value, _ = kernels.backward(route, g, q, k, v, output, saved, scale, options, False)
    return (
        _joined(d_query, query_starts, query),
        _joined(d_key, key_starts, key),
        _joined(d_value, key_starts, value),
    )


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


_backward = Operator(
    "attention_packed_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor saved, "
    "Tensor kept, Tensor query_starts, Tensor key_starts, SymInt max_query, SymInt max_key, bool causal, "
    "float dropout_p, float scale, Tensor? seed, int stream, str backend) -> (Tensor, Tensor, Tensor)",
    compute_backward,
    _fake_backward,
)
_forward = Operator(
    "attention_packed(Tensor query, Tensor key, Tensor value, Tensor query_starts, Tensor key_starts, "
    "SymInt max_query, SymInt max_key, bool causal, float dropout_p, float scale, Tensor? seed, int stream, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    compute,
    fake,
    save=_save,
    backward=_differentiate,
    autocast=autocast_products,
)
