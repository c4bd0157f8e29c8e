"""Attention in PyTorch: what runs where no Triton kernel does, and fast on the CPU.

Explicit: scores, softmax and the gradients of both are float32; weights, and the products with them, are of the input's
precision. The forward pass hands the weights to the backward pass: at sentence lengths they are small, and writing them
costs less than a second Q K^T and softmax. On a CPU this is several times faster in bfloat16 than torch's fused kernel,
whose softmax and backward pass are slow there; where numba is, a product and its softmax are one loop
(cpu/attention_pass.py).
Fused: that kernel, for longer rows of float32, where it is the faster way and keeps a number a row.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import attention_pass, training_passes
from fasttfm.cpu.linear import has_units
from fasttfm.functional.attention.arguments import LARGEST, Options
from fasttfm.functional.attention.layout import heads_last, planes
from fasttfm.functional.dropout import as_factor, wide
from fasttfm.functional.operator import Operator, Whole, without_views


def bias(queries: int, keys: int, like: Tensor, options: Options) -> Tensor | None:
    """Return the addend of the scaled scores, as small as broadcasting to (B, H, L, S) allows; None: nothing.

    like: of the scores' dtype and device.
    """
    key_lengths, mask, causal, causal_offset, *_ = options
    device, precise = like.device, wide(like.dtype)
    if mask is not None and mask.dim() == 0:
        mask = mask.view(1)  # a 0-d tensor would not take part in type promotion
    if mask is not None and mask.dtype not in (torch.bool, torch.float16):  # which reaches no further than -65,504
        mask = mask.masked_fill(mask < reference.LOWEST, -math.inf)
    shut = None
    if mask is not None and mask.dtype == torch.bool:
        shut, mask = ~mask, None
    parts: list[Tensor] = []
    if options.offsets is not None or options.window != -1 or options.slopes is not None:
        last = torch.arange(queries, device=device)[:, None] + causal_offset  # the key of a query's right border
        if options.offsets is not None:
            last = last + options.offsets.view(-1, 1, 1, 1)
        beyond = torch.arange(keys, device=device) - last
        if causal:
            parts.append(beyond > 0)
        if options.window != -1:
            parts.append(beyond < -options.window)
        if options.slopes is not None:
            distance = (beyond + options.past).abs().to(precise)
            added = -options.slopes.to(precise)[..., None, None] * distance
            mask = added if mask is None else mask.to(precise) + added
    elif causal and causal_offset < keys - 1:
        parts.append(torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(causal_offset + 1))
    if key_lengths is not None:
        parts.append(torch.arange(keys, device=device) >= key_lengths.view(-1, 1, 1, 1))
    if shut is not None:
        parts.append(shut)
    if not parts:
        return None if mask is None else mask.to(precise)
    hidden = functools.reduce(operator.or_, parts)
    if mask is None:
        return torch.zeros_like(hidden, dtype=precise).masked_fill_(hidden, -math.inf)
    return mask.to(precise).masked_fill(hidden, -math.inf)


def _empty(queries: int, bias: Tensor, options: Options) -> Tensor | None:
    """True for the rows that see no key, to be broadcast to (B, H, L, 1); None where there is none for sure."""
    empty: Tensor | None = None
    if options.mask is not None:
        empty = bias.amax(dim=-1, keepdim=True) == -math.inf
    else:
        if options.causal and options.causal_offset < 0:
            empty = (torch.arange(queries, device=bias.device) < -options.causal_offset)[:, None]
        if options.key_lengths is not None:
            without = options.key_lengths.view(-1, 1, 1, 1) <= 0
            empty = without if empty is None else empty | without
    known = empty is not None and empty.is_cpu and not torch.compiler.is_compiling()
    return None if known and not empty.any() else empty  # type: ignore[union-attr]


SOFTMAX_ROW = 16
"""Floats in the widest register: a shorter row falls to a loop in PyTorch that is ten times slower than a padded row,
on two cores of an AMD EPYC with AVX-512. A search's last bits depend on it, and on SOFTMAX_PADDED."""
SOFTMAX_PADDED = 4096
"""Numbers from which on padding shorter rows pays, there too."""


def _softmax(scores: Tensor) -> Tensor:
    """torch.softmax over the last dimension; may return a view of something wider."""
    keys = scores.shape[-1]
    compiling = torch.compiler.is_compiling()  # then lengths may be open
    if not compiling and keys < SOFTMAX_ROW and scores.device.type == "cpu" and scores.numel() > SOFTMAX_PADDED:
        scores = torch.nn.functional.pad(scores, (0, SOFTMAX_ROW - keys), value=-math.inf)
    return torch.softmax(scores, dim=-1)[..., :keys]


def weights(scores: Tensor, scale: float, options: Options, dtype: torch.dtype) -> Tensor:
    """softmax(scores * scale + mask) over the last dimension of scores (B, H, L, S), float32 at least, in dtype."""
    if not scores.numel():
        return scores.to(dtype)
    addend = bias(scores.shape[-2], scores.shape[-1], scores, options)
    p = _softmax(scores * scale if addend is None else torch.add(addend, scores, alpha=scale))
    if addend is not None and (empty := _empty(scores.shape[-2], addend, options)) is not None:
        p.masked_fill_(empty, 0.0)
    return p.to(dtype).contiguous()


def drop(p: Tensor, options: Options) -> Tensor | None:
    """Dropout on weights (B, H, L, S), by the convention of kernels/philox.py; None where nothing is dropped."""
    if options.seed is None:
        return None
    keep = _keep_mask(p.detach(), options.dropout_p, options.seed, options.site)
    return (p * reference.dropout_scale(options.dropout_p)).mul_(as_factor(keep, p.dtype))


class _Draws(NamedTuple):
    weights: Tensor
    dropout_p: float
    seed: Whole
    site: int


def _drawn(call: _Draws) -> Tensor:
    batch, heads, queries, keys = call.weights.shape
    keep = training_passes.drawn((batch * heads, queries, keys), *call[1:])
    return keep.view(call.weights.shape).contiguous()


_keep_mask = Operator(
    "keep_mask", _Draws, "Tensor", lambda call: without_views(_drawn),
    lambda call: call.weights.new_empty(call.weights.shape, dtype=torch.bool),
).call  # fmt: skip
"""The keep mask of weights (B, H, L, S), bool: an operator, because no graph holds a seed's value and loops."""


def product(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, L, M) times y (B, Hk, M, N), Hk a divisor of H: (B, H, L, N) contiguous."""
    return _planes_product(planes(x, y.shape[1]), y.flatten(0, 1), x.dtype).view(*x.shape[:3], y.shape[3])


def scores(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, L, M) times y (B, Hk, N, M) transposed: (B, H, L, N) contiguous, float32 at least."""
    y_planes = y.flatten(0, 1).transpose(1, 2)
    return _planes_product(planes(x, y.shape[1]), y_planes, wide(x.dtype)).view(*x.shape[:3], y.shape[2])


def _planes_product(x: Tensor, y: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x (P, L, M) times y (P, M, N) in dtype, in out where that is given. A CPU without units for a dtype of half
    precision takes many times as long for it as for float32."""
    if x.dtype == dtype and (not x.is_cpu or dtype == wide(dtype) or has_units(dtype)):
        return torch.bmm(x, y, out=out) if out is not None else torch.bmm(x, y)
    if x.is_cuda and torch.version.cuda:
        return torch.bmm(x, y, out_dtype=dtype)
    z = torch.bmm(x.to(wide(x.dtype)), y.to(wide(y.dtype)))
    return z.to(dtype) if out is None else out.copy_(z)


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the weights before dropout (B, H, L, S), and after it (None without dropout)."""
    if attention_pass.weighs(query, key, options):
        p = attention_pass.weights(query, key, options)
    else:
        p = weights(scores(query, key), options.scale, options, query.dtype)
    kept = drop(p, options)
    return heads_last(product(p if kept is None else kept, value)), p, kept


def scores_gradient(
    grad: Tensor, p: Tensor, kept: Tensor | None, options: Options, mask_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the scores before they were scaled, in p's dtype, and of the additive mask if asked for; grad, p and
    kept as softmax_gradient() takes them."""
    d_scores = softmax_gradient(grad, p, kept)
    mask = options.mask if mask_gradient else None
    d_mask = d_scores.sum_to_size(mask.shape).to(mask.dtype) if mask is not None else None
    return (d_scores * options.scale).to(p.dtype), d_mask


def softmax_gradient(grad: Tensor, p: Tensor, kept: Tensor | None) -> Tensor:
    """The gradient of the scaled and masked scores from that of the weights, float32.

    grad (B, H, L, S) is the gradient after dropout, p the weights before it, kept after it (None without dropout).
    With P the weights and W = dropout(P): P * (dropout'(G) - rowsum(W * G)) = W * G - P * rowsum(W * G).
    """
    precise = wide(p.dtype)
    p, grad = p.to(precise), grad.to(precise)
    if kept is None and p.shape[-1] >= SOFTMAX_ROW:
        return torch.ops.aten._softmax_backward_data(grad, p, -1, precise)
    product = grad * (p if kept is None else kept)
    return product.addcmul_(p, product.sum(dim=-1, keepdim=True), value=-1.0)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, p: Tensor, kept: Tensor | None, options: Options,
    mask_gradient: bool = False, out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of query, key, value, and of the additive mask if asked for. out as operand_gradients() takes it."""
    grad, d_mask = grad.flatten(0, 1).view(grad.shape), None  # copied once at most
    if attention_pass.weighs(grad, value, options) and not mask_gradient:
        d_scores = attention_pass.scores_gradient(grad, value, p, kept, options)
    else:
        d_scores, d_mask = scores_gradient(scores(grad, value), p, kept, options, mask_gradient)
    return *operand_gradients(grad, d_scores, query, key, p if kept is None else kept, out), d_mask


def operand_gradients(
    grad: Tensor, d_scores: Tensor, query: Tensor, key: Tensor, weights: Tensor, out: tuple[Tensor, ...] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value from that of Q K^T and weights after dropout; in out, whose planes()
    must be views, or without it heads last."""
    heads = key.shape[1]  # where query heads share them, the products of keys and values add these up
    g, ds, q, p = planes(grad, heads), planes(d_scores, heads), planes(query, heads), planes(weights, heads)
    factors = (ds, key.flatten(0, 1)), (ds.transpose(1, 2), q), (p.transpose(1, 2), g)
    if out is not None:
        for memory, (x, y) in zip(out, factors):
            _planes_product(x, y, memory.dtype, planes(memory, heads))
        return out  # type: ignore[return-value]
    shapes = query.shape, key.shape, (*key.shape[:3], grad.shape[3])
    return tuple(heads_last(_planes_product(x, y, x.dtype).view(shape)) for (x, y), shape in zip(factors, shapes))  # type: ignore[return-value]


# --------------------------------------------------------------------------------------------- torch's fused CPU kernel


def fused_addend(query: Tensor, key: Tensor, options: Options) -> Tensor | None:
    """The addend of the scores for torch's fused kernel, (B, H, L, S) or broadcast to it; None for nothing.

    It may be as large as the scores: the backward pass takes the forward pass's.
    """
    return None if _is_triangle(options) else bias(query.shape[2], key.shape[2], query, options)


def _is_triangle(options: Options) -> bool:
    """Return whether nothing but the causal triangle hides keys or changes scores: the fused kernel knows it."""
    bare = options.mask is options.key_lengths is None and options._replace(sinks=None).plain
    return bare and options.causal and options.causal_offset == 0


def _fused_arguments(query: Tensor, key: Tensor, addend: Tensor | None, options: Options) -> dict[str, Any]:
    """Mask and scale as torch's fused kernel takes them; it gives zeros to a query that sees no key, as it must."""
    if addend is not None:
        addend = addend[(None,) * (4 - addend.dim())].expand(-1, -1, query.shape[2], key.shape[2])
    return {"is_causal": _is_triangle(options), "attn_mask": addend, "scale": options.scale}


def fused_forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the log-sum-exp (B, H, L) of the scores in base 2, and fused_addend().

    A sink, which that kernel does not know, of score z beside keys of log-sum-exp e takes the share 1 - sigmoid(e - z)
    of a row's weight, and has no value: the output is the kernel's times sigmoid(e - z). With log(exp(e) + exp(z)) in
    place of e, and that output, the kernel's backward pass gives the gradients of query, key and value.
    """
    attend, addend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, fused_addend(query, key, options)
    output, lse = attend(*_unit_strides(query, key, value), 0.0, **_fused_arguments(query, key, addend, options))
    if options.sinks is not None:
        sunk = options.sinks.float().clamp(max=LARGEST)[:, None]  # inf must not be subtracted from itself
        output = output * torch.sigmoid(lse.clamp(min=-LARGEST) - sunk)[..., None]
        lse = torch.logaddexp(lse, sunk)
    return heads_last(output), (lse * math.log2(math.e)).contiguous(), addend


def fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, addend: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    """Gradients of query, key and value, heads last, and None of the mask; an addend of no numbers is none."""
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = *_unit_strides(grad, query, key, value), output, lse / math.log2(math.e), 0.0
    arguments = _fused_arguments(query, key, None if addend is None or not addend.numel() else addend, options)
    d_query, d_key, d_value = differentiate(*tensors, **arguments)
    return heads_last(d_query), heads_last(d_key), heads_last(d_value), None


def _unit_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose last dimension is one after the other in memory, as that kernel takes them."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
