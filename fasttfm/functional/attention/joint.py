"""Attention on queries, keys and values as one product wrote them, with a gradient that one product reads.

A model projects all three at once, to (B, L, 3, H, D). attention() takes them as three views, and autograd then copies
three gradients together. Here the gradient of the joint tensor is allocated once and the kernels write into it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.attention import routes
from fasttfm.functional.attention.arguments import Options, absent, autocast_projections
from fasttfm.functional.attention.bias_sums import BiasSums, bias_gradients, check_biases
from fasttfm.functional.attention.dense import check
from fasttfm.functional.attention.layout import by_head, by_part, in_planes, joined
from fasttfm.functional.backends import chosen
from fasttfm.functional.operator import Gradients, Operator


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
    site: int = 0,
) -> Tensor:
    """attention() on projections as they lie in memory; the heads of its output are joined.

    joint (B, L, 3, H, D): queries, keys and values; or (B, S, 2, Hk, D), keys and values, with query (B, L, H, D).
    biases: those that the projections of joint and of query have added already, (3 * H * D,) or (2 * Hk * D,) and
    (H * D,), and which take their gradients from here; a kernel has these sums in registers, where a pass over the
    gradients of joint and query would read both again. As (B, .) of read_parameters() they take theirs in parts.
    key_lengths, mask, causal, dropout_p, scale, seed, site as attention() takes them; but a mask takes no gradient.
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
    check(*_heads(joint, query)[:2], key_lengths, mask)
    if mask is not None and (mask.requires_grad or biases is not None):
        raise ValueError("joint_attention's mask takes no gradient and no biases: attention() takes both")
    check_biases(biases, query)
    options = Options.of(
        joint.shape, joint.device, scale, (dropout_p, seed, site), causal=causal, key_lengths=key_lengths, mask=mask
    )
    joint_bias, query_bias = biases or (None, None)
    return _attention(joint, query, joint_bias, query_bias, options, chosen())[0]


def bias_programs(batch: int, keys: int, head_size: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Into how many parts joint_attention()'s kernels sum the gradients of its biases; None where none sums them.

    keys: of the longest row; head_size: D; dtype: of the projections.
    """
    like = torch.empty(0, head_size, dtype=dtype, device=device)
    return batch if routes.decide(chosen(), like, like, keys) == "short" else None


class _Call(NamedTuple):
    joint: Tensor
    query: Tensor | None
    joint_bias: Tensor | None
    query_bias: Tensor | None
    options: Options
    route: str


class _Saved(NamedTuple):
    joint: Tensor
    query: Tensor | None
    joint_bias: Tensor | None
    query_bias: Tensor | None
    output: Tensor
    saved: Tensor
    """The weights before dropout or the log-sum-exp, as routes.saves_weights() says."""
    kept: Tensor
    """The weights after dropout, where the route saves them."""
    options: Options
    route: str


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


def _heads(joint: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, ., D), as views."""
    parts = by_part(joint).unbind(0)
    return parts if query is None else (query.transpose(1, 2), *parts)  # type: ignore[return-value]


def _parts(joint: Tensor, query: Tensor | None) -> list[Tensor]:
    """Query, where it comes by itself, and joint as (., B, H, ., D), which one launch copies."""
    return [by_part(x) for x in ([joint] if query is None else [query.unsqueeze(2), joint])]


def _heads_of(parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Queries, keys and values of _parts()."""
    return tuple(x for part in parts for x in part.unbind(0))


def _empty_output(query: Tensor, route: str) -> Tensor:
    """Memory for the output (B, L, H * D) of query (B, H, L, D), positions first where the query has them first."""
    batch, heads, length, size = query.shape
    if routes.writes_where_told(route) and query.stride(0) < query.stride(2):
        return query.new_empty(length, batch, heads * size).transpose(0, 1)
    return query.new_empty(batch, length, heads * size)


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    if routes.writes_where_told(call.route):
        q, k, v = _heads(call.joint, call.query)
        output, lse = _empty_output(q, call.route), q.new_empty(q.shape[:3], dtype=torch.float32)
        routes.forward(call.route, q, k, v, call.options, (by_head(output, q), lse))
        return output, lse, absent(output)
    q, k, v = _heads_of([in_planes(part) for part in _parts(call.joint, call.query)])
    output, saved, kept = routes.forward(call.route, q, k, v, call.options)
    return joined(output), saved, absent(output) if kept is None else kept


def _fake(call: _Call) -> tuple[Tensor, ...]:
    q, k, v = _heads(call.joint, call.query)
    return _empty_output(q, call.route), *routes.fake(call.route, q, k, v, call.options)[1:]


def _save(call: _Call, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple:
    return *call[:4], *outputs, call.options, call.route


def _differentiate(saved: _Saved, wanted: _Call, grad: Tensor | None, *_: None) -> Gradients:
    if grad is None:
        return None
    gradients = dict(zip(_Call._fields, _attention_backward(grad, saved)))
    return {name: d for name, d in gradients.items() if getattr(saved, name) is not None}


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of joint and query, laid out as these, and of their biases; empty where there is none.

    That of a bias given as (B, N) comes as B float32 parts of the sum, one a batch row.
    """
    joint, query, joint_bias, query_bias, output, saved, kept, options, route = call.saved
    d_joint = torch.empty_like(joint)
    d_query = None if query is None else torch.empty_like(query)
    memory: list[Tensor] = []
    heads: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    if routes.saves_weights(route):  # by products, which read and write planes
        parts = [in_planes(part) for part in _parts(joint, query)]
        memory = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        heads, out = _heads_of(parts), _heads_of(memory)
    else:
        heads, out = _heads(joint, query), _heads(d_joint, d_query)
    q, k, v = heads
    sums = BiasSums.of(joint, query, joint.shape[0]) if route == "short" and joint_bias is not None else None
    routes.backward(
        route, by_head(call.grad, q), q, k, v, by_head(output, q), saved, kept, options,
        out=out, sums=None if sums is None else sums.of_heads(),
    )  # fmt: skip
    for part, written in zip(_parts(d_joint, d_query), memory):
        part.copy_(written)
    d_biases = bias_gradients((joint_bias, query_bias), (d_joint, d_query), sums, joint.shape[0])
    return d_joint, absent(joint) if d_query is None else d_query, *d_biases


def _fake_backward(call: _Backward) -> tuple[Tensor, ...]:
    joint, query, *biases = call.saved[:4]
    return (
        torch.empty_like(joint),
        absent(joint) if query is None else torch.empty_like(query),
        *(absent(joint) if bias is None else bias.new_empty(bias.shape) for bias in biases),
    )


_attention_backward = Operator(
    "joint_attention_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor)", _compute_backward, _fake_backward
)
_attention = Operator(
    "joint_attention",
    _Call,
    "(Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    decide=lambda call: routes.decide(call.route, call.joint, call.joint, call.joint.shape[1]),
    save=_save,
    saved=_Saved,
    backward=_differentiate,
    autocast=autocast_projections,
)
