"""softmax(Q K^T * scale) V as one torch operator, of heads, of packed projections and of packed sequences.

A call is told apart by what it is given: heads (B, H, L, D) of a query, a key and a value; projections as one product
wrote them, (B, L, 3, H, D) in place of the query, or (B, S, 2, Hk, D) in place of the key with a query (B, L, H, D),
whose gradients are laid out as they are and written in place; and each of these without B, sequences one after the
other, where cu_seqlens are given. All are views (B, H, ., D) of strides, which is what the kernels and our own loop on
a CPU read; PyTorch's ways read padded rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import attention_pass
from fasttfm.functional.attention import bias_sums, composed, kernel_plans, routes
from fasttfm.functional.attention.arguments import Options, Sequences
from fasttfm.functional.attention.call import (
    Call,
    Saved,
    gradient_memory,
    has_elements,
    is_empty,
    key_count,
    output_layout,
    sinks_gradient,
)
from fasttfm.functional.attention.checks import check
from fasttfm.functional.attention.layout import by_part, in_planes, joined, packed_again, padded
from fasttfm.functional.backends import BACKENDS, values_are_checked
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.operator import Operator, lowered, without_views

Outputs = tuple[Any, ...]


class _Backward(NamedTuple):
    grad: Tensor
    mask_gradient: bool
    saved: Saved


# --------------------------------------------------------------------------------------------------- which way it takes


def _prefers(call: Call) -> str:
    """The route that an eager call asks for: on a CPU our own loop or torch's kernel, where that is the faster way."""
    if call.route not in BACKENDS:
        return call.route
    query, key = call.query, call.query if call.key is None else call.key
    if call.packed and not (
        query.is_cpu and call.batch and values_are_checked(query) and query.numel() and key.numel()
    ):
        return call.route
    options = call.options
    route = routes.asked(*call.heads, options, call.route) if query.is_cpu else call.route
    plain = not call.packed and call.value is not None and (options.plain or routes.kernels_score(route, query))
    if route == "blocks" or not plain:
        return route
    fused = routes.takes_fused(*call[:3], call.mask, scale=call.scale, seed=call.seed)  # type: ignore[arg-type]
    return "fused" if fused else route


def _decide(call: Call) -> str:
    query, _, value = call.apart
    keys = call.max_seqlen_k if call.packed else key_count(call)
    return routes.decide(call.route, query, value, keys, call.options)


def _native(call: Call, direct: bool) -> Callable[[Call], tuple[Tensor]] | None:
    """Options that no kernel computes, by operations that PyTorch differentiates."""
    if call.value is None or call.route not in BACKENDS:
        return None
    if call.options.plain or routes.kernels_score(call.route, call.query):
        return None
    return _composed_packed if call.packed else _composed


def _composed(call: Call) -> tuple[Tensor]:
    return (composed.attention(*call[:3], call.options, fused),)


def _composed_packed(call: Call) -> tuple[Tensor]:
    if is_empty(call):
        sinks = call.sinks
        nothing = sum(x[:0].sum() for x in (*call.apart, *([] if sinks is None else [sinks])))  # its gradient is zero
        return (call.query.new_zeros(*call.query.shape[:2], call.apart[2].shape[-1]) + nothing,)
    output = composed.attention(*_pad(call), fused)
    return (packed_again(output, call.cu_seqlens_q, call.query),)  # type: ignore[arg-type]


def fused(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """attention() by torch's own CPU kernel, where routes.takes_fused() says so."""
    return attend(query, key, value, options=options, route="fused")


def attend(
    query: Tensor, key: Tensor | None, value: Tensor | None, query_bias: Tensor | None = None,
    key_bias: Tensor | None = None, *, options: Options, sequences: Sequences | None = None, covered: bool = False,
    route: str,
) -> Tensor:  # fmt: skip
    """The output of a call with these options; sequences: of packed rows."""
    lengths, mask, causal, offset, dropout_p, scale, seed, site, offsets, window, softcap, slopes, past, sinks = options
    starts = (None, None, 0, 0) if sequences is None else sequences
    return attention(
        query, key, value, query_bias, key_bias, lengths, starts[0], starts[1], mask, offsets, slopes, sinks, seed,
        starts[2], starts[3], causal, offset, window, softcap, past, dropout_p, scale, site, covered, route,
    )[0]  # fmt: skip


# --------------------------------------------------------------------------------------------------------- forward pass


def _pad(call: Call) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Queries, keys and values of the padded batch (B, H, ., D) of packed ones, and its options."""
    sequences = call.sequences
    assert sequences is not None
    query, key, value = call.apart
    return (
        padded(query, sequences.cu_seqlens_q, sequences.max_seqlen_q),
        padded(key, sequences.cu_seqlens_k, sequences.max_seqlen_k),
        padded(value, sequences.cu_seqlens_k, sequences.max_seqlen_k),
        call.options._replace(key_lengths=sequences.cu_seqlens_k.diff()),
    )


def _plan(call: Call) -> Callable[[Call], Outputs]:
    """The output; what is saved, as Saved has it; and what is kept beside."""
    if routes.saves_weights(call.route) or call.route == "fused":
        return without_views(_compute_padded if call.packed else _compute_weights, 2)
    shape, strides = output_layout(call)
    batch, heads, length = call.by_head(call.apart[0]).shape[:3]
    lines = (heads, length) if call.packed else (batch, heads, length)
    zeroed = call.packed and not (call.covered and not is_empty(call))  # where no sequence reaches

    def memory(call: Call) -> tuple[Tensor, Tensor]:
        output = call.query.new_empty_strided(shape, strides)
        lse = call.query.new_empty(lines, dtype=torch.float32)
        if zeroed:
            output.zero_()
            lse.zero_()
        return output, lse

    if not has_elements(shape):
        return lambda call: (*memory(call), None)
    if call.route != "blocks":
        return kernel_plans.forward(call, memory)

    def by_loop(call: Call) -> Outputs:
        output, lse = memory(call)
        of_rows = lse.expand(batch, -1, -1) if call.packed else lse
        out = call.output_by_head(output, heads), of_rows
        attention_pass.forward(*call.heads, call.options, out, call.sequences)
        return output, lse, None

    return by_loop


def _compute_weights(call: Call) -> Outputs:
    """By way of weights or of torch's own kernel, of whole rows."""
    if call.value is not None:
        return routes.forward(call.route, *call.heads, call.options)
    parts = map(in_planes, _parts(call.query, call.key))
    output, saved, kept = routes.forward(call.route, *_heads_of(*parts), call.options)
    return joined(output), saved, kept


def _compute_padded(call: Call) -> Outputs:
    """By way of weights, of packed rows that are padded."""
    if is_empty(call):
        weights, kept = (x if x is None else x.zero_() for x in _fake_saved(call))
        return call.query.new_zeros(output_layout(call)[0]), weights, None if call.sinks is None else kept
    output, weights, left = routes.forward(call.route, *_pad(call))
    query, starts = call.apart[0], call.cu_seqlens_q
    assert starts is not None
    if left is not None and call.sinks is not None:
        left = packed_again(left[..., None], starts, query)[..., 0].T.contiguous()
    output = packed_again(output, starts, query)
    return output if call.value is not None else output.flatten(1), weights, left


def _fake_saved(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return empty tensors in the shape of what is saved, the weights among it."""
    query = call.apart[0]
    if not call.packed:
        shape = (*call.by_head(query).shape[:3], key_count(call))
        return routes.fake_saved(call.route, query, shape, call.options)
    shape = (call.batch, query.shape[1], call.max_seqlen_q, call.max_seqlen_k)
    weights, kept = routes.fake_saved(call.route, query, shape, call.options)
    if call.sinks is not None:
        kept = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return weights, kept


def _fake(call: Call) -> Outputs:
    query = call.query
    output = query.new_empty_strided(*output_layout(call))
    if routes.saves_weights(call.route):
        return output, *_fake_saved(call)
    if call.packed:
        return output, query.new_empty(call.apart[0].shape[1::-1], dtype=torch.float32), None
    if call.value is not None:
        return output, *routes.fake(call.route, *call.heads, call.options)[1:]
    return output, query.new_empty(call.heads[0].shape[:3], dtype=torch.float32), None


# -------------------------------------------------------------------------------------------------------- backward pass


def _parts(query: Tensor, key: Tensor | None) -> tuple[Tensor, ...]:
    """Projections as (., B, H, ., D), which one launch copies."""
    return (by_part(query),) if key is None else (by_part(query.unsqueeze(2)), by_part(key))


def _heads_of(*parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of _parts()."""
    query, key, value = (part for each in parts for part in each.unbind(0))
    return query, key, value


def _save(call: Call, outputs: Outputs) -> tuple:
    """Saved of a call: without the output where weights are kept and there are no sinks, so that it may be changed in
    place."""
    output, saved, kept = outputs
    read = call.route not in routes.SAVING_WEIGHTS or call.sinks is not None
    return call, output if read else None, saved, kept


def _differentiate(
    backward: Callable[..., Outputs], saved: Saved, wanted: Any, grad: Tensor, *_: None
) -> tuple[Tensor | None, ...]:
    call = saved.call
    d_query, d_key, d_value, d_query_bias, d_key_bias, d_mask, d_sinks = backward(grad, wanted.mask is True, saved)
    return (
        d_query, None if call.key is None else d_key, None if call.value is None else d_value,
        None if call.query_bias is None else d_query_bias, None if call.key_bias is None else d_key_bias,
        None, None, None, d_mask if wanted.mask else None, None, None, d_sinks if wanted.sinks else None, None,
    )  # fmt: skip


def _plan_backward(call: _Backward) -> Callable[[_Backward], Outputs]:
    """Gradients of query, key and value, of both biases, of the mask and of the sinks; None where there is none."""
    given = call.saved.call
    if given.route in ("short", "flash") and not is_empty(given):
        return kernel_plans.backward(call.grad, call.mask_gradient, call.saved)
    return without_views(_compute_backward)


def _compute_backward(backward: _Backward) -> Outputs:
    grad, mask_gradient, (call, output, saved, kept) = backward
    gradients: Any
    d_mask: Tensor | None = None
    if is_empty(call):
        gradients = [None if x is None else x.zero_() for x in gradient_memory(call)(call)]
        d_mask = torch.zeros_like(call.mask) if call.mask is not None and mask_gradient else None
    elif call.route == "blocks":
        gradients, heads = gradient_memory(call)(call), call.heads
        out = call._replace(query=gradients[0], key=gradients[1], value=gradients[2]).heads
        count = heads[0].shape[1]
        of_rows = saved.expand(call.batch, -1, -1) if call.packed else saved
        rows = call.output_by_head(grad, count), *heads, call.output_by_head(output, count)  # type: ignore[arg-type]
        attention_pass.backward(*rows, of_rows, call.options, out, call.sequences)
    else:
        way = _padded_gradients if call.packed else _weights_gradients
        *gradients, d_mask = way(grad, call, output, saved, kept, mask_gradient)
    sums = zip(call[3:5], bias_sums.of_rows(call, gradients))
    biases = [None if bias is None or rows is None else rows.flatten(1).sum(0).to(bias.dtype) for bias, rows in sums]
    return *gradients, *biases, d_mask, sinks_gradient(call, grad, output, saved, kept)


def _weights_gradients(
    grad: Tensor, call: Call, output: Tensor | None, saved: Tensor, kept: Tensor | None, mask_gradient: bool
) -> Outputs:
    """Gradients of query, key, value and mask, of whole rows by products, which read and write planes."""
    if call.value is not None:
        return routes.backward(
            call.route, grad, *call.heads, output, saved, kept, call.options, mask_gradient=mask_gradient
        )
    parts = tuple(map(in_planes, _parts(call.query, call.key)))
    memory = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in parts)
    heads = _heads_of(*parts)
    grad = call.output_by_head(grad, heads[0].shape[1])
    routes.backward(call.route, grad, *heads, output, saved, kept, call.options, out=_heads_of(*memory))
    gradients = gradient_memory(call)(call)
    for part, written in zip(_parts(gradients[0], gradients[1]), memory):
        part.copy_(written)
    return *gradients, None


def _padded_gradients(
    grad: Tensor, call: Call, output: Tensor | None, weights: Tensor, kept: Tensor | None, mask_gradient: bool
) -> Outputs:
    """The same of packed rows, which are padded."""
    query, key, value = call.apart
    starts = call.sequences
    assert starts is not None
    if call.value is None:
        grad = grad.unflatten(1, (query.shape[1], -1))
    past = torch.arange(starts.max_seqlen_q, device=grad.device) >= starts.cu_seqlens_q.diff()[:, None]
    g = padded(grad, starts.cu_seqlens_q, starts.max_seqlen_q).masked_fill(past[:, None, :, None], 0.0)
    q, k, v, options = _pad(call)
    padded_gradients = routes.backward(call.route, g, q, k, v, output, weights, kept, options)[:3]
    of_rows = starts.cu_seqlens_q, starts.cu_seqlens_k, starts.cu_seqlens_k
    gradients = tuple(packed_again(d, each, x) for d, each, x in zip(padded_gradients, of_rows, (query, key, value)))
    if call.value is not None:
        return *gradients, None
    memory = gradient_memory(call)(call)
    for part, written in zip(call._replace(query=memory[0], key=memory[1]).apart, gradients):
        part.copy_(written)
    return *memory, None


def _fake_backward(backward: _Backward) -> Outputs:
    _, mask_gradient, (call, *_) = backward
    biases = (x if x is None else x.new_empty(x.shape) for x in call[3:5])
    mask = call.mask.new_empty(call.mask.shape) if call.mask is not None and mask_gradient else None
    sinks = None if call.sinks is None else call.sinks.new_empty(call.sinks.shape)
    return *gradient_memory(call)(call), *biases, mask, sinks


# ---------------------------------------------------------------------------------------------------- registration


def _by_reference(call: Call) -> Tensor:
    """The output in operations that PyTorch differentiates, of biases too."""
    query, key = (
        x if bias is None or x is None else x + (bias - bias.detach()).view(x.shape[x.dim() - (3 if joint else 2) :])
        for x, bias, joint in ((call.query, call.query_bias, call.key is None), (call.key, call.key_bias, True))
    )
    call = call._replace(query=query, key=key)  # type: ignore[arg-type]
    options = call.options.of_reference()
    if not call.packed:
        output = reference.attention(*call.heads, **options)[0]
        return output if call.value is not None else joined(output)
    given = {name: x for name, x in options.items() if name not in ("mask", "key_lengths")}
    if call.slopes is not None:
        given["alibi_slopes"] = call.slopes.expand(call.batch, -1)
    starts: Any = call.cu_seqlens_q, call.cu_seqlens_k
    output = reference.varlen_attention(*call.apart, *starts, **given)
    return output if call.value is not None else output.flatten(1)


def _reference_backward(backward: _Backward) -> Sequence[Tensor]:
    names = ("query", "key", "value", "query_bias", "key_bias", "mask", "sinks")
    return pulled_back(_by_reference, backward.saved.call, names, backward.grad)


def _flops(call: Call, backward: bool = False) -> int:
    """Operations of the products within the sequences; without numbers, as if all were as long as announced."""
    query, _, value = call.apart
    heads, queries = query.shape[1 if call.value is not None and not call.packed else -2], query.shape[-2]
    if call.packed:
        lengths = [[most] * call.batch for most in (call.max_seqlen_q, call.max_seqlen_k)]
        starts = call.cu_seqlens_q, call.cu_seqlens_k
        if type(starts[0]) is Tensor and not starts[0].is_meta:
            lengths = [each.diff().tolist() for each in starts]  # type: ignore[union-attr]
        pairs = heads * sum(map(operator.mul, *lengths))
    else:
        queries = query.shape[1] if call.value is None else queries
        pairs = call.batch * heads * queries * key_count(call)
    return routes.flops(pairs, query.shape[-1], value.shape[-1], call.route if backward else None)


_attention_backward = Operator(
    "attention_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _plan_backward,
    _fake_backward, reference=_reference_backward, flops=lambda call: _flops(call.saved.call, backward=True), leading=2,
    autocast=lambda call, dtype: call,  # it has products
)  # fmt: skip
OPERATOR = Operator(
    "attention", Call, "(Tensor, Tensor, Tensor)", _plan, _fake, checks=check, native=_native, prefers=_prefers,
    decide=_decide, save=_save, saved=Saved, backward=_differentiate, derivative=_attention_backward, flops=_flops,
    visible=1, free=("site",), rows=("query", "key", "value", "key_lengths"),
    autocast=lowered("query", "key", "value"),  # an additive mask keeps its precision
)  # fmt: skip
attention: Callable[..., Any] = OPERATOR.call
