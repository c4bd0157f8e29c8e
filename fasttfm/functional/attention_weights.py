"""The weights of attention by themselves, softmax(Q K^T * scale), as a torch operator on the scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import _attention_kernels as kernels
from fasttfm.functional import _attention_torch as plain
from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import seed_for
from fasttfm.functional._operators import Operator
from fasttfm.functional.attention import casts, check, kernel_options, nothing


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """The weights of attention(), dropout applied: softmax(Q K^T * scale), (B, H, L, S) in query's dtype.

    Arguments, errors and gradients as attention()'s: attention_weights(q, k, ...) @ v is attention(q, k, v, ...).
    """
    check(query, key, key_lengths, mask, dropout_p)
    seed = seed_for(query, dropout_p, seed)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.get_autocast_dtype(query.device.type) if casts(query) else query.dtype
    power, left = plain.split_scale(scale, dtype)
    query = query if power == 1.0 else query * power
    scores = query @ key.transpose(-2, -1)  # (B, H, L, S), under autocast in its dtype
    return _softmax(
        scores,
        key_lengths,
        mask,
        causal,
        causal_offset,
        dropout_p,
        left,
        seed,
        stream,
        chosen(),
    )[0]


def _compute(
    scores: Tensor,
    key_lengths: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    causal_offset: int,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if kernels.uses_triton(scores, backend):
        options = kernel_options(key_lengths, mask, causal, causal_offset, dropout_p, seed, stream)
        p, kept = kernels.softmax(scores, scale, options)
        return (p, nothing(p)) if kept is None else (kept, p)
    p = plain.weights(scores, scale, key_lengths, mask, causal, causal_offset)
    if seed is None:
        return p, nothing(p)
    return plain.drop(p, dropout_p, seed, stream), p


def _fake(scores: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    like = scores.new_empty(scores.shape)
    return like, nothing(like) if options[-3] is None else torch.empty_like(like)


def _save(ctx: Any, args: tuple, outputs: tuple) -> None:
    mask, seed = args[2], args[7]
    ctx.save_for_backward(*outputs, mask, seed)
    ctx.options = (*args[5:7], *args[8:])
    ctx.mark_non_differentiable(outputs[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple:
    if grad is None:
        return (None,) * 10
    kept, p, mask, seed = ctx.saved_tensors
    wants_mask = ctx.needs_input_grad[2]
    dropout_p, scale, stream, backend = ctx.options
    d_scores, d_mask = _backward(grad, kept, p, mask, dropout_p, scale, seed, stream, backend, wants_mask)
    return d_scores, None, d_mask if wants_mask else None, *(None,) * 7


def _compute_backward(
    grad: Tensor,
    kept: Tensor,
    p: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor]:
    wanted = mask if mask_gradient else None
    p, dropped = (kept, None) if seed is None else (p, kept)
    if kernels.uses_triton(grad, backend):
        d_scores, d_mask = kernels.softmax_gradient(grad, p, scale, wanted, dropout_p, seed, stream)
    else:
        gradient = plain.softmax_gradient(grad, p, dropped)
        d_mask = None if wanted is None else gradient.sum_to_size(wanted.shape).to(wanted.dtype)
        d_scores = (gradient * scale).to(kept.dtype)
    return d_scores, nothing(kept) if d_mask is None else d_mask


def _fake_backward(grad: Tensor, kept: Tensor, p: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(kept), mask.new_empty(mask.shape) if mask is not None and options[-1] else nothing(kept)


_backward = Operator(
    "attention_softmax_backward(Tensor grad, Tensor kept, Tensor p, Tensor? mask, float dropout_p, float scale, "
    "Tensor? seed, int stream, str backend, bool mask_gradient) -> (Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)
_softmax = Operator(
    "attention_softmax(Tensor scores, Tensor? key_lengths, Tensor? mask, bool causal, SymInt causal_offset, "
    "float dropout_p, float scale, Tensor? seed, int stream, str backend) -> (Tensor, Tensor)",
    _compute,
    _fake,
    save=_save,
    backward=_differentiate,
)
