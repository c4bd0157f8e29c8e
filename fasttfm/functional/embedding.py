"""Token embedding, fused with scale, positions and dropout (Vaswani et al. 2017, sections 3.4, 3.5 and 5.4)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import training_passes
from fasttfm.functional import backends
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.dropout import LEAST_P, as_factor, draw_seed, dropout_for, dropout_scale, keep_mask, wide
from fasttfm.functional.operator import WHOLE, Operator, Size, Whole, without_views
from fasttfm.functional.rows import as_rows, dense
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
    int64 and site, below 2^31, as in reference.keep_mask; the seed is drawn if needed and not given. Returns (B, L, N)
    in weight's dtype, also under autocast. The backward pass is deterministic.
    Raises ValueError for shapes that do not agree or a dropout_p outside [0, 1].
    """
    seed = None if dropout_p <= LEAST_P else draw_seed(weight.device) if seed is None else seed
    return _embed(tokens, weight, positions, seed, scale, pad_id, first_position, dropout_p, site, backends.current)[0]


class _Call(NamedTuple):
    tokens: Whole
    weight: Tensor
    positions: Tensor | None
    seed: Whole | None
    """None: nothing is dropped."""
    scale: float
    pad_id: int | None
    first_position: Size
    dropout_p: float
    site: int
    route: str


class _Saved(NamedTuple):
    tokens: Tensor
    keep: Tensor | None
    """(B * L, N) bool, or empty; None from a kernel."""
    seed: Whole | None
    scale: float
    pad_id: int | None
    first_position: Size
    dropout_p: float
    site: int
    route: str
    vocabulary: Size
    positions: Size
    """Rows of the position table."""
    positions_dtype: torch.dtype | None


class _Backward(NamedTuple):
    grad: Tensor
    of_weight: bool
    """Whether weight's gradient is needed."""
    of_positions: bool
    saved: _Saved


def _checks(call: _Call) -> None:
    tokens, weight, positions, _, _, _, first_position, *_ = call
    if tokens.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"tokens {tuple(tokens.shape)} and weight {tuple(weight.shape)} must be (B, L) and (V, N)")
    if tokens.dtype not in WHOLE:
        raise ValueError(f"tokens are {tokens.dtype}: they must be int64")
    if weight.shape[0] == 0 and tokens.numel():
        raise ValueError(f"weight {tuple(weight.shape)} has no rows for tokens {tuple(tokens.shape)}")
    if positions is not None:
        last = first_position + tokens.shape[1]
        wrong = positions.dim() != 2 or positions.shape[1] != weight.shape[1]
        if wrong or not 0 <= first_position <= last <= positions.shape[0]:
            raise ValueError(
                f"positions {tuple(positions.shape)} must be (at least {last}, {weight.shape[1]}): tokens "
                f"{tuple(tokens.shape)} begin at position {first_position} and rows are {weight.shape[1]} wide"
            )
    dropout_for(weight.device, call.dropout_p, call.seed, call.site, "weight")


def _plan(call: _Call) -> Callable[[_Call], tuple[Tensor, Tensor | None]]:
    """Compute the output, and the keep mask (B * L, N) bool, or empty; None from a kernel."""
    if call.route == "torch":
        return without_views(_compute_by_torch, internal=1)
    from fasttfm.kernels import embedding as kernel

    forward: Any = kernel.Forward(*call[:3], call.scale, call.pad_id, call.first_position, call.dropout_p)
    return dense(lambda call: (forward(*call[:4], call.site), None), call, 3)


def _compute_by_torch(call: _Call) -> tuple[Tensor, Tensor]:
    tokens, weight, positions, _, scale, _, first, *_ = call
    x = _rows_of(weight, tokens).to(wide(weight.dtype))  # (B, L, N), a fresh tensor
    if positions is None:
        x *= scale
    else:
        torch.add(positions[first : first + tokens.shape[1]].to(x.dtype), x, alpha=scale, out=x)
    keep = keep_mask(as_rows(x), call)
    return _masked(x, tokens, keep, call).to(weight.dtype), keep


def _rows_of(weight: Tensor, tokens: Tensor) -> Tensor:
    """weight[tokens]. Raises ValueError for a token out of range, if PyTorch detects it."""
    try:
        return torch.nn.functional.embedding(tokens, weight)
    except IndexError:
        raise ValueError(
            f"tokens reach from {int(tokens.min())} to {int(tokens.max())}: weight {tuple(weight.shape)} has rows 0 to "
            f"{weight.shape[0] - 1}"
        ) from None


def _masked(x: Tensor, tokens: Tensor, keep: Tensor, call: "_Call | _Saved") -> Tensor:
    """Apply dropout, and zero the rows of pad_id, to x (B, L, N) in place."""
    if keep.numel():
        x *= as_factor(keep, x.dtype).view(x.shape)
        x *= dropout_scale(call.dropout_p)
    if call.pad_id is not None:
        x.masked_fill_((tokens == call.pad_id)[..., None], 0.0)
    return x


def _fake(call: _Call) -> tuple[Tensor, Tensor | None]:
    y = call.weight.new_empty((*call.tokens.shape, call.weight.shape[1]))
    if call.route == "triton":
        return y, None
    return y, y.new_empty((0,) if call.seed is None else (call.tokens.numel(), y.shape[-1]), dtype=torch.bool)


def _save(call: _Call, outputs: tuple[Tensor, Tensor | None]) -> tuple:
    tokens, weight, positions, *others = call
    table = (0, None) if positions is None else (positions.shape[0], positions.dtype)
    return tokens, outputs[1], *others, weight.shape[0], *table


def _differentiate(
    backward: Callable[..., tuple], saved: _Saved, needs_grad: _Call, grad: Tensor, *_: None
) -> tuple[Tensor | None, ...]:
    call = _embed_backward.record((grad, needs_grad.weight, needs_grad.positions, saved))
    d_weight, d_positions = backward(call)
    return None, d_weight, d_positions, None


def _plan_backward(call: _Backward) -> Callable[[_Backward], tuple[Tensor | None, Tensor | None]]:
    """Compute the gradients of weight in grad's dtype and of positions in theirs; None if not needed."""
    grad, of_weight, of_positions, saved = call
    if saved.route == "torch":
        by_loop = of_weight and not of_positions and training_passes.takes(grad)
        return _compute_backward_by_loop if by_loop else without_views(_compute_backward_by_torch)
    from fasttfm.kernels import embedding as kernel

    tokens, _, _, scale, pad_id, _, dropout_p, *_ = saved
    weight_gradient = kernel.Gradient(grad, tokens, saved.vocabulary, scale, pad_id, dropout_p)
    position_gradient = kernel.Gradient(grad, tokens, None, 1.0, pad_id, dropout_p)
    copied = not tokens.is_contiguous()

    def compute(call: _Backward) -> tuple[Tensor | None, Tensor | None]:
        grad, _, _, saved = call
        args = grad, saved.tokens.contiguous() if copied else saved.tokens, saved.seed, saved.site
        d_weight = weight_gradient(*args) if of_weight else None
        return d_weight, _in_table(position_gradient(*args), saved) if of_positions else None

    return dense(compute, call, 1)


def _in_table(gradient: Tensor, saved: _Saved) -> Tensor:
    """The gradient of the position table, from the gradient of the rows that were read."""
    table = gradient.new_zeros(saved.positions, gradient.shape[1], dtype=saved.positions_dtype)
    table[saved.first_position : saved.first_position + len(gradient)] = gradient
    return table


def _compute_backward_by_loop(call: _Backward) -> tuple[Tensor, None]:
    grad, saved = call.grad.contiguous(), call.saved
    return training_passes.embedding_gradient(
        grad, saved.tokens.contiguous(), saved.vocabulary, saved.pad_id, saved.keep,  # type: ignore[arg-type]
        dropout_scale(saved.dropout_p), saved.scale,
    ), None  # fmt: skip


def _compute_backward_by_torch(call: _Backward) -> tuple[Tensor | None, Tensor | None]:
    grad, of_weight, of_positions, saved = call
    x = _masked(grad.to(wide(grad.dtype), copy=True), saved.tokens, saved.keep, saved)  # type: ignore[arg-type]
    d_positions = _in_table(x.sum(0), saved) if of_positions else None
    if not of_weight:
        return None, d_positions
    x *= saved.scale
    # Deterministic: each thread sums its own part of the vocabulary, in the order of the tokens.
    padding = -1 if saved.pad_id is None else saved.pad_id
    d_weight = torch.ops.aten.embedding_dense_backward(x, saved.tokens, saved.vocabulary, padding, False)
    return d_weight.to(grad.dtype), d_positions


def _fake_backward(call: _Backward) -> tuple[Tensor | None, Tensor | None]:
    grad, of_weight, of_positions, saved = call
    d_weight = grad.new_empty(saved.vocabulary, grad.shape[-1]) if of_weight else None
    table = saved.positions, grad.shape[-1]
    return d_weight, grad.new_empty(table, dtype=saved.positions_dtype) if of_positions else None


def _reference_backward(call: _Backward) -> tuple[Tensor, Tensor]:
    grad, of_weight, of_positions, saved = call
    x = reference.dropout(grad.to(wide(grad.dtype)), saved.dropout_p, saved.seed, saved.site)
    if saved.pad_id is not None:
        x = x.masked_fill((saved.tokens == saved.pad_id)[..., None], 0.0)
    d_weight = d_positions = grad.new_empty(0)
    if of_weight:
        rows = saved.tokens.flatten(), x.flatten(0, 1) * saved.scale
        d_weight = x.new_zeros(saved.vocabulary, x.shape[-1]).index_add(0, *rows).to(grad.dtype)
    if of_positions:
        first = saved.first_position
        table = torch.nn.functional.pad(x.sum(0), (0, 0, first, saved.positions - first - x.shape[1]))
        d_positions = table.to(saved.positions_dtype)
    return d_weight, d_positions


_embed_backward = Operator(
    "embed_backward", _Backward, "(Tensor, Tensor)", _plan_backward, _fake_backward, reference=_reference_backward
)  # fmt: skip
_embed = Operator(
    "embed", _Call, "(Tensor, Tensor)", _plan, _fake, checks=_checks,
    decide=lambda call: kernel_route(call.route, call.weight), save=_save, saved=_Saved, backward=_differentiate,
    derivative=_embed_backward, visible=1, rows=("tokens",), free=("site",),
).call  # fmt: skip
