"""softmax(Q K^T * scale) V with masks and dropout (Vaswani et al. 2017, equation 1), as torch operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import _attention_kernels as kernels
from fasttfm.functional import _attention_torch as plain
from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import seed_for
from fasttfm.functional._operators import AUTOCAST_DEVICES, Operator

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def casts(x: Tensor) -> bool:
    """Whether autocast is on for x's device, and will bring all operands to one dtype."""
    device = x.device.type
    return device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device)


def check(
    query: Tensor,
    key: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
) -> None:
    """Raises ValueError for arguments of attention() that do not agree."""
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must have four dimensions: "
            "(B, H, L, D) and (B, H, S, D)"
        )
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in batch, heads and head size "
            "(expand the keys where heads are shared)"
        )
    if query.shape[3] == 0:
        raise ValueError(f"query {tuple(query.shape)} has heads of size 0: there is nothing to multiply")
    if query.dtype != key.dtype and not casts(query):
        raise ValueError(f"query {query.dtype} and key {key.dtype} must have one dtype")
    if query.dtype not in _DTYPES:
        raise ValueError(f"query has dtype {query.dtype}: float32, float16 or bfloat16 is needed")
    for name, given in (("key_lengths", key_lengths), ("mask", mask)):
        if given is not None and given.device != query.device:
            raise ValueError(f"{name} is on {given.device} and query on {query.device}: both must be on one device")
    if key_lengths is not None and (key_lengths.dim() != 1 or key_lengths.shape[0] != query.shape[0]):
        raise ValueError(f"key_lengths {tuple(key_lengths.shape)} must be ({query.shape[0]},), one length a batch row")
    if key_lengths is not None and (key_lengths.is_floating_point() or key_lengths.dtype == torch.bool):
        raise ValueError(f"key_lengths has dtype {key_lengths.dtype}: int32 or int64 is needed")
    if mask is not None:
        full = (*query.shape[:3], key.shape[2])
        if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(mask.shape[::-1], full[::-1])):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to (B, H, L, S) = {full}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask has dtype {mask.dtype}: bool (True attends) or floats that are added are needed")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p {dropout_p} must lie in [0, 1]")


def check_value(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Likewise for the values."""
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value {tuple(value.shape)} and key {tuple(key.shape)} must agree in batch, heads and length: "
            "(B, H, S, Dv) and (B, H, S, D)"
        )
    if query.dtype != value.dtype and not casts(query):
        raise ValueError(f"query {query.dtype} and value {value.dtype} must have one dtype")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """softmax(Q K^T * scale) V with masking and dropout fused (Vaswani et al. 2017, equation 1).

    query (B, H, L, D), key (B, H, S, D), value (B, H, S, Dv); float32, float16 or bfloat16, one dtype, any strides.
    key_lengths (B,) int: keys at or past it are not attended. mask, broadcastable to (B, H, L, S): bool, True where
    the query may attend, or floats that are added to the scaled scores and may take a gradient. causal: query i sees
    keys up to i + causal_offset. All combine. A query with no key to attend gives zeros and passes no gradient.
    dropout_p in [0, 1], on the weights; seed (1,) int64 on the same device, drawn from torch's generator where None;
    stream tells the calls of one model apart. scale defaults to D^-0.5.
    Returns (B, H, L, Dv) whose memory is (B, L, H, Dv), so that .transpose(1, 2).flatten(2) copies nothing.
    Raises ValueError for shapes or dtypes that do not agree.
    """
    check(query, key, key_lengths, mask, dropout_p)
    check_value(query, key, value)
    if dropout_p == 0.0 and torch_is_faster(query, key, value, mask):
        return plain.fused(query, key, value, key_lengths, mask, causal, causal_offset, scale)
    seed = seed_for(query, dropout_p, seed)
    return _forward(
        query,
        key,
        value,
        key_lengths,
        mask,
        causal,
        causal_offset,
        dropout_p,
        query.shape[-1] ** -0.5 if scale is None else scale,
        seed,
        stream,
        chosen(),
    )[0]


_FUSED = (16, 16)
"""From so many queries and keys on torch's fused CPU kernel is the faster in float32 and keeps no weights: forward and
backward 1.3 and 1.1 times at 100 keys, 4.3 and 2.2 times at 1,024 under a triangle (`python -m benchmarks kernels`).
Below 64 keys forward is hardly faster, backward half as long, its memory being touched for the first time.
Few queries over many keys are a search's (attention_step.py); in bfloat16 its softmax and backward pass are slow."""


def torch_is_faster(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the call is torch's own: on the CPU in float32, without dropout or a mask that takes a gradient."""
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.float32
        and query.shape[2] >= _FUSED[0]
        and key.shape[2] >= _FUSED[1]
        and value.shape[3] == query.shape[3]
        and not (mask is not None and mask.requires_grad)
        and chosen() != "triton"
        and not casts(query)
    )


# ------------------------------------------------------------------------------------------------ softmax(Q K^T) V

_FORWARD = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? key_lengths, Tensor? mask, bool causal, "
    "SymInt causal_offset, float dropout_p, float scale, Tensor? seed, int stream, str backend) "
    "-> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor saved, Tensor kept, "
    "Tensor? key_lengths, Tensor? mask, bool causal, SymInt causal_offset, float dropout_p, float scale, Tensor? seed, "
    "int stream, str backend, bool mask_gradient) -> (Tensor, Tensor, Tensor, Tensor)"
)


def kernel_options(
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
    dropout_p: float,
    seed: Tensor | None,
    stream: int,
) -> dict[str, Any]:
    """Everything but the tensors and the scale, as the kernels name it."""
    return {
        "key_lengths": key_lengths,
        "mask": mask,
        "causal": causal,
        "causal_offset": causal_offset,
        "dropout_p": dropout_p,
        "seed": seed,
        "stream": stream,
    }


def nothing(like: Tensor) -> Tensor:
    """What stands in for an output that a call does not have: an operator always returns the same number of them."""
    return like.new_empty(0)


def _heads_last(like: Tensor, width: int | torch.SymInt) -> Tensor:
    """An empty (B, H, L, width) whose memory is (B, L, H, width); like (B, H, L, ...)."""
    batch, heads, length = like.shape[:3]
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    route = kernels.route(query, value, key.shape[2], backend)
    if route != "torch":
        options = kernel_options(key_lengths, mask, causal, causal_offset, dropout_p, seed, stream)
        return *kernels.forward(route, query, key, value, scale, options), nothing(query)
    output, weights, kept = plain.forward(
        query, key, value, key_lengths, mask, causal, causal_offset, dropout_p, scale, seed, stream
    )
    return output, weights, nothing(query) if kept is None else kept


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    route = kernels.route(query, value, key.shape[2], backend)
    output = _heads_last(query, value.shape[-1])
    if not kernels.saves_weights(route):
        return output, query.new_empty(query.shape[:3], dtype=torch.float32), nothing(query)
    weights = query.new_empty(*query.shape[:3], key.shape[2])
    return output, weights, torch.empty_like(weights) if route == "torch" and seed is not None else nothing(query)


def _save(ctx: Any, args: tuple, outputs: tuple) -> None:
    query, key, value, key_lengths, mask, *options, seed, stream, backend = args
    ctx.save_for_backward(query, key, value, *outputs, key_lengths, mask, seed)
    ctx.options = (*options, stream, backend)
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return (None,) * 12
    query, key, value, output, saved, kept, key_lengths, mask, seed = ctx.saved_tensors
    *options, stream, backend = ctx.options
    wants_mask = ctx.needs_input_grad[4]
    tensors = (grad, query, key, value, output, saved, kept, key_lengths, mask)
    d_query, d_key, d_value, d_mask = _backward(*tensors, *options, seed, stream, backend, wants_mask)
    return d_query, d_key, d_value, None, d_mask if wants_mask else None, *(None,) * 7


def _compute_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    saved: Tensor,
    kept: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    route = kernels.route(query, value, key.shape[2], backend)
    if route != "torch":
        options = kernel_options(key_lengths, mask, causal, causal_offset, dropout_p, seed, stream)
        d_query, d_key, d_value, d_mask = kernels.backward(
            route, grad, query, key, value, output, saved, scale, options, mask_gradient
        )
    else:
        d_query, d_key, d_value, d_mask = plain.backward(
            grad, query, key, value, saved, kept if seed is not None else None, mask if mask_gradient else None, scale
        )
    return d_query, d_key, d_value, nothing(query) if d_mask is None else d_mask


def _fake_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    saved: Tensor,
    kept: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_mask = mask.new_empty(mask.shape) if mask is not None and options[-1] else nothing(query)
    return (
        _heads_last(query, query.shape[-1]),
        _heads_last(key, key.shape[-1]),
        _heads_last(value, value.shape[-1]),
        d_mask,
    )


def autocast_products(args: tuple, dtype: torch.dtype) -> tuple:
    """Query, key and value as matrix products take them; an additive mask keeps its precision."""
    qkv = (a.to(dtype) if a.dtype != torch.float64 else a for a in args[:3])
    return (*qkv, *args[3:])


_backward = Operator(_BACKWARD, _compute_backward, _fake_backward)
_forward = Operator(_FORWARD, _compute, _fake, save=_save, backward=_differentiate, autocast=autocast_products)
