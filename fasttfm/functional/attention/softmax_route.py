"""Attention with its softmax, mask and dropout in one Triton kernel between two products of cuBLAS."""

from __future__ import annotations

from torch import Tensor

from fasttfm.functional.attention import torch_route
from fasttfm.functional.attention.arguments import Options
from fasttfm.functional.attention.layout import heads_last, planes


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the weights before dropout (B, H, L, S)."""
    from fasttfm.kernels import masked_softmax

    scores, left = torch_route.scores(query, key, options.scale)
    p, kept = masked_softmax.forward(scores, **options._replace(scale=left).arguments(), in_place=True)
    return heads_last(torch_route.product(p if kept is None else kept, value)), p


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
    """Gradients of query, key, value, and of the additive mask if asked for; out as operand_gradients() takes it."""
    from fasttfm.kernels import masked_softmax

    grad = planes(grad).view(grad.shape)  # copied once at most
    d_kept = torch_route.product_transposed(grad, value)
    dropout = (options.dropout_p, options.seed, options.site)
    factor = 1.0 if mask_gradient else options.scale
    d_scores, kept = masked_softmax.backward(d_kept, p, factor, *dropout, in_place=True, with_kept=True)
    d_mask = None
    if mask_gradient:
        d_mask = _mask_gradient(d_scores, options.mask)
        d_scores = d_scores * options.scale  # not in place: a mask of the scores' own shape shares their memory
    return *torch_route.operand_gradients(grad, d_scores, query, key, kept, out), d_mask


def weights(scores: Tensor, options: Options) -> tuple[Tensor, Tensor | None]:
    """The weights before dropout, and after it (None without dropout), of scores (B, H, L, S)."""
    from fasttfm.kernels import masked_softmax

    return masked_softmax.forward(scores.contiguous(), **options.arguments())


def weights_gradient(grad: Tensor, p: Tensor, options: Options, mask_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of weights()'s scores and, if asked for, of the additive mask.

    grad is that of the weights after dropout, p the weights before it.
    """
    from fasttfm.kernels import masked_softmax

    factor = 1.0 if mask_gradient else options.scale
    d_scores, _ = masked_softmax.backward(grad.contiguous(), p, factor, options.dropout_p, options.seed, options.site)
    if not mask_gradient:
        return d_scores, None
    return d_scores * options.scale, _mask_gradient(d_scores, options.mask)


def _mask_gradient(d_scores: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return d_scores.float().sum_to_size(mask.shape).to(mask.dtype)
