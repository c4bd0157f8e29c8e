"""Attention with its softmax, mask and dropout in one Triton kernel between two products of cuBLAS."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention import torch_route
from fasttfm.functional.attention.arguments import Options
from fasttfm.functional.attention.layout import heads_last, planes

_PLACES = "mask", "causal_offset", "offsets", "window", "softcap", "slopes", "past", "sinks"


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the weights before dropout (B, H, L, S), and with sinks the log-sum-exp (B, H, L) in base 2."""
    scores = torch_route.scores(query, key)
    lse = None if options.sinks is None else query.new_empty(query.shape[:3], dtype=torch.float32)
    p, kept = planned(scores, options, query.dtype, in_place=True)(scores, options, lse)
    return heads_last(torch_route.product(p if kept is None else kept, value)), p, lse


def planned(
    scores: Tensor, options: Options, dtype: torch.dtype | None = None, *, in_place: bool = False
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A function of scores (B, H, L, S) contiguous, options and a log-sum-exp of this signature to the weights before
    dropout, and after it (None without dropout); dtype and in_place as masked_softmax.Forward takes them."""
    from fasttfm.kernels import masked_softmax
    from fasttfm.kernels.attention.launch import masking_arguments

    shape, rate = scores.shape, options.dropout_p
    softmax = masked_softmax.Forward(scores, causal=options.causal, dropout_p=rate, dtype=dtype, in_place=in_place)

    def masking_of(options: Options) -> tuple:
        return masking_arguments(shape, **{name: getattr(options, name) for name in _PLACES})

    bare = options.mask is options.offsets is options.slopes is options.sinks is None
    known = masking_of(options) if bare else None

    def weights(scores: Tensor, options: Options, lse: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        lengths = None if options.key_lengths is None else options.key_lengths.contiguous()
        return softmax(scores, options.scale, known or masking_of(options), lengths, options.seed, options.site, lse)

    return weights


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, p: Tensor, options: Options, mask_gradient: bool,
    out: tuple[Tensor, ...] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of query, key, value, and of the additive mask if asked for; out as operand_gradients() takes it.

    The scores, which a soft cap's derivative needs, are computed once more: p lies where they were.
    """
    from fasttfm.kernels import masked_softmax

    grad = planes(grad).view(grad.shape)  # copied once at most
    d_kept = torch_route.scores(grad, value)
    cap = (torch_route.scores(query, key), options.scale, options.softcap) if options.softcap else None
    softmax = masked_softmax.Backward(p, options.dropout_p, in_place=True, with_kept=True)
    d_scores, kept, d_mask = scores_gradient(softmax, d_kept, p, options, mask_gradient, cap)
    return *torch_route.operand_gradients(grad, d_scores, query, key, kept, out), d_mask


def scores_gradient(
    softmax: Any, grad: Tensor, p: Tensor, options: Options, mask_gradient: bool,
    cap: tuple[Tensor, float, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradient of the scores before they were scaled, the weights after dropout, and if asked for the gradient of
    the additive mask.

    softmax: masked_softmax.Backward, whose grad and p these are; cap: products, scale and soft cap.
    """
    dropout = options.seed, options.site
    if not mask_gradient:
        return *softmax(grad, p, options.scale, *dropout, *([] if cap is None else [cap])), None
    d_scores, kept = softmax(grad, p, 1.0, *dropout)
    assert options.mask is not None
    d_mask = d_scores.float().sum_to_size(options.mask.shape).to(options.mask.dtype)
    d_scores = d_scores * options.scale  # not in place: a mask of the scores' own shape shares their memory
    if cap is not None:
        products, scale, softcap = cap
        d_scores *= 1.0 - torch.tanh(products * (scale / softcap)).square()
    return d_scores, kept, d_mask
