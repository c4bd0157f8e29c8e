"""Rotary position embedding (Su et al. 2021): queries and keys turned by their positions before their product."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.attention.layout import empty_heads_last, heads_last
from fasttfm.functional.backends import chosen, kernel_route, values_are_checked
from fasttfm.functional.operator import Gradients, Operator, Whole, unplanned
from fasttfm.functional.signature import checks_arguments, names_arguments

_MAX_PAIRS = 128
"""kernels/rotary.py's; wider heads go PyTorch's way."""


@names_arguments
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """x with each pair of a head's elements turned by its position's angle (Su et al. 2021, equation 34).

    x (B, H, L, D), queries or keys, or packed (T, H, D); float32, float16 or bfloat16, any strides.
    cos, sin (P, R / 2), of one dtype: of the angles of every position, as rotary_tables() makes them; computed with in
    float32. Elements from R on, R at most D, stay as they are. positions, int32 or int64 below P: (L,) or (B, L), or
    (T,), which packed x needs; None: 0, 1, ... to L - 1. They are checked on a CPU, and trusted on a GPU, where the
    host would have to wait for them, unless FASTTFM_CHECK=1 is in the environment; one that the tables do not have
    gives zeros there.
    Pairs are elements (i, i + R / 2), as in LLaMA and Hugging Face's models; interleaved: (2i, 2i + 1), as in the paper
    and GPT-J. Returns a new tensor of x's shape and dtype, heads last in memory, as attention() gives. Its gradient is
    turned back, so that nothing of x is kept; cos and sin take none. Raises ValueError for what does not agree.
    """
    _check(x, cos, sin, positions)
    packed = x.dim() == 3
    if packed:
        x = x.transpose(0, 1).unsqueeze(0)  # (1, H, T, D)
    if positions is not None:
        positions = positions.long() if positions.dim() == 2 else positions.long().unsqueeze(0)
    y = _rotary(x, cos.contiguous(), sin.contiguous(), positions, interleaved, False, chosen())
    return y[0].transpose(0, 1) if packed else y


@checks_arguments
def rotary_tables(
    length: int,
    size: int,
    *,
    base: float = 10_000.0,
    factor: float = 1.0,
    bands: tuple[int, float, float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin, (length, size / 2) each, of the angles position * base^(-2i / size) (Su et al. 2021, equation 15).

    size: elements of a head that are turned. factor: what the angles are divided by, for texts so many times as long as
    those of training (Chen et al. 2023). bands: (length, low, high): pairs that turn more than high times in length
    positions keep their angles, those that turn less than low times are slowed, and between them a share of each
    (Llama 3.1). Computed in float64. Raises ValueError for a size that is odd or below 2, and a factor below 1.
    """
    if length < 0:
        raise ValueError(f"length={length} must not be negative: it counts positions")
    if size < 2 or size % 2:
        raise ValueError(f"size={size} must be even and at least 2: elements are turned in pairs")
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be finite and at least 1: angles are divided by it")
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
    kept = torch.zeros_like(frequencies)
    if bands is not None:
        trained, low, high = bands
        if not high > low:
            raise ValueError(f"bands={bands} must be (length, low, high), high above low")
        kept = ((trained * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    frequencies = kept * frequencies + (1 - kept) * frequencies / factor
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    if x.dim() not in (3, 4) or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: floats (B, H, L, D), or packed (T, H, D), are needed")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.dtype != sin.dtype or not 0 < 2 * cos.shape[1] <= x.shape[-1]:
        raise ValueError(
            f"cos {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)} must both be (P, R / 2) of one "
            f"dtype, R from 2 to the head size {x.shape[-1]}"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos and sin take no gradient: give them detached")
    given = [cos, sin] if positions is None else [cos, sin, positions]
    if any(tensor.device != x.device for tensor in given):
        raise ValueError(f"cos, sin and positions must be on x's device, {x.device}")
    length = x.shape[-2] if x.dim() == 4 else x.shape[0]
    if positions is None:
        if x.dim() == 3:
            raise ValueError(
                f"packed x {tuple(x.shape)} needs positions ({length},), which begin anew in each sequence"
            )
        if length > cos.shape[0]:
            raise ValueError(f"x has {length} positions and the tables {cos.shape[0]}: make them longer")
        return
    allowed = [(length,)] if x.dim() == 3 else [(length,), (1, length), (x.shape[0], length)]
    if tuple(positions.shape) not in allowed or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"positions is {positions.dtype} {tuple(positions.shape)}: int32 or int64 "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))} is needed"
        )
    if values_are_checked(positions) and positions.numel():
        least, most = (int(x) for x in positions.aminmax())
        if least < 0 or most >= cos.shape[0]:
            raise ValueError(f"positions reach from {least} to {most}: the tables have rows 0 to {cos.shape[0] - 1}")


class _Call(NamedTuple):
    x: Tensor
    cos: Tensor
    sin: Tensor
    positions: Whole | None
    """(B or 1, L) int64."""
    interleaved: bool
    inverse: bool
    route: str


class _Saved(NamedTuple):
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    interleaved: bool
    inverse: bool
    route: str


def _decide(call: _Call) -> str:
    route = kernel_route(call.route, call.x)
    return "torch" if call.cos.shape[1] > _MAX_PAIRS or call.cos.dtype == torch.float64 else route


def _compute(call: _Call) -> Tensor:
    x, cos, sin, positions, interleaved, inverse, route = call
    if route == "triton":
        from fasttfm.kernels import rotary as kernel

        return kernel.rotate(x, cos, sin, positions, interleaved=interleaved, inverse=inverse)
    return heads_last(reference.rotary(x, cos, -sin if inverse else sin, positions, interleaved=interleaved))


def _differentiate(saved: _Saved, wanted: _Call, grad: Tensor) -> Gradients:
    turn = _rotary if torch._C._has_storage(grad) else _operator.dispatched  # a gradient without memory: all at once
    return {"x": turn(grad, *saved._replace(inverse=not saved.inverse))}


_operator = Operator(
    "rotary",
    _Call,
    "Tensor",
    unplanned(_compute),
    lambda call: empty_heads_last(call.x, call.x.shape[-1]),
    decide=_decide,
    save=lambda call, output: call[1:],
    saved=_Saved,
    backward=_differentiate,
    rows=("x", "positions"),
)
_rotary = _operator.call
