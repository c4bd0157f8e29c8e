"""joint_attention() over packed sequences: what a model needs that computes no padding anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import _attention_kernels as kernels
from fasttfm.functional import attention_packed as packed
from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import seed_for
from fasttfm.functional._operators import Operator
from fasttfm.functional.attention import nothing
from fasttfm.functional.attention_joint import Sums, autocast_projections, bias_gradient


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
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """varlen_attention() on projections as they lie in memory; the heads of its output are joined.

    joint (T, 3, H, D): queries, keys and values; or (Tk, 2, H, D), keys and values, with query (Tq, H, D).
    biases as joint_attention() takes them, in parts (B, .) for B sequences. query_starts to stream as
    varlen_attention() takes them; covered: the sequences reach to the last row, there is no filler to be zeroed.
    Returns (Tq, H * D). Raises ValueError for shapes or dtypes that do not agree.
    """
    parts = 3 if query is None else 2
    if joint.dim() != 4 or joint.shape[1] != parts:
        given = "" if query is None else f" with query {tuple(query.shape)}"
        raise ValueError(f"joint {tuple(joint.shape)}{given} must be (T, 3, H, D), or (Tk, 2, H, D) with (Tq, H, D)")
    packed.check(*_heads(joint, query), query_starts, key_starts, dropout_p)
    if biases is not None and (biases[1] is None) != (query is None):
        raise ValueError("biases must be (joint's, query's), the latter None where there is no query")
    seed = seed_for(joint, dropout_p, seed)
    joint_bias, query_bias = biases or (None, None)
    return _forward(
        joint,
        query,
        joint_bias,
        query_bias,
        query_starts,
        key_starts,
        max_query,
        max_key,
        causal,
        dropout_p,
        joint.shape[-1] ** -0.5 if scale is None else scale,
        seed,
        stream,
        covered,
        chosen(),
    )[0]


def _heads(joint: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (T, H, D), as views."""
    parts = joint.unbind(1)
    return parts if query is None else (query, *parts)  # type: ignore[return-value]


def _compute(
    joint: Tensor, query: Tensor | None, joint_bias: Tensor | None, query_bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *shared, covered, backend = options
    output, saved, kept = packed.compute(*_heads(joint, query), *shared, backend, covered)  # type: ignore[call-arg]
    return output.flatten(1), saved, kept


def _fake(
    joint: Tensor, query: Tensor | None, joint_bias: Tensor | None, query_bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *shared, _, backend = options
    output, saved, kept = packed.fake(*_heads(joint, query), *shared, backend)  # type: ignore[call-arg]
    return joint.new_empty(output.shape[0], output.shape[1] * output.shape[2]), saved, kept


def _compute_backward(
    grad: Tensor,
    joint: Tensor,
    query: Tensor | None,
    joint_bias: Tensor | None,
    query_bias: Tensor | None,
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
    covered: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of joint, query and their biases, contiguous; empty where there is none."""
    q, k, v = _heads(joint, query)
    room = torch.empty if covered and q.numel() and k.numel() else torch.zeros  # zero where no sequence reaches
    d_joint = room(joint.shape, dtype=joint.dtype, device=joint.device)
    d_query = None if query is None else room(query.shape, dtype=query.dtype, device=query.device)
    out = _heads(d_joint, d_query)
    grad, output = (x.view(q.shape[0], q.shape[1], -1) for x in (grad, output))
    batch = query_starts.shape[0] - 1
    route = kernels.route(q, v, max_key, backend)
    sums = None
    if route == "short" and joint_bias is not None and q.numel() and k.numel():
        sums = Sums.of(joint, query, batch)
    if kernels.saves_weights(route):
        starts = (query_starts, key_starts, max_query, max_key)
        gradients = packed.compute_backward(
            grad, q, k, v, output, saved, kept, *starts, causal, dropout_p, scale, seed, stream, backend
        )
        for memory, d in zip(out, gradients):
            memory.copy_(d)
    else:
        sequences = (query_starts, key_starts, max_query, max_key)
        options = {"causal": causal, "dropout_p": dropout_p, "seed": seed, "stream": stream}
        places = None if sums is None else sums.places()
        kernels.packed_backward(route, grad, q, k, v, output, saved, scale, sequences, options, out=out, sums=places)
    parts_of = (None, None) if sums is None else (sums.joint, sums.query)
    d_biases = [
        nothing(joint) if bias is None or d is None else bias_gradient(bias, d[None], parts, batch)
        for bias, d, parts in zip((joint_bias, query_bias), (d_joint, d_query), parts_of)
    ]
    return d_joint, nothing(joint) if d_query is None else d_query, d_biases[0], d_biases[1]


def _fake_backward(
    grad: Tensor,
    joint: Tensor,
    query: Tensor | None,
    joint_bias: Tensor | None,
    query_bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(nothing(joint) if x is None else x.new_empty(x.shape) for x in (joint, query, joint_bias, query_bias))


def _save(ctx: Any, args: tuple, outputs: tuple) -> None:
    *tensors, max_query, max_key, causal, dropout_p, scale, seed, stream, covered, backend = args
    ctx.save_for_backward(*tensors[:4], *outputs, *tensors[4:], seed)
    ctx.options = (max_query, max_key, causal, dropout_p, scale, stream, covered, backend)
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return (None,) * 15
    *tensors, seed = ctx.saved_tensors
    *options, stream, covered, backend = ctx.options
    gradients = _backward(grad, *tensors, *options, seed, stream, covered, backend)
    return *(None if x is None else d for x, d in zip(tensors[:4], gradients)), *(None,) * 11


_ARGUMENTS = (
    "Tensor query_starts, Tensor key_starts, SymInt max_query, SymInt max_key, bool causal, float dropout_p, "
    "float scale, Tensor? seed, int stream, bool covered, str backend"
)
_backward = Operator(
    "joint_attention_packed_backward(Tensor grad, Tensor joint, Tensor? query, Tensor? joint_bias, "
    f"Tensor? query_bias, Tensor output, Tensor saved, Tensor kept, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)
_forward = Operator(
    "joint_attention_packed(Tensor joint, Tensor? query, Tensor? joint_bias, Tensor? query_bias, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    save=_save,
    backward=_differentiate,
    autocast=autocast_projections,
)
