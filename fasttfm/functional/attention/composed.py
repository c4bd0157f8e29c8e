"""Attention with windows, soft caps, ALiBi or sinks in plain PyTorch, which differentiates it."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention import routes, torch_route
from fasttfm.functional.attention.arguments import LARGEST, Options
from fasttfm.functional.attention.layout import heads_last, planes
from fasttfm.functional.backends import values_are_checked
from fasttfm.functional.dropout import wide
from fasttfm.functional.operator import casts

Fused = Callable[[Tensor, Tensor, Tensor, Options], Tensor]


def lowered(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """compute(*tensors, options, ...) without autocast, which would make scores of half precision: of tensors in its
    dtype where it is on."""

    @functools.wraps(compute)
    def call(*given: Any) -> Tensor:
        if not casts(given[0]):
            return compute(*given)
        device = given[0].device.type
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return compute(*(x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x for x in given))

    return call


@lowered
def attention(query: Tensor, key: Tensor, value: Tensor, options: Options, fused: Fused) -> Tensor:
    """The output (B, H, L, Dv) of attention() with options that are not plain; fused: by torch's own CPU kernel.

    On a CPU a window's keys alone are multiplied, some queries at a time.
    """
    if not _is_banded(query, key, options):
        return _whole(query, key, value, options, fused)
    outputs = []
    for (first, last), (start, end) in _bands(query.shape[2], key.shape[2], options):
        part = _part(options, (first, last), (start, end))
        outputs.append(_whole(query[:, :, first:last], key[:, :, start:end], value[:, :, start:end], part, fused))
    return heads_last(torch.cat(outputs, dim=2))


def _whole(query: Tensor, key: Tensor, value: Tensor, options: Options, fused: Fused) -> Tensor:
    if options.softcap == 0.0 and routes.takes_fused(
        query, key, value, options.mask, scale=options.scale, seed=options.seed
    ):
        return fused(query, key, value, options)
    weights, share = _weights(*_products(query, key, options), options)
    if share is not None and weights.dtype != value.dtype:  # gradients of a row cancel before they are rounded
        weights, share = weights * share, None
    weights = weights.to(value.dtype)
    kept = torch_route.drop(weights, options)
    output = torch_route.product(weights if kept is None else kept, value)
    return heads_last(output if share is None else (output * share).to(output.dtype))


def _products(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, float]:
    """Q K^T (B, H, L, S), float32 at least, or of a soft cap what tanh makes of it, and what is left to multiply it
    by."""
    cap = options.softcap
    factor = options.scale / (cap or 1.0)
    query, key = query.to(wide(query.dtype)), key.to(wide(key.dtype))
    if _SMALL <= abs(factor) <= 1 / _SMALL:  # of queries there are fewer than of scores
        query, factor = query * factor, 1.0
    if not cap:
        return torch_route.scores(query, key), factor
    products = torch.bmm(planes(query, key.shape[1]), planes(key).transpose(1, 2))
    return _tanh(products, factor).view(*query.shape[:3], key.shape[2]), cap


_SMALL = 2.0**-20
"""A factor that takes no query of a usual size out of range."""


def _tanh(products: Tensor, factor: float) -> Tensor:
    """tanh(products * factor); may take the products' memory."""
    if factor != 1.0:
        products = products * factor
    apart = torch.compiler.is_compiling() or products._is_view()  # the gradient of a view would be copied
    return products.tanh() if apart else products.tanh_()


def dropped_weights(products: Tensor, scale: float, options: Options) -> Tensor:
    """The weights after dropout of products (B, H, L, S), float32 at least, which scale is still to multiply."""
    if options.softcap:
        products, scale = _tanh(products, scale / options.softcap), options.softcap
    weights, share = _weights(products, scale, options)
    weights = weights if share is None else weights * share
    kept = torch_route.drop(weights, options)
    return weights if kept is None else kept


def _weights(products: Tensor, factor: float, options: Options) -> tuple[Tensor, Tensor | None]:
    """Weights of products (B, H, L, S), and what a row of them is still to be multiplied by,
    (B, H, L, 1); None for 1.

    Of rows with a sink these are the exponentials, which the sum is to divide: rows of output are shorter.
    """
    if options.sinks is not None and products.shape[-1]:
        scores = masked_scores(products, factor, options)
        sunk = _sinks(scores, options.sinks)[:, None]
        largest = torch.maximum(scores.detach().amax(-1, keepdim=True), sunk.detach()).clamp(min=-LARGEST)
        weights = (scores - largest).exp_()
        total = weights.sum(-1, keepdim=True) + (sunk - largest).exp()
        return weights, total.masked_fill(total == 0.0, 1.0).reciprocal()  # 0: there is neither key nor sink
    addend, share = torch_route.bias(products.shape[-2], products.shape[-1], products, options), None
    if addend is not None:
        empty = (addend == -math.inf).all(dim=-1, keepdim=True)
        if not values_are_checked(empty) or bool(empty.any()):
            addend, share = addend.masked_fill(empty, 0.0), (~empty).to(addend.dtype)
    return torch.softmax(_added(products, factor, addend), dim=-1), share


def _sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Sinks (H, 1) in scores' dtype; inf must not be subtracted from itself."""
    return sinks.to(scores.dtype).clamp(max=LARGEST)[:, None]


def masked_scores(products: Tensor, factor: float, options: Options) -> Tensor:
    """Products (B, H, L, S) times a factor with what is added to them; -inf where a query does not attend."""
    return _added(products, factor, torch_route.bias(products.shape[-2], products.shape[-1], products, options))


def _added(products: Tensor, factor: float, addend: Tensor | None) -> Tensor:
    if addend is None:
        return products if factor == 1.0 else products * factor
    return torch.add(addend, products, alpha=factor)


@lowered
def log_sum_exp(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """The logarithm of the sum of the exponentiated scores: (B, H, L) float32, -inf where a query sees no key and there
    is no sink. Some queries at a time, whatever the options."""
    parts = []
    for first in range(0, query.shape[2], _MOST):
        last = min(first + _MOST, query.shape[2])
        part = _part(options, (first, last), (0, key.shape[2]))
        lse = masked_scores(*_products(query[:, :, first:last], key, part), part).logsumexp(-1)
        if options.sinks is not None:
            lse = torch.logaddexp(lse, _sinks(lse, options.sinks))
        parts.append(lse.float())
    return torch.cat(parts, -1) if parts else query.new_empty(query.shape[:3], dtype=torch.float32)


# --------------------------------------------------------------------------------------------------- bands of a window

_LEAST, _MOST = 64, 512
"""Queries of a band."""


def _is_banded(query: Tensor, key: Tensor, options: Options) -> bool:
    """Return whether a window leaves out keys that are known without waiting for a device. Dropout draws for whole
    rows, and a graph of torch.compile must not depend on lengths."""
    return (
        options.window != -1
        and options.causal
        and options.seed is None
        and query.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and query.shape[0] * query.shape[2] > 0
        and options.window + _LEAST < key.shape[2]
        and (options.offsets is None or values_are_checked(options.offsets))  # the bands depend on their values
    )


def _bands(queries: int, keys: int, options: Options) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of queries, and of the keys that any of them sees."""
    least = most = options.causal_offset
    if options.offsets is not None:
        least, most = least + int(options.offsets.min()), most + int(options.offsets.max())
    step = min(max(options.window + 1, _LEAST), _MOST)
    for first in range(0, queries, step):
        last = min(first + step, queries)
        start = min(max(first + least - options.window, 0), keys)
        yield (first, last), (start, max(min(last + most, keys), start))


def _part(options: Options, queries: tuple[int, int], keys: tuple[int, int]) -> Options:
    """The options of some queries on some keys."""
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
