"""Attention on queries, keys and values as one product wrote them, with a gradient that one product reads.

A model projects all three at once, to (B, L, 3, H, D). attention() takes them as three views, and autograd then copies
three gradients together. Here the gradient of the joint tensor is allocated once and the kernels write into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import _attention_kernels as kernels
from fasttfm.functional import _attention_torch as plain
from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import seed_for
from fasttfm.functional._operators import Operator
from fasttfm.functional.attention import check, kernel_options, nothing


def joint_attention(
    joint: Tensor,
    query: Tensor | None = None,
    *,
    biases: tuple[Tensor, Tensor | None] | None = None,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """attention() on projections as they lie in memory; the heads of its output are joined.

    joint (B, L, 3, H, D): queries, keys and values; or (B, S, 2, H, D), keys and values, with query (B, L, H, D).
    biases: those that the projections of joint and of query have added already, (3 * H * D,) or (2 * H * D,) and
    (H * D,), and which take their gradients from here; a kernel has these sums in registers, where a pass over the
    gradients of joint and query would read both again. As (B, .) of read_parameters() they take theirs in parts.
    key_lengths, mask, causal, dropout_p, scale, seed, stream as attention() takes them; but a mask takes no gradient.
    Memory may hold the batch or the positions first: gradients, and what the kernels write, are laid out as the input.
    Returns (B, L, H * D). Raises ValueError for shapes or dtypes that do not agree, and for biases with a mask, whose
    sums no kernel has the registers for.
    """
    parts = 3 if query is None else 2
    if joint.dim() != 5 or joint.shape[2] != parts or (query is not None and query.dim() != 4):
        given = "" if query is None else f" with query {tuple(query.shape)}"
        raise ValueError(
            f"joint {tuple(joint.shape)}{given} must be (B, L, 3, H, D), or (B, S, 2, H, D) with query (B, L, H, D)"
        )
    check(*_heads(joint, query)[:2], key_lengths, mask, dropout_p)
    if mask is not None and (mask.requires_grad or biases is not None):
        raise ValueError("joint_attention's mask takes no gradient and no biases: attention() takes both")
    if biases is not None and (biases[1] is None) != (query is None):
        raise ValueError("biases must be (joint's, query's), the latter None where there is no query")
    seed = seed_for(joint, dropout_p, seed)
    joint_bias, query_bias = biases or (None, None)
    return _forward(
        joint,
        query,
        joint_bias,
        query_bias,
        key_lengths,
        mask,
        causal,
        dropout_p,
        joint.shape[-1] ** -0.5 if scale is None else scale,
        seed,
        stream,
        chosen(),
    )[0]


def joint_programs(batch: int, keys: int, head_size: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Into how many parts joint_attention()'s kernels sum the gradients of its biases; None where none sums them.

    keys: of the longest row; head_size: D; dtype: of the projections.
    """
    like = torch.empty(0, head_size, dtype=dtype, device=device)
    return batch if kernels.route(like, like, keys, chosen()) == "short" else None


def _heads(joint: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, ., D), as views."""
    parts = joint.permute(2, 0, 3, 1, 4).unbind(0)
    return parts if query is None else (query.transpose(1, 2), *parts)  # type: ignore[return-value]


def _joined(output: Tensor) -> Tensor:
    """(B, H, L, D), heads last in memory, to (B, L, H * D)."""
    return output.transpose(1, 2).flatten(2)


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    """x (B, L, H * D) as (B, H, L, D), for query (B, H, L, D)."""
    return x.unflatten(2, query.shape[1::2]).transpose(1, 2)


def _room(query: Tensor, route: str) -> Tensor:
    """Memory for the output (B, L, H * D) of query (B, H, L, D), positions first where the query has them first."""
    batch, heads, length, size = query.shape
    if _writes(route) and query.stride(0) < query.stride(2):
        return query.new_empty(length, batch, heads * size).transpose(0, 1)
    return query.new_empty(batch, length, heads * size)


def _writes(route: str) -> bool:
    """Whether the forward kernel of this route writes where it is told to."""
    return route in ("short", "flash")


def _compute(
    joint: Tensor,
    query: Tensor | None,
    joint_bias: Tensor | None,
    query_bias: Tensor | None,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _heads(joint, query)
    route = kernels.route(q, v, k.shape[2], backend)
    options = kernel_options(key_lengths, mask, causal, 0, dropout_p, seed, stream)
    if _writes(route):
        room, lse = _room(q, route), q.new_empty(q.shape[:3], dtype=torch.float32)
        kernels.forward(route, q, k, v, scale, options | {"out": (_by_head(room, q), lse)})
        return room, lse, nothing(joint)
    if route != "torch":
        output, saved = kernels.forward(route, q, k, v, scale, options)
        return _joined(output), saved, nothing(joint)
    output, weights, kept = plain.forward(q, k, v, key_lengths, mask, causal, 0, dropout_p, scale, seed, stream)
    return _joined(output), weights, nothing(joint) if kept is None else kept


def _fake(joint: Tensor, query: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, seed, _, backend = options
    q, k, v = _heads(joint, query)
    route = kernels.route(q, v, k.shape[2], backend)
    output = _room(q, route)
    if not kernels.saves_weights(route):
        return output, q.new_empty(q.shape[:3], dtype=torch.float32), nothing(joint)
    weights = q.new_empty(*q.shape[:3], k.shape[2])
    return output, weights, torch.empty_like(weights) if route == "torch" and seed is not None else nothing(joint)


def _compute_backward(
    grad: Tensor,
    joint: Tensor,
    query: Tensor | None,
    joint_bias: Tensor | None,
    query_bias: Tensor | None,
    output: Tensor,
    saved: Tensor,
    kept: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of joint and query, laid out as these, and of their biases; empty where there is none.

    That of a bias given as (B, N) comes as B float32 parts of the sum, one a batch row.
    """
    d_joint = torch.empty_like(joint)
    d_query = None if query is None else torch.empty_like(query)
    q, k, v = _heads(joint, query)
    grad, output = _by_head(grad, q), _by_head(output, q)
    route = kernels.route(q, v, k.shape[2], backend)
    out = _heads(d_joint, d_query)
    sums = None
    if route == "short" and joint_bias is not None:
        sums = Sums.of(joint, query, joint.shape[0])
    if route != "torch":
        options = kernel_options(key_lengths, mask, causal, 0, dropout_p, seed, stream)
        places = None if sums is None else sums.places()
        kernels.backward(route, grad, q, k, v, output, saved, scale, options, False, out=out, sums=places)
    else:
        plain.backward(grad, q, k, v, saved, kept if seed is not None else None, None, scale, out=out)
    d_biases = []
    parts_of = (None, None) if sums is None else (sums.joint, sums.query)
    for bias, d, parts in zip((joint_bias, query_bias), (d_joint, d_query), parts_of):
        d_biases.append(nothing(joint) if bias is None or d is None else bias_gradient(bias, d, parts, joint.shape[0]))
    return d_joint, nothing(joint) if d_query is None else d_query, d_biases[0], d_biases[1]


@dataclass(frozen=True, slots=True)
class Sums:
    """Room for what each batch row adds to the gradients of the biases."""

    joint: Tensor
    """(B, 3 or 2, H, D) float32."""
    query: Tensor | None
    """(B, H, D) float32, with a query of its own."""

    @classmethod
    def of(cls, joint: Tensor, query: Tensor | None, batch: int) -> Sums:
        """joint (..., 3 or 2, H, D), query (..., H, D)."""
        parts, heads, size = joint.shape[-3:]
        return cls(
            joint.new_empty(batch, parts, heads, size, dtype=torch.float32),
            None if query is None else joint.new_empty(batch, heads, size, dtype=torch.float32),
        )

    def places(self) -> tuple[Tensor, ...]:
        """Those of queries, keys and values (B, H, D)."""
        parts = self.joint.unbind(1)
        return parts if self.query is None else (self.query, *parts)


def bias_gradient(bias: Tensor, d: Tensor, parts: Tensor | None, batch: int) -> Tensor:
    """From d (B, L, ..., H, D), or from its sums over L where a kernel made them; batch: parts that are wanted."""
    if parts is None:
        parts = d.sum(1, dtype=torch.promote_types(d.dtype, torch.float32))
    parts = parts.flatten(1)
    if bias.dim() == 1:
        return parts.sum(0).to(bias.dtype)
    return parts if parts.shape[0] == batch else torch.nn.functional.pad(parts, (0, 0, 0, batch - parts.shape[0]))


def _fake_backward(
    grad: Tensor,
    joint: Tensor,
    query: Tensor | None,
    joint_bias: Tensor | None,
    query_bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(joint),
        nothing(joint) if query is None else torch.empty_like(query),
        nothing(joint) if joint_bias is None else joint_bias.new_empty(joint_bias.shape),
        nothing(joint) if query_bias is None else query_bias.new_empty(query_bias.shape),
    )


def _save(ctx: Any, args: tuple, outputs: tuple) -> None:
    joint, query, joint_bias, query_bias, key_lengths, mask, *options, seed, stream, backend = args
    ctx.save_for_backward(joint, query, joint_bias, query_bias, *outputs, key_lengths, mask, seed)
    ctx.options = (*options, stream, backend)
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return (None,) * 12
    joint, query, joint_bias, query_bias, *rest, seed = ctx.saved_tensors
    *options, stream, backend = ctx.options
    given = (joint, query, joint_bias, query_bias)
    gradients = _backward(grad, *given, *rest, *options, seed, stream, backend)
    return *(None if x is None else d for x, d in zip(given, gradients)), *(None,) * 8


def autocast_projections(args: tuple, dtype: torch.dtype) -> tuple:
    """Projections as matrix products take them."""
    cast = (a if a is None or a.dtype == torch.float64 else a.to(dtype) for a in args[:2])
    return (*cast, *args[2:])


_backward = Operator(
    "joint_attention_backward(Tensor grad, Tensor joint, Tensor? query, Tensor? joint_bias, Tensor? query_bias, "
    "Tensor output, Tensor saved, Tensor kept, Tensor? key_lengths, Tensor? mask, bool causal, float dropout_p, "
    "float scale, Tensor? seed, int stream, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)
_forward = Operator(
    "joint_attention(Tensor joint, Tensor? query, Tensor? joint_bias, Tensor? query_bias, Tensor? key_lengths, "
    "Tensor? mask, bool causal, float dropout_p, float scale, Tensor? seed, int stream, str backend) "
    "-> (Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    save=_save,
    backward=_differentiate,
    autocast=autocast_projections,
)
