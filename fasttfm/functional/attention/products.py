"""Attention by PyTorch's matrix products, where no kernel fuses both products with the softmax.

    explicit    softmax by PyTorch: the fallback without Triton, and fast on the CPU
    softmax     softmax by one Triton kernel between two cuBLAS products (kernels/masked_softmax.py)
    fused       torch's fused CPU kernel, for longer rows in float32; saves one number per row

Scores, softmax and their gradients are float32; weights and their products have the input's precision. The weights are
saved for the backward pass: at sentence lengths they are small, and writing them costs less than recomputing Q K^T and
its softmax. On a CPU in bfloat16 this is several times faster than torch's fused kernel, whose softmax and backward
pass are slow there; with numba, a product and its softmax are one loop (cpu/attention_pass.py).
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import attention_pass, training_passes
from fasttfm.cpu.linear import batch_invariant, has_units
from fasttfm.functional.attention.call import LARGEST, Call, Options, Saved, grouped, heads_last, is_plain, matrices
from fasttfm.functional.backends import values_are_checked
from fasttfm.functional.dropout import as_factor, wide

Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_LOG2E = math.log2(math.e)


def forward(
    backend: str, query: Tensor, key: Tensor, value: Tensor, options: Any, cache: dict[str, Any], *,
    only_weights: bool = False,
) -> Outputs:  # fmt: skip
    """The output (B, H, L, Dv), heads last in memory, or the weights alone; and saved, kept and lse as in Saved.

    cache: holds what is decided between calls of one signature.
    """
    if backend == "fused":
        return fused_forward(query, key, value, options)
    lse = capped = None
    if backend == "softmax":
        products = scores(query, key)
        lse = None if options.sinks is None else query.new_empty(query.shape[:3], dtype=torch.float32)
        p, kept = _by_kernel(products, query.dtype, options, lse, cache)
    else:
        if "by_loop" not in cache:
            cache["by_loop"] = is_plain(options) and attention_pass.weighs(query, key, options)
        if cache["by_loop"]:
            p = attention_pass.weights(query, key, options)
        else:
            multiply = _scores_alone if only_weights and batch_invariant(query) else scores
            products, factor = scaled_scores(query, key, options, multiply)
            p, lse = weights(products, factor, options)
            p, capped = p.to(query.dtype).contiguous(), products if options.softcap else None
        kept = drop(p, options)
    output = p if kept is None else kept
    if not only_weights:
        output = heads_last(product(output, value))
    return output, p, (capped if kept is None else kept) if backend == "explicit" else None, lse


def _by_kernel(
    products: Tensor, dtype: torch.dtype, options: Any, lse: Tensor | None, cache: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The weights before and after dropout (None without dropout), in dtype; may reuse the memory of products.

    lse: as in masked_softmax.Forward.
    """
    from fasttfm.kernels import masked_softmax
    from fasttfm.kernels.attention.launch import masking_arguments

    names = "mask", "causal_offset", "offsets", "window", "softcap", "slopes", "past", "sinks"
    masking = masking_arguments(products.shape, **{name: getattr(options, name) for name in names})
    lengths = None if options.key_lengths is None else options.key_lengths.contiguous()
    if not cache:
        rate, causal = options.dropout_p, options.causal
        cache["run"] = masked_softmax.Forward(products, causal=causal, dropout_p=rate, dtype=dtype, in_place=True)
    return cache["run"](products, options.scale, masking, lengths, options.seed, options.site, lse)


def backward(
    backend: str, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, saved: Saved, options: Options | Call,
    mask_gradient: bool, out: list[Tensor], cache: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """Write the gradients of query, key and value to out; return that of the additive mask, if requested.

    grad (B, H, L, Dv), or (B, H, L, S) if the weights are the output; out: buffers whose matrices() are views. A soft
    cap's derivative needs the capped scores, which are recomputed unless the forward pass saved them.
    """
    if backend == "fused":
        torch._foreach_copy_(out, fused_backward(grad, query, key, value, saved, options))
        return None
    p, kept, only_weights = saved.saved, saved.kept, saved.call.only_weights
    grad = grad.contiguous() if only_weights else matrices(grad).view(grad.shape)  # at most one copy
    if backend == "softmax":
        d_weights = grad if only_weights else scores(grad, value)
        d_scores, kept, d_mask = _by_kernel_backward(d_weights, query, key, saved, options, mask_gradient, cache)
    else:
        kept, capped, d_mask = kept if options.seed is not None else None, None, None
        if "by_loop" not in cache:
            plain = is_plain(options) and not (mask_gradient or only_weights)
            cache["by_loop"] = plain and attention_pass.weighs(grad, value, options)
        if cache["by_loop"]:
            d_scores = attention_pass.scores_gradient(grad, value, p, kept, options)
        else:
            if options.softcap:
                capped = saved.kept if kept is None else scaled_scores(query, key, options)[0]
            d_weights = grad if only_weights else scores(grad, value)
            d_scores, d_mask = scores_gradient(d_weights, p, kept, options, mask_gradient, capped)
    heads = key.shape[1]  # the products of shared keys and values sum over the query heads that share them
    ds, q = matrices(d_scores, heads), matrices(query, heads)
    factors = [(ds, key.flatten(0, 1)), (ds.transpose(1, 2), q)]
    if not only_weights:
        factors.append((matrices(p if kept is None else kept, heads).transpose(1, 2), matrices(grad, heads)))
    for memory, (x, y) in zip(out, factors, strict=True):
        _product(x, y, memory.dtype, matrices(memory, heads))
    return d_mask


def _by_kernel_backward(
    grad: Tensor, query: Tensor, key: Tensor, saved: Saved, options: Any, mask_gradient: bool, cache: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of Q K^T, the weights after dropout and, if requested, the gradient of the additive mask.

    grad: gradient of the weights, float32.
    """
    from fasttfm.kernels import masked_softmax

    p, ours = saved.saved, not saved.call.only_weights  # else grad is the caller's, and must not be overwritten
    cap = (scores(query, key), options.scale, options.softcap) if options.softcap else None
    if not cache:
        cache["run"] = masked_softmax.Backward(p, options.dropout_p, in_place=ours, with_kept=ours)
    softmax, dropout = cache["run"], (options.seed, options.site)
    if not mask_gradient:
        return *softmax(grad, p, options.scale, *dropout, *([] if cap is None else [cap])), None
    d_scores, kept = softmax(grad, p, 1.0, *dropout)
    d_mask = d_scores.float().sum_to_size(options.mask.shape).to(options.mask.dtype)
    d_scores = d_scores * options.scale  # not in place: the gradient of a mask of full shape shares its memory
    if cap is not None:
        d_scores *= 1.0 - torch.tanh(cap[0] * (options.scale / options.softcap)).square()
    return d_scores, kept, d_mask


# ------------------------------------------------------------------------------------------------------------- products


def product(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, L, M) @ y (B, Hk, M, N), Hk a divisor of H: (B, H, L, N) contiguous."""
    return _product(matrices(x, y.shape[1]), y.flatten(0, 1), x.dtype).view(*x.shape[:3], y.shape[3])


def scores(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, L, M) @ y^T, y (B, Hk, N, M): (B, H, L, N) contiguous, at least float32."""
    transposed = y.flatten(0, 1).transpose(1, 2)
    return _product(matrices(x, y.shape[1]), transposed, wide(x.dtype)).view(*x.shape[:3], y.shape[2])


def _scores_alone(x: Tensor, y: Tensor) -> Tensor:
    """Batch-invariant scores(): one product at a time, on copies.

    Libraries choose the order of summation by batch size, strides and alignment.
    """
    if not x.numel() or not y.numel():
        return scores(x, y)
    pairs = zip(grouped(x, y.shape[1]).flatten(0, 1), y.transpose(2, 3).flatten(0, 1))
    contiguous = torch.contiguous_format
    results = [a.clone(memory_format=contiguous) @ b.clone(memory_format=contiguous) for a, b in pairs]
    return torch.stack(results).view(*x.shape[:3], y.shape[2])


def _product(x: Tensor, y: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x (P, L, M) @ y (P, M, N) in dtype, written to out if given.

    A CPU that emulates a half-precision dtype computes in float32, which is many times faster.
    """
    if x.dtype == dtype and (not x.is_cpu or dtype == wide(dtype) or has_units(dtype)):
        return torch.bmm(x, y, out=out) if out is not None else torch.bmm(x, y)
    if x.is_cuda and torch.version.cuda:
        return torch.bmm(x, y, out_dtype=dtype)
    z = torch.bmm(x.to(wide(x.dtype)), y.to(wide(y.dtype)))
    return z.to(dtype) if out is None else out.copy_(z)


_SMALL = 2.0**-20
"""Smallest factor that queries are multiplied by: usual queries stay in range."""


def scaled_scores(
    query: Tensor, key: Tensor, options: Options | Call, multiply: Callable[[Tensor, Tensor], Tensor] = scores
) -> tuple[Tensor, float]:
    """Q K^T, at least float32, or with a soft cap its tanh; and the factor that is still to be applied."""
    if not options.softcap:
        return multiply(query, key), options.scale
    factor = options.scale / options.softcap
    query, key = query.to(wide(query.dtype)), key.to(wide(key.dtype))
    if _SMALL <= abs(factor) <= 1 / _SMALL:  # there are fewer queries than scores
        query, factor = query * factor, 1.0
    products = multiply(query, key)
    return (products if factor == 1.0 else products * factor).tanh_(), options.softcap


# -------------------------------------------------------------------------------------------------- softmax and dropout


def bias(queries: int, keys: int, like: Tensor, options: Options | Call) -> Tensor | None:
    """The addend of the scaled scores, broadcastable to (B, H, L, S); None if there is none.

    like: a tensor of the scores' dtype and device.
    """
    mask, causal, causal_offset = options.mask, options.causal, options.causal_offset
    device, precise = like.device, wide(like.dtype)
    if mask is not None and mask.dim() == 0:
        mask = mask.view(1)  # a 0-d tensor would not take part in type promotion
    if mask is not None and mask.dtype not in (torch.bool, torch.float16):  # float16 does not reach LOWEST
        mask = mask.masked_fill(mask < reference.LOWEST, -math.inf)
    masked = None
    if mask is not None and mask.dtype == torch.bool:
        masked, mask = ~mask, None
    parts: list[Tensor] = []
    if options.offsets is not None or options.window != -1 or options.slopes is not None:
        last = torch.arange(queries, device=device)[:, None] + causal_offset  # last visible key
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
    if options.key_lengths is not None:
        parts.append(torch.arange(keys, device=device) >= options.key_lengths.view(-1, 1, 1, 1))
    if masked is not None:
        parts.append(masked)
    if not parts:
        return None if mask is None else mask.to(precise)
    hidden = functools.reduce(operator.or_, parts)
    if mask is None:
        return torch.zeros_like(hidden, dtype=precise).masked_fill_(hidden, -math.inf)
    return mask.to(precise).masked_fill(hidden, -math.inf)


SOFTMAX_ROW = 16
"""Floats in the widest register: PyTorch's loop for shorter rows is ten times slower than a padded row, on two cores of
an AMD EPYC with AVX-512. The last bits of a search depend on it, and on SOFTMAX_PADDED."""
SOFTMAX_PADDED = 4096
"""Scores above which padding shorter rows pays, on the same machine."""


def _softmax(scores: Tensor) -> Tensor:
    """torch.softmax over the last dimension; may return a view of a padded tensor."""
    keys = scores.shape[-1]
    compiling = torch.compiler.is_compiling()  # then lengths may be dynamic
    if not compiling and keys < SOFTMAX_ROW and scores.device.type == "cpu" and scores.numel() > SOFTMAX_PADDED:
        scores = torch.nn.functional.pad(scores, (0, SOFTMAX_ROW - keys), value=-math.inf)
    return torch.softmax(scores, dim=-1)[..., :keys]


def added(products: Tensor, factor: float, addend: Tensor | None) -> Tensor:
    """The scores: products (B, H, L, S) * factor + addend."""
    if addend is None:
        return products if factor == 1.0 else products * factor
    return torch.add(addend, products, alpha=factor)


def weights(products: Tensor, factor: float, options: Options | Call) -> tuple[Tensor, Tensor | None]:
    """The weights before dropout, softmax of products (B, H, L, S) * factor; with sinks also the log-sum-exp (B, H, L)
    in base 2."""
    queries, keys = products.shape[-2:]
    if not products.numel():
        return products, None if options.sinks is None else products.new_zeros(products.shape[:3])
    addend = bias(queries, keys, products, options)
    if options.sinks is not None:
        scores, sunk = added(products, factor, addend), options.sinks.to(products.dtype).clamp(max=LARGEST)
        sunk = sunk[:, None, None]  # clamped: inf - inf is NaN
        largest = torch.maximum(scores.detach().amax(-1, keepdim=True), sunk.detach()).clamp(min=-LARGEST)
        p = (scores - largest).exp_()
        total = p.sum(-1, keepdim=True) + (sunk - largest).exp()
        total = total.masked_fill(total == 0.0, 1.0)  # 0: neither key nor sink
        return p * total.reciprocal(), ((largest + total.log()) * _LOG2E).squeeze(-1)
    empty = None if addend is None else _empty(addend, options)
    if addend is None or empty is None:
        return _softmax(added(products, factor, addend)), None
    return _softmax(added(products, factor, addend.masked_fill(empty, 0.0))).masked_fill(empty, 0.0), None


def _empty(addend: Tensor, options: Options | Call) -> Tensor | None:
    """Mask of the rows that see no key, broadcastable to (B, H, L, 1); None if there surely is none."""
    unhidden = options.mask is options.key_lengths is options.offsets is None and options.window == -1
    if unhidden and options.causal_offset >= 0:
        return None
    empty = addend.amax(-1, keepdim=True) == -math.inf
    return None if values_are_checked(empty) and not empty.any() else empty


def drop(p: Tensor, options: Any) -> Tensor | None:
    """Weights (B, H, L, S) after dropout, by the convention of kernels/philox.py; None without dropout."""
    if options.seed is None:
        return None
    batch, heads, queries, keys = p.shape
    keep = training_passes.drawn((batch * heads, queries, keys), options.dropout_p, options.seed, options.site)
    keep = keep.view(p.shape).contiguous()
    return (p * reference.dropout_scale(options.dropout_p)).mul_(as_factor(keep, p.dtype))


def scores_gradient(
    grad: Tensor, p: Tensor, kept: Tensor | None, options: Options | Call, mask_gradient: bool,
    capped: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of Q K^T, in p's dtype, and of the additive mask, if requested.

    grad (B, H, L, S): gradient of the weights after dropout; p: weights before dropout, kept: after (None without
    dropout); capped: tanh of a soft cap. With P the weights, W = dropout(P) and G the gradient:
    P * (dropout'(G) - rowsum(W * G)) = W * G - P * rowsum(W * G).
    """
    precise, dtype = wide(p.dtype), p.dtype
    p, grad = p.to(precise), grad.to(precise)
    if kept is None and p.shape[-1] >= SOFTMAX_ROW:
        d_scores = torch.ops.aten._softmax_backward_data(grad, p, -1, precise)
    else:
        weighted = grad * (p if kept is None else kept)
        d_scores = weighted.addcmul_(p, weighted.sum(dim=-1, keepdim=True), value=-1.0)
    mask = options.mask if mask_gradient else None
    d_mask = d_scores.sum_to_size(mask.shape).to(mask.dtype) if mask is not None else None
    if capped is not None:
        d_scores = torch.ops.aten.tanh_backward(d_scores, capped)
    return (d_scores * options.scale).to(dtype), d_mask


def part_of(options: Any, queries: tuple[int, int], keys: tuple[int, int]) -> Any:
    """The options of a range of queries over a range of keys."""
    (first, last), (start, end) = queries, keys
    mask, lengths = options.mask, options.key_lengths
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., first:last, :]
    if mask is not None and mask.dim() > 0 and mask.shape[-1] > 1:
        mask = mask[..., start:end]
    return options._replace(
        mask=mask,
        key_lengths=None if lengths is None else lengths - start,
        causal_offset=options.causal_offset + first - start,
    )


def log_sum_exp(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """The log-sum-exp of each row's scores (B, H, L) float32, sinks included; -inf without any.

    Computed for some queries at a time.
    """
    parts = []
    for first in range(0, query.shape[2], _BLOCK):
        last = min(first + _BLOCK, query.shape[2])
        part = part_of(options, (first, last), (0, key.shape[2]))
        rows, factor = scaled_scores(query[:, :, first:last], key, part)
        lse = added(rows, factor, bias(last - first, key.shape[2], rows, part)).logsumexp(-1)
        if options.sinks is not None:
            lse = torch.logaddexp(lse, options.sinks.to(lse.dtype).clamp(max=LARGEST)[:, None])
        parts.append(lse.float())
    return torch.cat(parts, -1) if parts else query.new_empty(query.shape[:3], dtype=torch.float32)


_BLOCK = 512
"""Queries whose scores log_sum_exp() holds at a time."""


# --------------------------------------------------------------------------------------------- torch's fused CPU kernel


def fused_addend(query: Tensor, key: Tensor, options: Options | Call) -> Tensor | None:
    """The addend of the scores for torch's fused kernel, broadcastable to (B, H, L, S); None if there is none.

    It may be as large as the scores, so it is saved for the backward pass.
    """
    return None if _is_triangle(options) else bias(query.shape[2], key.shape[2], query, options)


def _is_triangle(options: Options | Call) -> bool:
    """Return whether the call is plain causal, which the fused kernel supports as a flag."""
    bare = options.mask is options.key_lengths is None and is_plain(options._replace(sinks=None))
    return bare and options.causal and options.causal_offset == 0


def _fused_arguments(query: Tensor, key: Tensor, addend: Tensor | None, options: Options | Call) -> dict[str, Any]:
    """Mask and scale for torch's fused kernel, which gives zeros to a query that sees no key, as it must."""
    if addend is not None:
        addend = addend[(None,) * (4 - addend.dim())].expand(-1, -1, query.shape[2], key.shape[2])
    return {"is_causal": _is_triangle(options), "attn_mask": addend, "scale": options.scale}


def fused_forward(query: Tensor, key: Tensor, value: Tensor, options: Options | Call) -> Outputs:
    """The same outputs as forward(), by torch's fused kernel, with sinks applied to its result.

    A sink of score z next to keys of log-sum-exp e takes the share 1 - sigmoid(e - z) of a row's weight and has no
    value: the output is the kernel's times sigmoid(e - z). With that output, and log(exp(e) + exp(z)) in place of e,
    the kernel's backward pass gives the gradients of query, key and value.
    """
    attend, addend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, fused_addend(query, key, options)
    output, lse = attend(*_unit_strides(query, key, value), 0.0, **_fused_arguments(query, key, addend, options))
    if options.sinks is not None:
        sunk = options.sinks.float().clamp(max=LARGEST)[:, None]  # inf - inf is NaN
        output = output * torch.sigmoid(lse.clamp(min=-LARGEST) - sunk)[..., None]
        lse = torch.logaddexp(lse, sunk)
    return heads_last(output), (lse * _LOG2E).contiguous(), addend, None


def fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, saved: Saved, options: Options | Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, heads last; an empty addend counts as None."""
    differentiate, addend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, saved.kept
    tensors = *_unit_strides(grad, query, key, value), saved.output, saved.saved / _LOG2E, 0.0
    arguments = _fused_arguments(query, key, None if addend is None or not addend.numel() else addend, options)
    d_query, d_key, d_value = differentiate(*tensors, **arguments)
    return heads_last(d_query), heads_last(d_key), heads_last(d_value)


def _unit_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, copied unless the last stride is 1, as that kernel requires."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
