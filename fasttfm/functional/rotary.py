"""Rotary position embedding (Su et al. 2021), applied to queries and keys."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional import backends
from fasttfm.functional.attention.call import LARGEST, empty_heads_last, heads_last
from fasttfm.functional.backends import kernel_route, values_are_checked
from fasttfm.functional.operator import WHOLE, Operator, Whole, without_views
from fasttfm.functional.signature import checks_arguments, names_arguments

_MAX_PAIRS = 128
"""The kernel's limit, from kernels/rotary.py; wider rotations are computed by PyTorch."""
_LONGEST_STRIDE = (1 << 31) - 1
"""The kernel's limit for positions, which it reads by 32-bit strides; farther ones are read by PyTorch."""


@names_arguments
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Rotate pairs of each head's elements by the angles of their position (Su et al. 2021, equation 34).

    x (B, H, L, D), queries or keys, or packed (T, H, D); float32, float16 or bfloat16, any strides.
    cos, sin (P, R / 2), one dtype: tables of rotary_tables(), applied in float32. Elements from R on, R at most D, are
    copied. positions, int32 or int64 below P: (L,) or (B, L), or (T,), required for packed x; None: 0 to L - 1. They
    are checked on a CPU; on a GPU, where the check would wait for the device, only with FASTTFM_CHECK=1: a position
    out of range gives zeros there.
    Pairs are elements (i, i + R / 2), as in LLaMA and Hugging Face's models; interleaved: (2i, 2i + 1), as in the paper
    and GPT-J. Returns a new tensor of x's shape and dtype, heads last in memory, as attention() does. The backward pass
    rotates back, and saves nothing of x; cos and sin take no gradient. Raises ValueError for arguments that do not
    agree.
    """
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        raise ValueError("cos and sin take no gradient: give them detached")
    if positions is not None and x.dim() == 4 and positions.shape == x.shape[2:3] and positions.dtype in WHOLE:
        positions = positions[None]
    return _rotary(x, cos, sin, positions, interleaved, backends.current)


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

    size: elements of a head that are rotated. factor: divides the angles, to extend the context by it (Chen et al.
    2023). bands (length, low, high): pairs that rotate more than high times in length positions keep their angles,
    those below low times are divided, and those between are interpolated (Llama 3.1). Computed in float64. Raises
    ValueError for a size that is odd or below 2, a factor below 1, and a base or bands that give no angles.
    """
    if length < 0:
        raise ValueError(f"length={length} must not be negative: it counts positions")
    if size < 2 or size % 2:
        raise ValueError(f"size={size} must be even and at least 2: elements are rotated in pairs")
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be finite and at least 1: angles are divided by it")
    if not 1e-30 <= base <= LARGEST:
        raise ValueError(f"base={base} must be a number from 1e-30 to {LARGEST}: frequencies are its powers")
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
    share = torch.zeros_like(frequencies)
    if bands is not None:
        trained, low, high = bands
        if not (0 < trained < math.inf and -math.inf < low < high < math.inf):
            raise ValueError(f"bands={bands} must be (length, low, high), length above 0 and high above low, finite")
        share = ((trained * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    frequencies = share * frequencies + (1 - share) * frequencies / factor
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Call(NamedTuple):
    x: Tensor
    cos: Tensor
    sin: Tensor
    positions: Whole | None
    """(B or 1, L), or for packed x (T,)."""
    interleaved: bool
    route: str


class _Saved(NamedTuple):
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    interleaved: bool
    route: str


def _checks(call: _Call) -> None:
    x, cos, sin, positions, *_ = call
    if x.dim() not in (3, 4) or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: floats (B, H, L, D), or packed (T, H, D), are needed")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.dtype != sin.dtype or not 0 < 2 * cos.shape[1] <= x.shape[-1]:
        raise ValueError(
            f"cos {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)} must both be (P, R / 2) of one "
            f"dtype, R from 2 to the head size {x.shape[-1]}"
        )
    if any(tensor is not None and tensor.device != x.device for tensor in (cos, sin, positions)):
        raise ValueError(f"cos, sin and positions must be on x's device, {x.device}")
    length = x.shape[-2] if x.dim() == 4 else x.shape[0]
    if positions is None:
        if x.dim() == 3:
            raise ValueError(f"packed x {tuple(x.shape)} needs positions ({length},), which restart in each sequence")
        if length > cos.shape[0]:
            raise ValueError(f"x has {length} positions and the tables {cos.shape[0]}: make longer tables")
        return
    allowed = [(length,)] if x.dim() == 3 else [(length,), (1, length), (x.shape[0], length)]
    if tuple(positions.shape) not in allowed or positions.dtype not in WHOLE:
        raise ValueError(
            f"positions is {positions.dtype} {tuple(positions.shape)}: int32 or int64 "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))} is needed"
        )


def _decide(call: _Call) -> str:
    route = kernel_route(call.route, call.x)
    return "torch" if call.cos.shape[1] > _MAX_PAIRS or call.cos.dtype == torch.float64 else route


def _plan(call: _Call) -> Callable[[_Call], Tensor]:
    rotate = _plan_rotation(call, inverse=False)
    if call.positions is None:
        return rotate

    def compute(call: _Call) -> Tensor:
        positions, rows = call.positions, len(call.cos)
        if values_are_checked(positions) and positions.numel():  # type: ignore[arg-type, union-attr]
            least, most = map(int, positions.aminmax())  # type: ignore[union-attr]
            if least < 0 or most >= rows:
                raise ValueError(f"positions reach from {least} to {most}: the tables have rows 0 to {rows - 1}")
        return rotate(call)

    return compute


def _plan_rotation(call: _Call, inverse: bool) -> Callable[[_Call], Tensor]:
    far = call.positions is not None and max(call.positions.stride(), default=0) > _LONGEST_STRIDE
    if call.route == "torch" or far:
        return without_views(functools.partial(_rotate_by_torch, inverse=inverse))
    from fasttfm.kernels import rotary as kernel

    x, cos, _, positions = tensors = _dense(*call[:4])
    rotate = kernel.Rotation(x, cos, positions, interleaved=call.interleaved, inverse=inverse)
    copied = any(a is not b for a, b in zip(tensors, call))
    return lambda call: rotate(*(_dense(*call[:4]) if copied else call[:4]))


def _dense(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors with the strides and dtypes that the kernel reads."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, cos.contiguous(), sin.contiguous(), None if positions is None else positions.long()


def _rotate_by_torch(call: _Call, inverse: bool) -> Tensor:
    x, cos, sin, positions, interleaved, _ = call
    by_head = x if x.dim() == 4 else x.transpose(0, 1)[None]
    positions = None if positions is None else positions.long()
    y = heads_last(reference.rotary(by_head, cos, -sin if inverse else sin, positions, interleaved=interleaved))
    return y if x.dim() == 4 else y[0].transpose(0, 1)


def _fake(call: _Call) -> Tensor:
    return empty_heads_last(call.x, call.x.shape[-1]) if call.x.dim() == 4 else call.x.new_empty(call.x.shape)


_shared: dict[str, Any] = {
    "decide": _decide, "save": lambda call, output: call[1:], "saved": _Saved, "rows": ("x", "positions")
}  # fmt: skip
_back = Operator(
    "rotary_backward", _Call, "Tensor", functools.partial(_plan_rotation, inverse=True), _fake,
    backward=lambda _, saved, needs_grad, grad: (_rotary(grad, *saved), None, None, None), **_shared,
)  # fmt: skip
_rotary: Any = Operator(
    "rotary", _Call, "Tensor", _plan, _fake, checks=_checks, derivative=_back,
    backward=lambda back, saved, needs_grad, grad: (back(_back.record((grad, *saved))), None, None, None), **_shared,
).call  # fmt: skip
