"""Attention as one torch operator, for heads, packed projections and packed sequences.

Inputs are heads (B, H, L, D) of query, key and value; or packed projections, (B, L, 3, H, D) as the query, or
(B, S, 2, Hk, D) as the key with a query (B, L, H, D), whose gradients are written in place in the same layout; or, with
cu_seqlens, packed sequences: each of these without B. The kernels and the CPU loop read all of them as strided views
(B, H, ., D); PyTorch's products read padded copies of packed sequences.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import attention_pass
from fasttfm.functional.attention import kernel_plans, library, products
from fasttfm.functional.attention.arguments import check
from fasttfm.functional.attention.backend import LEAST_BAND, MOST_IN_BAND, backend_of, cpu_backend, takes_fused
from fasttfm.functional.attention.call import (
    KERNELS,
    SAVING_WEIGHTS,
    Call,
    Options,
    Saved,
    Sequences,
    gradient_memory,
    is_empty,
    output_layout,
    packed_again,
    padded,
    sinks_gradient,
)
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.dropout import wide
from fasttfm.functional.operator import Operator, lowered, without_views

Outputs = tuple[Any, ...]


class _Backward(NamedTuple):
    grad: Tensor
    mask_gradient: bool
    bias_dtype: torch.dtype | None
    """Dtype of the bias gradients of packed projections; None: not requested."""
    d_key: Tensor | None
    """Buffer for the gradient of packed keys and values, a slice of a wider one; None: allocated. Direct calls only."""
    saved: Saved


def attend(
    query: Tensor, key: Tensor, value: Tensor, options: Options, backend: str, sequences: Sequences | None = None, *,
    only_weights: bool = False,
) -> Tensor:  # fmt: skip
    """Call the operator with these options; sequences: boundaries of packed rows; only_weights as in Call."""
    lengths, mask, causal, offset, dropout_p, scale, seed, site, offsets, window, softcap, slopes, past, sinks = options
    starts = (None, None, 0, 0) if sequences is None else sequences
    return attention(
        query, key, value, lengths, starts[0], starts[1], mask, offsets, slopes, sinks, seed, starts[2], starts[3],
        causal, offset, window, softcap, past, dropout_p, scale, site, False, only_weights, backend,
    )[0]  # fmt: skip


# --------------------------------------------------------------------------------------------------- bands of a window


def _by_bands(call: Call) -> tuple[Tensor]:
    """Compute a windowed call band by band: some queries at a time, over the keys in their window."""
    query, key, value, options = _operands(call)
    outputs = []
    for (first, last), (start, end) in _bands(query.shape[2], key.shape[2], options):
        rows = query[:, :, first:last], key[:, :, start:end], value[:, :, start:end]
        part = products.part_of(options, (first, last), (start, end))
        backend = "fused" if takes_fused(*rows, part) else "explicit"
        outputs.append(attention(*rows, *part[3:-1], backend)[0])
    output = torch.cat(outputs, dim=2)
    if not call.packed:
        return (output.transpose(1, 2).contiguous().transpose(1, 2),)
    return (packed_again(output, call.cu_seqlens_q, len(call.query)),)  # type: ignore[arg-type]


def _bands(queries: int, keys: int, call: Call) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the ranges of queries, each with the range of keys that they see."""
    least = most = call.causal_offset
    if call.offsets is not None:
        least, most = least + int(call.offsets.min()), most + int(call.offsets.max())
    step = min(max(call.window + 1, LEAST_BAND), MOST_IN_BAND)
    for first in range(0, queries, step):
        last = min(first + step, queries)
        start = min(max(first + least - call.window, 0), keys)
        yield (first, last), (start, max(min(last + most, keys), start))


# --------------------------------------------------------------------------------------------------------- forward pass


def _plan(call: Call) -> Callable[[Call], Outputs]:
    """Compute the output, and saved, kept and lse as in Saved."""
    if call.backend == "cudnn":
        return without_views(library.forward, 3)
    if call.backend not in (*KERNELS, "blocks"):
        return without_views(functools.partial(_by_products, {}), 3)
    shape, strides = output_layout(call)
    batch, heads, length = call.by_head(call.apart[0]).shape[:3]
    lines = (heads, length) if call.packed else (batch, heads, length)
    zeroed = call.packed and not (call.covered and not is_empty(call))  # rows outside the sequences

    def memory(call: Call) -> tuple[Tensor, Tensor]:
        output = call.query.new_empty_strided(shape, strides)
        lse = call.query.new_empty(lines, dtype=torch.float32)
        if zeroed:
            output.zero_()
            lse.zero_()
        return output, lse

    if not all(size > 0 for size in shape):
        return lambda call: (*memory(call), None, None)
    if call.backend != "blocks":
        return kernel_plans.forward(call, memory)

    keys = call.sizes[3]
    saves = torch.is_grad_enabled() and attention_pass.saves_weights(math.prod(lines), keys, call)

    def by_loop(call: Call) -> Outputs:
        output, lse = memory(call)
        of_rows = lse.expand(batch, -1, -1) if call.packed else lse
        weights = lse.new_empty(*lines, keys) if saves else None
        attention_pass.forward(call, call.output_by_head(output, heads), of_rows, weights)
        return output, lse, weights, None

    return by_loop


def _by_products(cache: dict[str, Any], call: Call) -> Outputs:
    if call.packed and is_empty(call):
        return tuple([x if x is None else x.zero_() for x in _fake(call)])
    output, saved, kept, lse = products.forward(call.backend, *_operands(call), cache, only_weights=call.only_weights)
    if call.packed:
        query, starts = call.apart[0], call.cu_seqlens_q
        assert starts is not None
        output = packed_again(output, starts, len(query)).clone()
        if lse is not None:
            lse = packed_again(lse[..., None], starts, len(query))[..., 0].T.contiguous()
    if call.value is None:
        output = (output if call.packed else output.transpose(1, 2)).flatten(-2)
    return output, saved, kept, lse


def _operands(call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    """Queries, keys and values (B, H, ., D), and the call on them.

    Packed sequences are padded; packed projections are copied, one launch each.
    """
    if call.packed:
        sequences, (query, key, value) = call.sequences, call.apart
        assert sequences is not None
        q = padded(query, sequences.cu_seqlens_q, sequences.max_seqlen_q)
        k, v = (padded(x, sequences.cu_seqlens_k, sequences.max_seqlen_k) for x in (key, value))
        lengths = sequences.cu_seqlens_k.diff()
        return q, k, v, call._replace(key_lengths=lengths, cu_seqlens_q=None, cu_seqlens_k=None)
    if call.value is not None:
        return *call.heads, call
    parts = (x.flatten(1, 2).unflatten(1, x.shape[1:3]) for x in _parts(*call[:3]))
    query, key, value = (part for each in parts for part in each.unbind(0))
    return query, key, value, call


def _parts(query: Tensor, key: Tensor | None, value: Tensor | None) -> list[Tensor]:
    """Views (., B, H, ., D) of the operands, one per tensor; the first dimension counts the packed projections."""
    if value is not None:
        return [x.unsqueeze(0) for x in (query, key, value)]  # type: ignore[union-attr]
    packed = (query,) if key is None else (query.unsqueeze(2), key)
    return [x.permute(2, 0, 3, 1, 4) for x in packed]


def _fake(call: Call) -> Outputs:
    query, (batch, heads, queries, keys) = call.query, call.sizes
    output = query.new_empty_strided(*output_layout(call))
    lines = (heads, query.shape[0]) if call.packed else (batch, heads, queries)
    if call.backend not in SAVING_WEIGHTS:
        addend = products.fused_addend(*call.heads[:2], call) if call.backend == "fused" and not call.packed else None
        kept = None if addend is None else torch.empty_like(addend)
        of_rows = (batch, heads, queries) if call.backend == "fused" else lines
        return output, query.new_empty(of_rows, dtype=torch.float32), kept, None
    weights = query.new_empty(batch, heads, queries, keys)
    kept = None
    if call.backend == "explicit" and (call.seed is not None or call.softcap):
        kept = weights if call.seed is not None else weights.to(wide(query.dtype))  # after dropout, or what tanh made
        kept = torch.empty_like(kept)
    dtype = torch.float32 if call.backend == "softmax" else wide(query.dtype)
    return output, weights, kept, None if call.sinks is None else query.new_empty(lines, dtype=dtype)


# -------------------------------------------------------------------------------------------------------- backward pass


def _save(call: Call, outputs: Outputs) -> tuple:
    """The fields of Saved; without the output if no gradient reads it, so that it may be changed in place."""
    read = call.backend not in SAVING_WEIGHTS or call.sinks is not None
    return call, outputs[0] if read else None, *outputs[1:]


def _differentiate(
    backward: Callable[..., Outputs], saved: Saved, needs_grad: Any, grad: Tensor, *_: None
) -> tuple[Tensor | None, ...]:
    call = saved.call
    derived = backward(_attention_backward.record((grad, needs_grad.mask is True, None, None, saved)))
    d_query, d_key, d_value, _, _, d_mask, d_sinks = derived
    d_value = None if call.value is None or call.only_weights else d_value
    return (
        d_query, None if call.key is None else d_key, d_value, None, None, None,
        d_mask if needs_grad.mask else None, None, None, d_sinks if needs_grad.sinks else None, None,
    )  # fmt: skip


def _plan_backward(call: _Backward) -> Callable[[_Backward], Outputs]:
    """Compute the gradients of query, key, value, both biases, mask and sinks; None for an absent one.

    Bias gradients are also None if no kernel computes the sums.
    """
    forward = call.saved.call
    if forward.backend == "cudnn":
        return without_views(library.backward(*call))
    if forward.backend in KERNELS and not is_empty(forward):
        return kernel_plans.backward(*call)
    return without_views(functools.partial(_compute_backward, {}))


def _compute_backward(cache: dict[str, Any], backward: _Backward) -> Outputs:
    grad, mask_gradient, _, d_key, (call, output, saved, kept, _) = backward
    gradients: Any
    d_mask: Tensor | None = None
    if is_empty(call):
        gradients = [None if x is None else x.zero_() for x in gradient_memory(call)(call, d_key)]
        d_mask = torch.zeros_like(call.mask) if call.mask is not None and mask_gradient else None
    elif call.backend == "blocks":
        gradients, heads = gradient_memory(call)(call, d_key), call.sizes[1]
        out = call._replace(query=gradients[0], key=gradients[1], value=gradients[2]).heads
        of_rows = saved.expand(call.batch, -1, -1) if call.packed else saved
        rows = call.output_by_head(grad, heads), call.output_by_head(output, heads)  # type: ignore[arg-type]
        weights = None if kept is None or not kept.numel() else kept
        attention_pass.backward(call, *rows, of_rows, weights, out)
    else:
        *gradients, d_mask = _products_gradients(backward, cache)
    return *gradients, None, None, d_mask, sinks_gradient(backward.saved, grad)


def _products_gradients(backward: _Backward, cache: dict[str, Any]) -> Outputs:
    """Gradients of query, key, value and mask by matrix products."""
    grad, mask_gradient, _, d_key, saved = backward
    call, sequences = saved.call, saved.call.sequences
    query, key, value, options = _operands(call)
    if call.value is None:
        grad = grad.unflatten(-1, (query.shape[1], -1))
    if sequences is not None:
        starts, length = sequences.cu_seqlens_q, sequences.max_seqlen_q
        past = torch.arange(length, device=grad.device) >= starts.diff()[:, None]
        grad = padded(grad, starts, length).masked_fill(past[:, None, :, None], 0.0)
    elif call.value is None:
        grad = grad.transpose(1, 2)
    args = call.backend, grad, query, key, value, saved, options
    if call.backend == "fused" and call.value is not None and not call.packed:
        return *products.fused_backward(*args[1:]), None
    parts = [x.unsqueeze(0) for x in (query, key, value)] if call.packed else _parts(*call[:3])[: 3 - call.only_weights]
    memory = [x.new_empty(x.shape) for x in parts]
    written = [part for each in memory for part in each.unbind(0)]
    d_mask = products.backward(*args, mask_gradient, written, cache)
    gradients = gradient_memory(call._replace(covered=True))(call, d_key)
    if sequences is None:
        for part, source in zip(_parts(*gradients), memory):
            part.copy_(source)
    else:
        apart = call._replace(query=gradients[0], key=gradients[1], value=gradients[2]).apart
        boundaries = sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.cu_seqlens_k
        for part, source, starts in zip(apart, written, boundaries):
            part.copy_(packed_again(source, starts, len(part)))
    return *gradients[:2], None if call.only_weights else gradients[2], d_mask


def _fake_backward(backward: _Backward) -> Outputs:
    _, mask_gradient, dtype, d_key, (call, *_) = backward
    rows = kernel_plans.bias_rows(call) if dtype is not None and call.backend == "short" else (None, None)
    biases = [None if x is None else x.new_empty(x.shape[1:].numel(), dtype=dtype) for x in rows]
    mask = call.mask.new_empty(call.mask.shape) if call.mask is not None and mask_gradient else None
    sinks = None if call.sinks is None else call.sinks.new_empty(call.sinks.shape)
    d_query, d_key, d_value = gradient_memory(call)(call, d_key)
    return d_query, d_key, None if call.only_weights else d_value, *biases, mask, sinks


# ---------------------------------------------------------------------------------------------------- registration


def _by_reference(call: Call) -> Tensor:
    """The output in differentiable PyTorch."""
    diagonal = call.causal_offset - call.past
    options = {name: getattr(call, name) for name in ("softcap", "sinks", "dropout_p", "scale", "seed", "site")}
    options |= {
        "causal_offset": diagonal if call.offsets is None else call.offsets + diagonal,
        "window": (None if call.window == -1 else call.window - call.past, call.past if call.causal else None),
        "alibi_slopes": call.slopes,
    }
    if not call.packed:
        query, key, value = call.heads
        if call.only_weights:
            value = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], -1)
        output = reference.attention(query, key, value, mask=call.mask, key_lengths=call.key_lengths, **options)[0]
        return output if call.value is not None else output.transpose(1, 2).flatten(2)
    if call.slopes is not None:
        options["alibi_slopes"] = call.slopes.expand(call.batch, -1)
    starts: Any = call.cu_seqlens_q, call.cu_seqlens_k
    output = reference.varlen_attention(*call.apart, *starts, **options)
    return output if call.value is not None else output.flatten(1)


def _reference_backward(backward: _Backward) -> Sequence[Tensor]:
    names = ("query", "key", "value", "mask", "sinks")
    gradients = pulled_back(_by_reference, backward.saved.call, names, backward.grad)
    absent = backward.grad.new_empty(0)
    return *gradients[:3], absent, absent, *gradients[3:]


def _flops(call: Call, backward: bool = False) -> int:
    """FLOPs of the products within the sequences; if their lengths are unknown, all count as max_seqlen long."""
    query, _, value = call.apart
    batch, heads, queries, keys = call.sizes
    pairs = batch * queries * keys
    if call.packed and type(call.cu_seqlens_q) is Tensor and not call.cu_seqlens_q.is_meta:
        lengths = [starts.diff().tolist() for starts in (call.cu_seqlens_q, call.cu_seqlens_k)]  # type: ignore[union-attr]
        pairs = sum(map(operator.mul, *lengths))
    width, value_width = query.shape[-1], 0 if call.only_weights else value.shape[-1]
    if not backward:
        return 2 * heads * pairs * (width + value_width)
    return 2 * heads * pairs * ((2 if call.backend in SAVING_WEIGHTS else 3) * width + 2 * value_width)


def _backend(call: Call) -> str:
    query, _, value = call.apart
    return backend_of(call.backend, query, value, call.sizes[3], call)


def _decide(call: Call) -> str:
    backend = _backend(call)
    if call.only_weights:
        return "softmax" if backend in KERNELS else "explicit" if backend == "fused" else backend
    usable = _varies(call)
    return backend if usable is None or not usable(*call[:3]) else "cudnn"


def _varies(call: Call) -> Callable[..., bool] | None:
    """Whether cuDNN may compute these tensors now, if the table lists the call for it."""
    listed = _backend(call) in KERNELS and library.fits(call)
    return functools.partial(library.usable, causal=call.causal) if listed else None


_attention_backward = Operator(
    "attention_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _plan_backward,
    _fake_backward, reference=_reference_backward, flops=lambda call: _flops(call.saved.call, backward=True),
    autocast=lambda call, dtype: call,  # marks it as having products
)  # fmt: skip
OPERATOR = Operator(
    "attention", Call, "(Tensor, Tensor, Tensor, Tensor)", _plan, _fake, checks=check,
    prefers=cpu_backend, native=lambda call, direct: _by_bands if call.backend == "bands" else None, decide=_decide,
    varies=_varies, save=_save, saved=Saved, backward=_differentiate, derivative=_attention_backward, flops=_flops,
    visible=1, free=("site",),
    rows=("query", "key", "value", "key_lengths", "offsets", "slopes"),
    autocast=lowered("query", "key", "value"),  # an additive mask keeps its precision
)  # fmt: skip
attention: Callable[..., Any] = OPERATOR.call
