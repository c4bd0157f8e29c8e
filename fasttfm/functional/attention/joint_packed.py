"""joint_attention() over packed sequences: what a model needs that computes no padding anywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.attention import packed, routes
from fasttfm.functional.attention.arguments import Options, Sequences, absent, autocast_projections
from fasttfm.functional.attention.bias_sums import BiasSums, bias_gradients, check_biases
from fasttfm.functional.backends import chosen
from fasttfm.functional.operator import Gradients, Operator


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
    """varlen_attention() on projections as they lie in memory; the heads of its output are joined.

    joint (T, 3, H, D): queries, keys and values; or (Tk, 2, Hk, D), keys and values, with query (Tq, H, D).
    biases as joint_attention() takes them, in parts (B, .) for B sequences. query_starts to site as
    varlen_attention() takes them; covered: the sequences reach to the last row, there is no filler to be zeroed.
    Returns (Tq, H * D). Raises ValueError for shapes or dtypes that do not agree.
    """
    parts = 3 if query is None else 2
    if joint.dim() != 4 or joint.shape[1] != parts:
        given = "" if query is None else f" with query {tuple(query.shape)}"
        raise ValueError(f"joint {tuple(joint.shape)}{given} must be (T, 3, H, D), or (Tk, 2, H, D) with (Tq, H, D)")
    packed.check(*_heads(joint, query), query_starts, key_starts)
    check_biases(biases, query)
    sequences = Sequences(query_starts, key_starts, max_query, max_key)
    options = Options.of(
        joint.shape, joint.device, scale, (dropout_p, seed, site), causal=causal, causal_offset=causal_offset
    )
    joint_bias, query_bias = biases or (None, None)
    return _attention(joint, query, joint_bias, query_bias, sequences, options, covered, chosen())[0]


class _Call(NamedTuple):
    joint: Tensor
    query: Tensor | None
    joint_bias: Tensor | None
    query_bias: Tensor | None
    sequences: Sequences
    options: Options
    covered: bool
    route: str


class _Saved(NamedTuple):
    joint: Tensor
    query: Tensor | None
    joint_bias: Tensor | None
    query_bias: Tensor | None
    output: Tensor
    saved: Tensor
    """What packed.Saved has of this name."""
    kept: Tensor
    sequences: Sequences
    options: Options
    covered: bool
    route: str


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved


def _heads(joint: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (T, H, D), as views."""
    parts = joint.unbind(1)
    return parts if query is None else (query, *parts)  # type: ignore[return-value]


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    heads = _heads(call.joint, call.query)
    output, saved, kept = packed.forward(call.route, *heads, call.sequences, call.options, call.covered)
    return output.flatten(1), saved, kept


def _fake(call: _Call) -> tuple[Tensor, ...]:
    output, saved, kept = packed.fake(call.route, *_heads(call.joint, call.query), call.sequences, call.options)
    return output.flatten(1), saved, kept


def _save(call: _Call, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple:
    return *call[:4], *outputs, call.sequences, call.options, call.covered, call.route


def _differentiate(saved: _Saved, wanted: _Call, grad: Tensor | None, *_: None) -> Gradients:
    if grad is None:
        return None
    gradients = dict(zip(_Call._fields, _attention_backward(grad, saved)))
    return {name: d for name, d in gradients.items() if getattr(saved, name) is not None}


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of joint, query and their biases, contiguous; empty where there is none."""
    joint, query, joint_bias, query_bias, output, saved, kept, sequences, options, covered, route = call.saved
    q, k, v = _heads(joint, query)
    reached = covered and q.numel() and k.numel()
    empty = torch.empty if reached else torch.zeros  # zero where no sequence reaches
    d_joint = empty(joint.shape, dtype=joint.dtype, device=joint.device)
    d_query = None if query is None else empty(query.shape, dtype=query.dtype, device=query.device)
    out = _heads(d_joint, d_query)
    grad, output = (x.view(q.shape[0], q.shape[1], -1) for x in (call.grad, output))
    state = packed.Saved(q, k, v, output, saved, kept, sequences, options, route)
    sums = None
    if routes.saves_weights(route):
        for memory, d in zip(out, packed.backward(grad, state)):
            memory.copy_(d)
    else:
        if route == "short" and joint_bias is not None and q.numel() and k.numel():
            sums = BiasSums.of(joint, query, sequences.batch)
        packed.kernel_backward(grad, state, out, None if sums is None else sums.of_heads())
    row = (d_joint[None], None if d_query is None else d_query[None])
    d_biases = bias_gradients((joint_bias, query_bias), row, sums, sequences.batch)
    return d_joint, absent(joint) if d_query is None else d_query, *d_biases


def _fake_backward(call: _Backward) -> tuple[Tensor, ...]:
    joint = call.saved.joint
    return tuple(absent(joint) if x is None else x.new_empty(x.shape) for x in call.saved[:4])


_attention_backward = Operator(
    "joint_attention_packed_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor)", _compute_backward, _fake_backward
)
_attention = Operator(
    "joint_attention_packed",
    _Call,
    "(Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    decide=lambda call: routes.decide(call.route, call.joint, call.joint, call.sequences.max_key),
    save=_save,
    saved=_Saved,
    backward=_differentiate,
    autocast=autocast_projections,
)
