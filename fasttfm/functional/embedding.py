"""Token embedding: scale, position and dropout in one pass (Vaswani et al. 2017, sections 3.4, 3.5 and 5.4)."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import training_passes
from fasttfm.functional.backends import chosen, kernel_route
from fasttfm.functional.dropout import Dropout, as_factor, dropout_for, dropout_scale, fake_keep_mask, keep_mask, wide
from fasttfm.functional.operator import Gradients, Operator, Size, Whole, unplanned
from fasttfm.functional.signature import names_arguments


@names_arguments
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
    site: int = 0,
) -> Tensor:
    """dropout(weight[tokens] * scale + positions), zero where a token is pad_id.

    tokens (B, L) int64 in [0, V), weight (V, N), positions (at least first_position + L, N) or None, of any floating
    dtype; row first_position belongs to the first token. Tokens equal to pad_id take no gradient either. seed (1,)
    int64 and site, below 2^31, as in reference.keep_mask; a seed is drawn when dropout_p > 0 and none is given.
    Returns (B, L, N) in weight's dtype, also under autocast. The backward pass is deterministic.
    Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    if tokens.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"tokens {tuple(tokens.shape)} and weight {tuple(weight.shape)} must be (B, L) and (V, N)")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens are {tokens.dtype}: they must be int64")
    if weight.shape[0] == 0 and tokens.numel():
        raise ValueError(f"weight {tuple(weight.shape)} has no rows: tokens {tuple(tokens.shape)} need theirs")
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
    table = _Table(scale, pad_id, first_position, dropout_for(weight.device, dropout_p, seed, site))
    return _embed(tokens, weight, positions, table, chosen())[0]


class _Table(NamedTuple):
    """Rules of how rows are read from the tables."""

    scale: float
    pad_id: int | None
    first_position: Size
    dropout: Dropout


class _Call(NamedTuple):
    tokens: Whole
    weight: Tensor
    positions: Tensor | None
    table: _Table
    route: str


class _Shapes(NamedTuple):
    """Shapes of the gradients; 0 rows where none is wanted."""

    vocabulary: Size
    positions: Size


class _Saved(NamedTuple):
    tokens: Tensor
    keep: Tensor
    table: _Table
    route: str


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved
    rows: _Shapes


class _Kept(NamedTuple):
    saved: _Saved
    rows: _Shapes
    positions_dtype: torch.dtype | None


def _compute(call: _Call) -> tuple[Tensor, Tensor]:
    """The output, and the keep mask (B * L, N), which is empty where nothing is dropped or a kernel did it."""
    tokens, weight, positions, table, route = call
    if route == "triton":
        from fasttfm.kernels import embedding as kernel

        y = kernel.forward(
            tokens.contiguous(),
            weight.contiguous(),
            None if positions is None else positions.contiguous(),
            scale=table.scale,
            pad_id=table.pad_id,
            first_position=table.first_position,
            **table.dropout._asdict(),
        )
        return y, y.new_empty(0, dtype=torch.bool)
    x = _rows_of(weight, tokens).to(wide(weight.dtype))  # (B, L, N), a fresh tensor
    if positions is None:
        x *= table.scale
    else:
        first = table.first_position
        torch.add(positions[first : first + tokens.shape[1]].to(x.dtype), x, alpha=table.scale, out=x)
    keep = keep_mask(x.view(-1, x.shape[-1]), table.dropout)
    return _mask_(x, tokens, keep, table).to(weight.dtype), keep


def _rows_of(weight: Tensor, tokens: Tensor) -> Tensor:
    """weight[tokens]. Raises ValueError for a token that does not exist, where PyTorch notices."""
    try:
        return torch.nn.functional.embedding(tokens, weight)
    except IndexError:
        raise ValueError(
            f"tokens reach from {int(tokens.min())} to {int(tokens.max())}: weight {tuple(weight.shape)} has rows 0 to "
            f"{weight.shape[0] - 1}"
        ) from None


def _mask_(x: Tensor, tokens: Tensor, keep: Tensor, table: _Table) -> Tensor:
    """Dropout, and zero rows at pad_id, on x (B, L, N) in place."""
    if keep.numel():
        x *= as_factor(keep, x.dtype).view(x.shape)
        x *= dropout_scale(table.dropout.dropout_p)
    if table.pad_id is not None:
        x.masked_fill_((tokens == table.pad_id)[..., None], 0.0)
    return x


def _fake(call: _Call) -> tuple[Tensor, Tensor]:
    y = call.weight.new_empty((*call.tokens.shape, call.weight.shape[1]))
    return y, fake_keep_mask(y, call.table.dropout, call.route)


def _save(call: _Call, outputs: tuple[Tensor, Tensor]) -> _Kept:
    positions = call.positions
    rows = _Shapes(call.weight.shape[0], 0 if positions is None else positions.shape[0])
    saved = _Saved(call.tokens, outputs[1], call.table, call.route)
    return _Kept(saved, rows, None if positions is None else positions.dtype)


def _differentiate(kept: _Kept, wanted: _Call, grad: Tensor, _: None) -> Gradients:
    rows = _Shapes(kept.rows.vocabulary if wanted.weight else 0, kept.rows.positions if wanted.positions else 0)
    d_weight, d_positions = _embed_backward(grad, kept.saved, rows)
    return {
        "weight": d_weight if wanted.weight else None,
        "positions": d_positions.to(kept.positions_dtype) if wanted.positions else None,
    }


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    """Gradients of weight in grad's dtype and of positions in float32, each without rows where it is not asked for."""
    if call.saved.route == "triton":
        return _kernel_backward(call)
    grad, (tokens, keep, table, _), rows = call
    if not rows.positions and rows.vocabulary and training_passes.takes(grad):
        d_weight = training_passes.embedding_gradient(
            grad.contiguous(), tokens.contiguous(), rows.vocabulary, table.pad_id, keep,
            dropout_scale(table.dropout.dropout_p), table.scale,
        )  # fmt: skip
        return d_weight, grad.new_zeros(0, grad.shape[-1], dtype=wide(grad.dtype))
    x = _mask_(grad.to(wide(grad.dtype), copy=True), tokens, keep, table)
    d_positions = x.new_zeros(rows.positions, grad.shape[-1])
    if rows.positions:
        torch.sum(x, dim=0, out=d_positions[table.first_position : table.first_position + tokens.shape[1]])
    if not rows.vocabulary:
        return x.new_empty(0, grad.shape[-1], dtype=grad.dtype), d_positions
    x *= table.scale
    # Each thread sums the rows of its own part of the vocabulary in the order of the tokens: deterministic.
    padding = -1 if table.pad_id is None else table.pad_id
    d_weight = torch.ops.aten.embedding_dense_backward(x, tokens, rows.vocabulary, padding, False)
    return d_weight.to(grad.dtype), d_positions


def _kernel_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    from fasttfm.kernels import embedding as kernel

    table, rows = call.saved.table, call.rows
    grad, tokens = call.grad.contiguous(), call.saved.tokens.contiguous()
    options = {"pad_id": table.pad_id, **table.dropout._asdict()}
    d_positions = grad.new_empty(rows.positions, grad.shape[-1], dtype=torch.float32)
    if rows.positions:
        first = table.first_position
        d_positions.zero_()[first : first + tokens.shape[1]] = kernel.position_gradient(grad, tokens, **options)
    if not rows.vocabulary:
        return grad.new_empty(0, grad.shape[-1]), d_positions
    return kernel.weight_gradient(grad, tokens, rows.vocabulary, scale=table.scale, **options), d_positions


def _fake_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    grad, rows, width = call.grad, call.rows, call.grad.shape[-1]
    return grad.new_empty(rows.vocabulary, width), grad.new_empty(rows.positions, width, dtype=wide(grad.dtype))


def _reference_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    grad, (tokens, _, table, _), rows = call
    x = reference.dropout(grad.to(wide(grad.dtype)), *table.dropout)
    if table.pad_id is not None:
        x = x.masked_fill((tokens == table.pad_id)[..., None], 0.0)
    empty, first = x.new_empty(0, x.shape[-1]), table.first_position
    d_weight = empty.to(grad.dtype)
    if rows.vocabulary:
        places = tokens.flatten(), x.flatten(0, 1) * table.scale
        d_weight = x.new_zeros(rows.vocabulary, x.shape[-1]).index_add(0, *places).to(grad.dtype)
    if not rows.positions:
        return d_weight, empty
    return d_weight, torch.nn.functional.pad(x.sum(0), (0, 0, first, rows.positions - first - x.shape[1]))


_embed_backward = Operator(
    "embed_backward",
    _Backward,
    "(Tensor, Tensor)",
    unplanned(_compute_backward),
    _fake_backward,
    reference=_reference_backward,
).call
_embed = Operator(
    "embed",
    _Call,
    "(Tensor, Tensor)",
    unplanned(_compute, 1),
    _fake,
    decide=lambda call: kernel_route(call.route, call.weight),
    save=_save,
    backward=_differentiate,
    rows=("tokens",),
).call
