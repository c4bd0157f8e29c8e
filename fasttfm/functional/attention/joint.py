"""Attention on queries, keys and values as one product wrote them, with a gradient that one product reads.

A model projects all three at once, to (B, L, 3, H, D). attention() takes them as three views, and autograd then copies
three gradients together. Here the gradient of the joint tensor is allocated once and the kernels write into it; over
packed sequences likewise, for a model that computes no padding anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.attention import packed, routes
from fasttfm.functional.attention.arguments import Options, Sequences
from fasttfm.functional.attention.bias_sums import BiasSums, bias_gradients
from fasttfm.functional.attention.dense import check, pairs
from fasttfm.functional.attention.layout import by_head, by_part, in_planes, joined
from fasttfm.functional.attention.scoring import without_bias
from fasttfm.functional.derivative import pulled_back, refuse_parts
from fasttfm.functional.operator import REAL, Gradients, Operator, lowered, unplanned
from fasttfm.functional.signature import names_arguments


@names_arguments
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
    """attention() on projections in the layout of one joint product; the heads of its output are joined.

    joint (B, L, 3, H, D): queries, keys and values; or (B, S, 2, Hk, D), keys and values, with query (B, L, H, D).
    biases: those that the projections of joint and of query have added already, (3 * H * D,) or (2 * Hk * D,) and
    (H * D,), and which take their gradients from here; a kernel has these sums in registers, where a pass over the
    gradients of joint and query would read both again. As (B, .) of read_parameters() they take theirs in parts.
    key_lengths, mask, causal, dropout_p, scale, seed, site as attention() takes them; but a mask takes no gradient.
    Memory may hold the batch or the positions first: gradients, and what the kernels write, are laid out as the input.
    Returns (B, L, H * D). Raises ValueError for shapes or dtypes that do not agree, and for biases with a mask, whose
    sums no kernel has the registers for.
    """
    _check(joint, query, biases, 5, "(B, L, 3, H, D), or (B, S, 2, H, D) with query (B, L, H, D)")
    offset: int | Tensor = 0
    if mask is not None and type(mask) is not Tensor:
        queries = (joint if query is None else query).shape[1]
        mask, causal, offset = without_bias(mask, causal, 0, queries, joint.shape[1])  # type: ignore[assignment]
    check(*_heads(joint, query)[:2], key_lengths, mask)
    if mask is not None and (mask.requires_grad or biases is not None):
        raise ValueError("joint_attention's mask takes no gradient and no biases: attention() takes both")
    return joined_heads(
        joint, query, biases, Options.of(joint, key_lengths, mask, causal, offset, dropout_p, scale, seed, site)
    )


def joined_heads(
    joint: Tensor, query: Tensor | None, biases: tuple[Tensor, Tensor | None] | None, options: Options,
    choice: str | None = None,
) -> Tensor:  # fmt: skip
    """joint_attention() of shapes that are known to agree; choice as chosen()."""
    joint_bias, query_bias = biases or (None, None)
    route = routes.asked(*_heads(joint, query), options, choice)
    return _attention(joint, query, joint_bias, query_bias, options, route)[0]


@names_arguments
def joint_varlen_attention(
    joint: Tensor,
    query: Tensor | None,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    *,
    biases: tuple[Tensor, Tensor | None] | None = None,
    covered: bool = False,
    causal: bool = False,
    causal_offset: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """varlen_attention() on projections in the layout of one joint product; the heads of its output are joined.

    joint (T, 3, H, D): queries, keys and values; or (Tk, 2, Hk, D), keys and values, with query (Tq, H, D).
    biases as joint_attention() takes them, in parts (B, .) for B sequences. query_starts to site as
    varlen_attention() takes them; covered: the sequences reach to the last row, there is no filler to be zeroed.
    Returns (Tq, H * D). Raises ValueError for shapes or dtypes that do not agree.
    """
    _check(joint, query, biases, 4, "(T, 3, H, D), or (Tk, 2, H, D) with (Tq, H, D)")
    packed.check(*_packed_heads(joint, query), query_starts, key_starts)
    announced = Sequences(query_starts, key_starts, max_query, max_key)
    sequences = packed.checked_values(joint if query is None else query, joint, announced)
    options = Options.of(joint, None, None, causal, causal_offset, dropout_p, scale, seed, site)
    joint_bias, query_bias = biases or (None, None)
    route = packed.asked(*_packed_heads(joint, query), sequences, options)
    return _packed_attention(joint, query, joint_bias, query_bias, sequences, options, covered, route)[0]


def _check(
    joint: Tensor, query: Tensor | None, biases: tuple[Tensor, Tensor | None] | None, dimensions: int, wanted: str
) -> None:
    parts = 3 if query is None else 2
    if joint.dim() != dimensions or joint.shape[-3] != parts or (query is not None and query.dim() != dimensions - 1):
        given = "" if query is None else f" with query {tuple(query.shape)}"
        raise ValueError(f"joint {tuple(joint.shape)}{given} must be {wanted}")
    if joint.dtype not in REAL:
        raise ValueError(f"joint has dtype {joint.dtype}: float32, float16 or bfloat16 is needed")
    if biases is not None and (biases[1] is None) != (query is None):
        raise ValueError("biases must be (joint's, query's), the latter None where there is no query")


# -------------------------------------------------------------------------------------------------- padded sequences


class _Call(NamedTuple):
    joint: Tensor
    query: Tensor | None
    joint_bias: Tensor | None
    query_bias: Tensor | None
    options: Options
    route: str


class _Saved(NamedTuple):
    call: _Call
    output: Tensor
    """Empty where the weights are saved."""
    saved: Tensor
    """The weights before dropout or the log-sum-exp, as routes.saves_weights() says."""
    kept: Tensor
    """The weights after dropout, where the route saves them."""


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


def _heads(joint: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, ., D), as views."""
    parts = by_part(joint).unbind(0)
    return parts if query is None else (query.transpose(1, 2), *parts)  # type: ignore[return-value]


def _gradient_memory(x: Tensor, make: Callable[..., Tensor] = torch.empty_like) -> Tensor:
    """make(x), laid out as x where the numbers of a head's row are neighbours, as attention writes them."""
    return make(x, memory_format=torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format)


def _parts(joint: Tensor, query: Tensor | None) -> tuple[Tensor, ...]:
    """Joint, and query where it comes by itself, as (., B, H, ., D), which one launch copies."""
    return (by_part(joint),) if query is None else (by_part(joint), by_part(query.unsqueeze(2)))


def _heads_of(joint: Tensor, query: Tensor | None = None) -> tuple[Tensor, ...]:
    """Queries, keys and values of _parts()."""
    return joint.unbind(0) if query is None else (query[0], *joint.unbind(0))


_contiguous_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


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
        return output, lse, output.new_empty(0)
    q, k, v = _heads_of(*map(in_planes, _parts(call.joint, call.query)))
    output, saved, kept = routes.forward(call.route, q, k, v, call.options)
    return joined(output), saved, output.new_empty(0) if kept is None else kept


def _fake(call: _Call) -> tuple[Tensor, ...]:
    q, k, v = _heads(call.joint, call.query)
    return _empty_output(q, call.route), *routes.fake(call.route, q, k, v, call.options)[1:]


def _by_name(call: _Call | _PackedCall, gradients: tuple[Tensor, ...]) -> Gradients:
    return {name: d for name, x, d in zip(call._fields, call, gradients) if x is not None}


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of joint and query, laid out as these, and of their biases; empty where there is none.

    That of a bias given as (B, N) comes as B float32 parts of the sum, one a batch row.
    """
    (joint, query, joint_bias, query_bias, options, route), output, saved, kept = call.saved
    d_joint = _gradient_memory(joint)
    d_query = None if query is None else _gradient_memory(query)
    memory: tuple[Tensor, ...] = ()
    heads: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    if routes.saves_weights(route):  # by products, which read and write planes
        parts = tuple(map(in_planes, _parts(joint, query)))
        memory = tuple(map(_contiguous_like, parts))
        heads, out = _heads_of(*parts), _heads_of(*memory)
    else:
        heads, out = _heads(joint, query), _heads(d_joint, d_query)
        output = by_head(output, heads[0])
    q, k, v = heads
    sums = BiasSums.of(joint, query, joint.shape[0]) if route == "short" and joint_bias is not None else None
    routes.backward(
        route, by_head(call.grad, q), q, k, v, output, saved, kept, options,
        out=out, sums=None if sums is None else sums.of_heads(),
    )  # fmt: skip
    for part, written in zip(_parts(d_joint, d_query), memory):
        part.copy_(written)
    d_biases = bias_gradients((joint_bias, query_bias), (d_joint, d_query), sums, joint.shape[0])
    return d_joint, joint.new_empty(0) if d_query is None else d_query, *d_biases


def _fake_backward(call: _Backward | _PackedBackward) -> tuple[Tensor, ...]:
    joint, query, *biases = call.saved.call[:4]
    return (
        _gradient_memory(joint),
        joint.new_empty(0) if query is None else _gradient_memory(query),
        *(joint.new_empty(0) if bias is None else bias.new_empty(bias.shape) for bias in biases),
    )


_TENSORS = ("joint", "query", "joint_bias", "query_bias")


def _by_reference(call: _Call) -> Tensor:
    """The output in operations that PyTorch differentiates."""
    return joined(reference.attention(*_heads(*_biased(call)), **call.options.of_reference())[0])


def _biased(call: _Call | _PackedCall) -> tuple[Tensor, Tensor | None]:
    """joint and query, to which their biases were added, as functions of these too."""
    joint, query, joint_bias, query_bias = call[:4]
    refuse_parts(joint_bias, query_bias)
    if joint_bias is not None:
        joint = joint + (joint_bias - joint_bias.detach()).view(joint.shape[-3:])
    if query is not None and query_bias is not None:
        query = query + (query_bias - query_bias.detach()).view(query.shape[-2:])
    return joint, query


def _flops(call: _Call, backward: bool = False) -> int:
    q, k, v = _heads(call.joint, call.query)
    return routes.flops(pairs(q, k), q.shape[3], v.shape[3], call.route if backward else None)


_attention_backward = Operator(
    "joint_attention_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor)", unplanned(_compute_backward), _fake_backward,
    reference=lambda call: pulled_back(_by_reference, call.saved.call, _TENSORS, call.grad),
    flops=lambda call: _flops(call.saved.call, backward=True),
).call  # fmt: skip
_attention = Operator(
    "joint_attention",
    _Call,
    "(Tensor, Tensor, Tensor)",
    unplanned(_compute, 2),
    _fake,
    decide=lambda call: routes.decide(call.route, call.joint, call.joint, call.joint.shape[1]),
    save=routes.save,
    saved=_Saved,
    backward=lambda saved, _, grad, *_others: _by_name(saved.call, _attention_backward(grad, saved)),
    flops=_flops,
    rows=("joint", "query", "key_lengths"),
    autocast=lowered("joint", "query"),
).call

# -------------------------------------------------------------------------------------------------- packed sequences


class _PackedCall(NamedTuple):
    joint: Tensor
    query: Tensor | None
    joint_bias: Tensor | None
    query_bias: Tensor | None
    sequences: Sequences
    options: Options
    covered: bool
    route: str


class _PackedSaved(NamedTuple):
    """Tensors that the backward pass over packed sequences keeps."""

    call: _PackedCall
    output: Tensor
    saved: Tensor
    kept: Tensor


class _PackedBackward(NamedTuple):
    grad: Tensor
    saved: _PackedSaved


def _packed_heads(joint: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (T, H, D), as views."""
    parts = joint.unbind(1)
    return parts if query is None else (query, *parts)  # type: ignore[return-value]


def _of_heads(call: _PackedCall) -> packed.Call:
    """The same call of varlen_attention()."""
    return packed.Call(*_packed_heads(call.joint, call.query), call.sequences, call.options, call.route)


def _packed_compute(call: _PackedCall) -> tuple[Tensor, Tensor, Tensor]:
    output, saved, kept = packed.forward(_of_heads(call), call.covered)
    return output.flatten(1), saved, kept


def _packed_fake(call: _PackedCall) -> tuple[Tensor, ...]:
    output, saved, kept = packed.fake(_of_heads(call))
    return output.flatten(1), saved, kept


def _packed_compute_backward(call: _PackedBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of packed sequences, one part of a sum for each sequence."""
    given, output, saved, kept = call.saved
    joint, query, biases, sequences = given.joint, given.query, given[2:4], given.sequences
    heads = _of_heads(given)
    q, k = heads[:2]
    reached = given.covered and q.numel() and k.numel()
    make = torch.empty_like if reached else torch.zeros_like  # zero where no sequence reaches
    d_joint = _gradient_memory(joint, make)
    d_query = None if query is None else _gradient_memory(query, make)
    out = _packed_heads(d_joint, d_query)
    grad = call.grad.unflatten(1, (q.shape[1], -1))
    sums = None
    if routes.saves_weights(given.route):
        state = packed.Saved(heads, output, saved, kept)
        for memory, d in zip(out, packed.backward(grad, state)):
            memory.copy_(d)
    else:
        state = packed.Saved(heads, output.view(grad.shape), saved, kept)
        if given.route == "short" and given.joint_bias is not None and q.numel() and k.numel():
            sums = BiasSums.of(joint, query, sequences.batch)
        packed.kernel_backward(grad, state, out, None if sums is None else sums.of_heads())
    row = (d_joint[None], None if d_query is None else d_query[None])
    d_biases = bias_gradients(biases, row, sums, sequences.batch)
    return d_joint, joint.new_empty(0) if d_query is None else d_query, *d_biases


def _packed_by_reference(call: _PackedCall) -> Tensor:
    """The output in operations that PyTorch differentiates."""
    joint, query = _biased(call)
    return packed.by_reference(_of_heads(call._replace(joint=joint, query=query))).flatten(1)


_packed_attention_backward = Operator(
    "joint_attention_packed_backward",
    _PackedBackward,
    "(Tensor, Tensor, Tensor, Tensor)",
    unplanned(_packed_compute_backward),
    _fake_backward,
    reference=lambda call: pulled_back(_packed_by_reference, call.saved.call, _TENSORS, call.grad),
    flops=lambda call: packed.flops(_of_heads(call.saved.call), backward=True),
).call
_packed_attention = Operator(
    "joint_attention_packed",
    _PackedCall,
    "(Tensor, Tensor, Tensor)",
    unplanned(_packed_compute, 2),
    _packed_fake,
    decide=lambda call: routes.decide(call.route, call.joint, call.joint, call.sequences.max_key),
    save=routes.save,
    saved=_PackedSaved,
    flops=lambda call: packed.flops(_of_heads(call)),
    backward=lambda saved, _, grad, *_others: _by_name(saved.call, _packed_attention_backward(grad, saved)),
    autocast=lowered("joint", "query"),
).call
