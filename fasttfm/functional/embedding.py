"""Token embedding: scale, position and dropout in one pass (Vaswani et al. 2017, sections 3.4, 3.5 and 5.4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional._backend import chosen
from fasttfm.functional._dropped import as_factor, kept, seed_for, wide
from fasttfm.functional._layers import by_kernel, fake_keep
from fasttfm.functional._operators import Operator


def _forward_compute(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    scale: float,
    pad_id: int | None,
    first_position: int,
    dropout_p: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The output, and the keep-mask (B * L, N), which is empty where nothing is dropped or a kernel did it."""
    if by_kernel(backend, weight):
        from fasttfm.kernels import embedding as kernel

        y = kernel.forward(
            tokens.contiguous(),
            weight.contiguous(),
            None if positions is None else positions.contiguous(),
            scale=scale,
            pad_id=pad_id,
            first_position=first_position,
            dropout_p=dropout_p,
            seed=seed,
            stream=stream,
        )
        return y, y.new_empty(0, dtype=torch.bool)
    x = _rows_of(weight, tokens).to(wide(weight.dtype))  # (B, L, N), a fresh tensor
    if positions is None:
        x *= scale
    else:
        torch.add(positions[first_position : first_position + tokens.shape[1]].to(x.dtype), x, alpha=scale, out=x)
    keep = kept(x.view(-1, x.shape[-1]), dropout_p, seed, stream)
    return _mask_(x, tokens, pad_id, keep, dropout_p).to(weight.dtype), keep


def _rows_of(weight: Tensor, tokens: Tensor) -> Tensor:
    """weight[tokens]. Raises ValueError for a token that does not exist, where PyTorch notices."""
    try:
        return torch.nn.functional.embedding(tokens, weight)
    except IndexError:
        raise ValueError(
            f"tokens reach from {int(tokens.min())} to {int(tokens.max())}: weight {tuple(weight.shape)} has rows 0 to "
            f"{weight.shape[0] - 1}"
        ) from None


def _mask_(x: Tensor, tokens: Tensor, pad_id: int | None, keep: Tensor, dropout_p: float) -> Tensor:
    """Dropout, and zero rows at pad_id, on x (B, L, N) in place."""
    if keep.numel():
        x *= as_factor(keep, x.dtype).view(x.shape)
        x *= reference.dropout_scale(dropout_p)
    if pad_id is not None:
        x.masked_fill_((tokens == pad_id)[..., None], 0.0)
    return x


def _backward_compute(
    grad: Tensor,
    tokens: Tensor,
    keep: Tensor,
    vocabulary: int,
    table: int,
    scale: float,
    pad_id: int | None,
    first_position: int,
    dropout_p: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of weight in grad's dtype and of positions in float32, each without rows where it is not asked for."""
    length, width = tokens.shape[1], grad.shape[-1]
    if not keep.numel() and by_kernel(backend, grad):
        from fasttfm.kernels import embedding as kernel

        grad, tokens = grad.contiguous(), tokens.contiguous()
        mask = {"pad_id": pad_id, "dropout_p": dropout_p, "seed": seed, "stream": stream}
        grad_positions = grad.new_empty(table, width, dtype=torch.float32)
        if table:
            grad_positions.zero_()[first_position : first_position + length] = kernel.position_gradient(
                grad, tokens, **mask
            )
        if not vocabulary:
            return grad.new_empty(0, width), grad_positions
        return kernel.weight_gradient(grad, tokens, vocabulary, scale=scale, **mask), grad_positions
    if not keep.numel():
        keep = kept(grad.reshape(-1, width), dropout_p, seed, stream)
    x = _mask_(grad.to(wide(grad.dtype), copy=True), tokens, pad_id, keep, dropout_p)
    grad_positions = x.new_zeros(table, width)
    if table:
        torch.sum(x, dim=0, out=grad_positions[first_position : first_position + length])
    if not vocabulary:
        return x.new_empty(0, width, dtype=grad.dtype), grad_positions
    x *= scale
    # Each thread sums the rows of its own part of the vocabulary in the order of the tokens: deterministic.
    padding = -1 if pad_id is None else pad_id
    grad_weight = torch.ops.aten.embedding_dense_backward(x, tokens, vocabulary, padding, False)
    return grad_weight.to(grad.dtype), grad_positions


# -------------------------------------------------------------------------------------------------------- operators


def _forward_fake(tokens: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    y = weight.new_empty((*tokens.shape, weight.shape[1]))
    return y, fake_keep(y, y, rest[-3], rest[-1])


def _backward_fake(
    grad: Tensor, tokens: Tensor, keep: Tensor, vocabulary: int, table: int, *_: Any
) -> tuple[Tensor, Tensor]:
    width = grad.shape[-1]
    return grad.new_empty(vocabulary, width), grad.new_empty(table, width, dtype=wide(grad.dtype))


def _save(ctx: Any, args: tuple, outputs: tuple[Tensor, Tensor]) -> None:
    tokens, weight, positions, *options, seed, stream, backend = args
    _, keep = outputs
    ctx.mark_non_differentiable(keep)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(tokens, keep, seed)
    ctx.vocabulary = weight.shape[0]
    ctx.table = None if positions is None else (positions.shape[0], positions.dtype)
    ctx.options = options, stream, backend


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:
        return (None,) * 10
    tokens, keep, seed = ctx.saved_tensors
    options, stream, backend = ctx.options
    _, need_weight, need_positions, *_ = ctx.needs_input_grad
    vocabulary, table = ctx.vocabulary if need_weight else 0, ctx.table[0] if need_positions else 0
    grad_weight, grad_positions = _embed_backward(
        grad, tokens, keep, vocabulary, table, *options, seed, stream, backend
    )
    return (
        None,
        grad_weight if need_weight else None,
        grad_positions.to(ctx.table[1]) if need_positions else None,
        *(None,) * 7,
    )


_embed_backward = Operator(
    "embed_backward(Tensor grad, Tensor tokens, Tensor keep, SymInt vocabulary, SymInt table, float scale, "
    "int? pad_id, SymInt first_position, float dropout_p, Tensor? seed, int stream, str backend) -> (Tensor, Tensor)",
    _backward_compute,
    _backward_fake,
)

_embed = Operator(
    "embed(Tensor tokens, Tensor weight, Tensor? positions, float scale, int? pad_id, SymInt first_position, "
    "float dropout_p, Tensor? seed, int stream, str backend) -> (Tensor, Tensor)",
    _forward_compute,
    _forward_fake,
    save=_save,
    backward=_backward,
)


def embed(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    *,
    scale: float = 1.0,
    pad_id: int | None = None,
    first_position: int = 0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """dropout(weight[tokens] * scale + positions), zero where a token is pad_id.

    tokens (B, L) int64 in [0, V), weight (V, N), positions (at least first_position + L, N) or None, of any floating
    dtype; row first_position belongs to the first token. Tokens equal to pad_id take no gradient either. seed (1,)
    int64 and stream as in reference.keep_mask; a seed is drawn when dropout_p > 0 and none is given.
    Returns (B, L, N) in weight's dtype, also under autocast. The backward pass is deterministic.
    Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    if tokens.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"tokens {tuple(tokens.shape)} and weight {tuple(weight.shape)} must be (B, L) and (V, N)")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens are {tokens.dtype}: they must be int64")
    if positions is not None:
        last = first_position + tokens.shape[1]
        if (
            positions.dim() != 2
            or positions.shape[1] != weight.shape[1]
            or not 0 <= first_position <= last <= positions.shape[0]
        ):
            raise ValueError(
                f"positions {tuple(positions.shape)} must be (at least {last}, {weight.shape[1]}): tokens "
                f"{tuple(tokens.shape)} begin at position {first_position} and rows are {weight.shape[1]} wide"
            )
    seed = seed_for(weight, dropout_p, seed)
    options = (float(scale), pad_id, first_position, float(dropout_p))
    return _embed(tokens, weight, positions, *options, seed, stream, chosen())[0]
