"""The weights of attention by themselves, softmax(Q K^T * scale), as a torch operator on the scores."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu.linear import batch_invariant
from fasttfm.functional.attention import composed, routes, softmax_route, torch_route
from fasttfm.functional.attention.arguments import Options, Window
from fasttfm.functional.attention.checks import check_heads
from fasttfm.functional.attention.layout import grouped
from fasttfm.functional.attention.scoring import Causal, scores_differ, with_scoring, without_bias
from fasttfm.functional.backends import chosen
from fasttfm.functional.dropout import wide
from fasttfm.functional.operator import Gradients, Operator, unplanned
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
    options = Options.of(query, key_lengths, mask, causal, causal_offset, dropout_p, scale, seed, site)
    if scores_differ(causal, causal_offset, window, softcap, alibi_slopes, sinks):
        shape = (*query.shape[:3], key.shape[2])
        options = with_scoring(options, query, shape, causal, window, softcap, alibi_slopes, sinks)
    return _weights(query, key, options)


@composed.lowered
def _weights(query: Tensor, key: Tensor, options: Options) -> Tensor:
    dtype = query.dtype
    query, key = query.to(wide(dtype)), key.to(wide(dtype))
    rows, columns = grouped(query, key.shape[1]), key.transpose(-2, -1)  # (B, Hk, H / Hk * L, D), (B, Hk, D, S)
    scores = _products_alone(rows, columns) if batch_invariant(query) else rows @ columns
    scores = scores.view(*query.shape[:3], key.shape[2])
    if options.plain:
        return _softmax(scores, options, chosen())[0].to(dtype)
    _operator.check(_Call(scores, options, chosen()))
    return composed.dropped_weights(scores, options.scale, options).to(dtype)


@torch.no_grad()
def log_sum_exp(
    query: Tensor, key: Tensor, key_lengths: Tensor | None = None, *, causal: Causal = False,
    causal_offset: int | Tensor = 0, window: Window | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The logarithm of the sum of a row's exponentiated scores: (B, H, L) float32, -inf where a query sees no key.

    Arguments and errors as attention()'s. Computed by PyTorch, for some queries at a time.
    """
    check_heads(query, key, key_lengths, None)
    options = Options.of(query, key_lengths, None, causal, causal_offset, 0.0, scale, None, 0)
    shape = (*query.shape[:3], key.shape[2])
    options = with_scoring(options, query, shape, causal, window, softcap, alibi_slopes, None)
    return composed.log_sum_exp(query, key, options)


def _products_alone(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, M, K) times y (B, H, K, N), each product by itself and of copies: libraries choose the order of a sum by
    the number of products in a batch, by strides, and by where a matrix begins in memory."""
    if not x.numel() or not y.numel():
        return x @ y
    contiguous = torch.contiguous_format
    planes = zip(x.flatten(0, 1), y.flatten(0, 1))
    products = [a.clone(memory_format=contiguous) @ b.clone(memory_format=contiguous) for a, b in planes]
    return torch.stack(products).view(*x.shape[:3], y.shape[3])


class _Call(NamedTuple):
    scores: Tensor
    options: Options
    route: str


class _Saved(NamedTuple):
    weights: Tensor
    """The output: after dropout."""
    p: Tensor
    """Before dropout; empty where nothing is dropped."""
    options: Options
    route: str


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved
    mask_gradient: bool


def _compute(call: _Call) -> tuple[Tensor, Tensor]:
    scores, options, route = call
    if route == "softmax":
        p, kept = softmax_route.weights(scores, options)
    else:
        p = torch_route.weights(scores, options.scale, options, scores.dtype)
        kept = torch_route.drop(p, options)
    return (p, p.new_empty(0)) if kept is None else (kept, p)


def _fake(call: _Call) -> tuple[Tensor, Tensor]:
    like = call.scores.new_empty(call.scores.shape)
    return like, like.new_empty(0) if call.options.seed is None else torch.empty_like(like)


def _differentiate(saved: _Saved, wanted: Options, grad: Tensor | None, grad_p: Tensor | None) -> Gradients:
    """grad_p: of the weights before dropout, which only a second derivative brings."""
    _, p, options, route = saved
    parts = [] if grad is None else [_softmax_backward(grad, saved, wanted.mask is True)]
    if grad_p is not None and p.numel():
        undropped = _Saved(p, p.new_empty(0), options._replace(dropout_p=0.0, seed=None), route)
        parts.append(_softmax_backward(grad_p, undropped, wanted.mask is True))
    if not parts:
        return {}
    d_scores, d_mask = parts[0] if len(parts) == 1 else map(torch.add, *parts)
    return {"scores": d_scores, "mask": d_mask if wanted.mask else None}


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    grad, (weights, p, options, route), mask_gradient = call
    dropped = None if options.seed is None else weights
    p = weights if dropped is None else p
    if route == "softmax":
        d_scores, _, d_mask = softmax_route.scores_gradient(grad.contiguous(), p, options, mask_gradient)
    else:
        d_scores, d_mask = torch_route.scores_gradient(grad, p, dropped, options, mask_gradient)
    return d_scores, weights.new_empty(0) if d_mask is None else d_mask


def _fake_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    weights, mask = call.saved.weights, call.saved.options.mask
    d_mask = mask.new_empty(mask.shape) if mask is not None and call.mask_gradient else weights.new_empty(0)
    return torch.empty_like(weights), d_mask


def _reference_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    grad, (weights, p, options, _), mask_gradient = call
    precise, mask = wide(grad.dtype), options.mask
    grad = grad.to(precise)
    if options.seed is not None:
        shape = (weights.shape[0] * weights.shape[1], *weights.shape[2:])
        keep = reference.keep_mask(shape, options.dropout_p, options.seed, options.site).view(weights.shape)
        grad, weights = grad * keep * reference.dropout_scale(options.dropout_p), p
    weights = weights.to(precise)
    d_scaled = weights * (grad - (weights * grad).sum(-1, keepdim=True))
    d_mask = weights.new_empty(0)
    if mask is not None and mask_gradient:
        d_mask = d_scaled.sum_to_size(mask.shape).to(mask.dtype)
    return (d_scaled * options.scale).to(call.grad.dtype), d_mask


_softmax_backward = Operator(
    "attention_softmax_backward", _Backward, "(Tensor, Tensor)", unplanned(_compute_backward), _fake_backward,
    reference=_reference_backward,
).call  # fmt: skip
_operator = Operator(
    "attention_softmax",
    _Call,
    "(Tensor, Tensor)",
    unplanned(_compute, 1),
    _fake,
    decide=lambda call: routes.takes_kernel(call.route, call.scores),
    save=lambda call, outputs: (*outputs, call.options, call.route),
    saved=_Saved,
    backward=_differentiate,
    differentiable=2,
    rows=("scores", "key_lengths"),
)
_softmax = _operator.call
