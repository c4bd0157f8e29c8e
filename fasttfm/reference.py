"""The mathematics of the Transformer in plain PyTorch: the specification that every kernel is checked against.

Written to be read beside the paper (Vaswani et al. 2017) and differentiated by autograd; imports torch alone. Shape
letters: B batch, H heads, L and S target and source length, D and Dv head size, M rows, N columns, V vocabulary,
T packed tokens. Statistics (mean, variance, log-sum-exp, loss) are float32 for half-precision input, else the input's own
precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------- dropout

_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_CHUNK_BLOCKS = 65536  # Philox blocks computed at a time: large enough for two threads, small enough for the cache


def dropout_threshold(p: float) -> int:
    """Lanes below it, of 65536, are dropped. Raises ValueError unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability {p} must lie in [0, 1]")
    return round(p * 65536)


def dropout_scale(p: float) -> float:
    """What kept values are multiplied by: one over the exact probability of keeping; 0 when nothing is kept."""
    threshold = dropout_threshold(p)
    return 65536 / (65536 - threshold) if threshold < 65536 else 0.0


def _philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7 (Salmon et al. 2011) on int64 tensors that hold 32-bit words and broadcast against each other.

    Only the lower 32 bits of the words that it returns mean anything.
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c2 = _mix(b, c1, k0), _mix(a, c3, k1)
        c1, c3 = b, a  # their upper halves are noise, which the next mix or the caller discards
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _mix(product: Tensor, word: Tensor, key: int) -> Tensor:
    """(product >> 32) ^ word ^ key, within 32 bits; in place once broadcasting has ended."""
    high = product >> 32
    high = high.bitwise_xor_(word) if high.shape == word.shape else high ^ word
    return high.bitwise_xor_(key).bitwise_and_(_WORD)


def keep_mask(
    shape: tuple[int, int, int], p: float, seed: Tensor, stream: int = 0, first_plane: int = 0
) -> Tensor:
    """True where dropout keeps the element of a (planes, rows, columns) tensor; the convention of kernels/philox.py.

    p in [0, 1]; seed (1,) int64; stream tells the calls of one model apart; first_plane is the number of the first
    plane. Returns a bool tensor of that shape on seed's device.
    """
    planes, rows, columns = shape
    device = seed.device
    threshold = dropout_threshold(p)
    if threshold in (0, 65536):
        return torch.full(shape, threshold == 0, dtype=torch.bool, device=device)
    key = int(seed.item())
    blocks = (columns + 7) // 8
    column = torch.arange(blocks, device=device).view(1, 1, blocks)
    plane = torch.arange(first_plane, first_plane + planes, device=device).view(planes, 1, 1)
    call = torch.full((1, 1, 1), stream, device=device)
    lanes = torch.empty(planes, rows, blocks, 2, dtype=torch.int64, device=device)
    step = max(1, _CHUNK_BLOCKS // max(1, blocks))  # rows at a time, over as many planes as fit
    planes_at_once = max(1, step // max(1, rows))
    for p0 in range(0, planes, planes_at_once):
        for r0 in range(0, rows, step):
            row = torch.arange(r0, min(r0 + step, rows), device=device).view(1, -1, 1)
            w0, w1, w2, w3 = _philox(key, column, row, plane[p0 : p0 + planes_at_once], call)
            into = lanes[p0 : p0 + planes_at_once, r0 : r0 + step]
            # little-endian: an int64 viewed as four int16 gives the lanes in order
            torch.bitwise_or(w0, w1 << 32, out=into[..., 0])
            torch.bitwise_or(w2, w3 << 32, out=into[..., 1])
    return (lanes.view(torch.int16).view(planes, rows, blocks * 8) >= threshold - 32768)[..., :columns]
