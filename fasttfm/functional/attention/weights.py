"""The weights of attention by themselves, softmax(Q K^T * scale), as a torch operator on the scores."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu.linear import batch_invariant
from fasttfm.functional import backends
from fasttfm.functional.attention import products
from fasttfm.functional.attention.call import Options, Window, is_plain
from fasttfm.functional.attention.checks import check_heads
from fasttfm.functional.attention.layout import grouped
from fasttfm.functional.attention.scoring import Causal, options_of, without_bias
from fasttfm.functional.backends import BACKENDS, kernels_take
from fasttfm.functional.dropout import wide
from fasttfm.functional.operator import Operator, casts, without_views
from fasttfm.functional.signature import names_arguments


@names_arguments
def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: Causal = False,
    causal_offset: int | Tensor = 0,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """The weights of attention(), dropout applied: softmax(Q K^T * scale), (B, H, L, S) in query's dtype, rounded to it
    when they have been computed in float32.

    Arguments, errors and gradients as attention()'s: attention_weights(q, k, ...) @ v is attention(q, k, v, ...)
    where no heads of keys are shared. Those of sinks are left out: a row then adds up to less than 1.
    """
    if mask is not None and type(mask) is not Tensor:
        mask, causal, causal_offset = without_bias(mask, causal, causal_offset, query.shape[2], key.shape[2])
    check_heads(query, key, key_lengths, mask)
    options = options_of(
        query, (*query.shape[:3], key.shape[2]), key_lengths=key_lengths, mask=mask, causal=causal,
        causal_offset=causal_offset, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, scale=scale, seed=seed, site=site,
    )  # fmt: skip
    return _weights(query, key, options)


def _lowered(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """compute(query, key, options) without autocast, which would make scores of half precision: of operands in its
    dtype where it is on."""

    @functools.wraps(compute)
    def call(query: Tensor, key: Tensor, options: Options) -> Tensor:
        if not casts(query):
            return compute(query, key, options)
        device = query.device.type
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return compute(*(x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key)), options)

    return call


@_lowered
def _weights(query: Tensor, key: Tensor, options: Options) -> Tensor:
    dtype = query.dtype
    query, key = query.to(wide(dtype)), key.to(wide(dtype))
    rows, columns = grouped(query, key.shape[1]), key.transpose(-2, -1)  # (B, Hk, H / Hk * L, D), (B, Hk, D, S)
    scores = _products_alone(rows, columns) if batch_invariant(query) else rows @ columns
    scores = scores.view(*query.shape[:3], key.shape[2])
    if is_plain(options):
        return _softmax.call(scores, options, backends.current)[0].to(dtype)
    _softmax.check(_Call(scores, options, backends.current))
    factor = options.scale
    if options.softcap:
        scores, factor = products.capped(scores, factor / options.softcap), options.softcap
    weights = products.weights(scores, factor, options)[0]
    kept = products.drop(weights, options)
    return (weights if kept is None else kept).to(dtype)


@torch.no_grad()
def log_sum_exp(query: Tensor, key: Tensor, key_lengths: Tensor | None = None, **scoring: Any) -> Tensor:
    """The logarithm of the sum of a row's exponentiated scores: (B, H, L) float32, -inf where a query sees no key.

    Arguments and errors as attention()'s. Computed by PyTorch, for some queries at a time.
    """
    check_heads(query, key, key_lengths, None)
    options = options_of(query, (*query.shape[:3], key.shape[2]), key_lengths=key_lengths, **scoring)
    return _lowered(products.log_sum_exp)(query, key, options)


def _products_alone(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, M, K) times y (B, H, K, N), each product by itself and of copies: libraries choose the order of a sum by
    the number of products in a batch, by strides, and by where a matrix begins in memory."""
    if not x.numel() or not y.numel():
        return x @ y
    contiguous = torch.contiguous_format
    pairs = zip(x.flatten(0, 1), y.flatten(0, 1))
    found = [a.clone(memory_format=contiguous) @ b.clone(memory_format=contiguous) for a, b in pairs]
    return torch.stack(found).view(*x.shape[:3], y.shape[3])


class _Call(NamedTuple):
    scores: Tensor
    options: Options
    backend: str


def _decide(call: _Call) -> str:
    if call.backend not in BACKENDS:
        return call.backend
    return "softmax" if kernels_take(call.backend, call.scores.device, call.scores.dtype) else "explicit"


class _Saved(NamedTuple):
    weights: Tensor
    """The output: after dropout."""
    p: Tensor | None
    """Before dropout; not read where nothing is dropped."""
    options: Options
    backend: str


class _Backward(NamedTuple):
    grad: Tensor
    mask_gradient: bool
    saved: _Saved


def _plan(call: _Call) -> Callable[[_Call], tuple[Tensor, Tensor | None]]:
    """The weights, and those before dropout, None where nothing is dropped."""
    if call.backend != "softmax":
        return without_views(_compute_by_torch, internal=1)
    softmax = products.softmax_kernel(call.scores, call.options)

    def compute(call: _Call) -> tuple[Tensor, Tensor | None]:
        p, kept = softmax(call.scores.contiguous(), call.options)
        return (p, None) if kept is None else (kept, p)

    return compute


def _compute_by_torch(call: _Call) -> tuple[Tensor, Tensor | None]:
    scores, options, _ = call
    p = products.weights(scores, options.scale, options)[0].contiguous()
    kept = products.drop(p, options)
    return (p, None) if kept is None else (kept, p)


def _fake(call: _Call) -> tuple[Tensor, Tensor | None]:
    like = call.scores.new_empty(call.scores.shape)
    return like, None if call.options.seed is None else torch.empty_like(like)


def _differentiate(
    backward: Callable[..., tuple], saved: _Saved, wanted: Options, grad: Tensor | None, grad_p: Tensor | None
) -> tuple[Tensor | None, ...]:
    """grad_p: of the weights before dropout, which only a second derivative brings."""
    of_mask = wanted.mask is True
    parts = [] if grad is None else [backward(grad, of_mask, saved)]
    if grad_p is not None and saved.options.seed is not None:  # of another signature than backward is planned for
        options = saved.options._replace(dropout_p=0.0, seed=None)
        parts.append(_softmax_backward(grad_p, of_mask, _Saved(saved.p, None, options, saved.backend)))  # type: ignore[arg-type]
    if not parts:
        return (None,) * 7
    (d_scores, d_mask), *others = parts
    for one, of_one in others:
        d_scores, d_mask = d_scores + one, d_mask + of_one if of_mask else None
    return d_scores, None, d_mask if of_mask else None, *(None,) * 4


def _plan_backward(call: _Backward) -> Callable[[_Backward], tuple[Tensor, Tensor | None]]:
    """Gradients of the scores and of the additive mask, None where it is not asked for."""
    if call.saved.backend != "softmax":
        return without_views(_compute_backward_by_torch)
    from fasttfm.kernels import masked_softmax

    softmax = masked_softmax.Backward(call.saved.weights, call.saved.options.dropout_p)

    def compute(call: _Backward) -> tuple[Tensor, Tensor | None]:
        grad, mask_gradient, (weights, p, options, _) = call
        before: Any = weights if options.seed is None else p
        d_scores, _, d_mask = products.kernels_gradient(softmax, grad.contiguous(), before, options, mask_gradient)
        return d_scores, d_mask

    return compute


def _compute_backward_by_torch(call: _Backward) -> tuple[Tensor, Tensor | None]:
    grad, mask_gradient, (weights, p, options, _) = call
    before, kept = (weights, None) if options.seed is None else (p, weights)
    return products.scores_gradient(grad, before, kept, options, mask_gradient)  # type: ignore[arg-type]


def _fake_backward(call: _Backward) -> tuple[Tensor, Tensor | None]:
    mask = call.saved.options.mask
    d_mask = mask.new_empty(mask.shape) if mask is not None and call.mask_gradient else None
    return torch.empty_like(call.saved.weights), d_mask


def _reference_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    grad, mask_gradient, (weights, p, options, _) = call
    precise, mask = wide(grad.dtype), options.mask
    grad = grad.to(precise)
    if options.seed is not None and p is not None:
        shape = (weights.shape[0] * weights.shape[1], *weights.shape[2:])
        keep = reference.keep_mask(shape, options.dropout_p, options.seed, options.site).view(weights.shape)
        grad, weights = grad * keep * reference.dropout_scale(options.dropout_p), p
    weights = weights.to(precise)
    d_scaled = weights * (grad - (weights * grad).sum(-1, keepdim=True))
    d_mask = call.grad.new_empty(0)
    if mask is not None and mask_gradient:
        d_mask = d_scaled.sum_to_size(mask.shape).to(mask.dtype)
    return (d_scaled * options.scale).to(call.grad.dtype), d_mask


_softmax_backward = Operator(
    "attention_softmax_backward", _Backward, "(Tensor, Tensor)", _plan_backward, _fake_backward,
    reference=_reference_backward, leading=2,
)  # fmt: skip
_softmax = Operator(
    "attention_softmax", _Call, "(Tensor, Tensor)", _plan, _fake,
    decide=_decide, save=lambda call, outputs: (*outputs, *call[1:]),
    saved=_Saved, backward=_differentiate, derivative=_softmax_backward, differentiable=2,
    rows=("scores", "key_lengths"), free=("site",),
)  # fmt: skip
