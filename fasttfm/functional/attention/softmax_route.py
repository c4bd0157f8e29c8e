"""Attention with its softmax, mask and dropout in one Triton kernel between two products of cuBLAS."""

from functools import partial

import torch
from torch import Tensor

from fasttfm.functional.attention import torch_route
from fasttfm.functional.attention.arguments import Options
from fasttfm.functional.attention.layout import heads_last, planes


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the weights before dropout (B, H, L, S), and with sinks the log-sum-exp (B, H, L) in base 2."""
    from fasttfm.kernels import masked_softmax

    scores = torch_route.scores(query, key)
    lse = None if options.sinks is None else query.new_empty(query.shape[:3], dtype=torch.float32)
    p, kept = masked_softmax.forward(scores, **options.arguments(), lse=lse, dtype=query.dtype, in_place=True)
    return heads_last(torch_route.product(p if kept is None else kept, value)), p, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: Tensor,
    options: Options,
    mask_gradient: bool,
    out: tuple[Tensor, ...] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value, and of the additive mask if asked for; out as operand_gradients() takes it.

    The scores, which a soft cap's derivative needs, are computed once more: p lies where they were.
    """
    grad = planes(grad).view(grad.shape)  # copied once at most
    d_kept = torch_route.scores(grad, value)
    cap = (torch_route.scores(query, key), options.scale, options.softcap) if options.softcap else None
    d_scores, kept, d_mask = scores_gradient(d_kept, p, options, mask_gradient, cap, in_place=True, with_kept=True)
    return *torch_route.operand_gradients(grad, d_scores, query, key, kept, out), d_mask


def weights(scores: Tensor, options: Options) -> tuple[Tensor, Tensor | None]:
    """The weights before dropout, and after it (None without dropout), of scores (B, H, L, S)."""
    from fasttfm.kernels import masked_softmax

    return masked_softmax.forward(scores.contiguous(), **options.arguments())


def scores_gradient(
    grad: Tensor,
    p: Tensor,
    options: Options,
    mask_gradient: bool,
    cap: tuple[Tensor, float, float] | None = None,
    *,
    in_place: bool = False,
    with_kept: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradient of the scores before they were scaled, the weights after dropout, and if asked for the gradient of
    the additive mask.

    grad, float32, is that of the weights after dropout, p the weights before it, both contiguous; cap: products, scale
    and soft cap; in_place: grad's memory may be taken; with_kept: the weights after
    dropout are of use, or else they may be p.
    """
    from fasttfm.kernels import masked_softmax

    dropout = (options.dropout_p, options.seed, options.site)
    backward = partial(masked_softmax.backward, grad, p, in_place=in_place, with_kept=with_kept)
    if not mask_gradient:
        return *backward(options.scale, *dropout, cap=cap), None
    d_scores, kept = backward(1.0, *dropout)
    assert options.mask is not None
    d_mask = d_scores.float().sum_to_size(options.mask.shape).to(options.mask.dtype)
    d_scores = d_scores * options.scale  # not in place: a mask of the scores' own shape shares their memory
    if cap is not None:
        products, scale, softcap = cap
        d_scores *= 1.0 - torch.tanh(products * (scale / softcap)).square()
    return d_scores, kept, d_mask
