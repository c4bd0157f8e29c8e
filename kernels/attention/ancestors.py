"""Self-attention of one beam search step over a KV cache whose entries never move.

    out = softmax([q k_0, ..., q k_position] * scale) [v_0, ..., v_position]

Every row, a hypothesis, has one new token. Its key and value are stored in the cache at row * T + position, their
place, and stay there. A row finds its past through a list of places, its ancestors, so that reordering hypotheses
copies 8 bytes per token instead of 2 * d elements per layer.
A program owns one head of one row, a single query, which matrix units would pad to 16 rows. It therefore gathers
COLUMNS keys and values per iteration and multiplies elementwise in float32. Each of the COLUMNS lanes keeps its own
online softmax, starting from the score of the new key; the lanes are reduced once after the loop, so that no iteration
synchronizes warps. The new key and value come from `joint`, not from the cache: no program reads what another writes.
Traffic: 2 * d elements and 8 * H bytes of ancestors per past key, 3 * d elements read and 3 * d written per row; with
30 past keys, 1,024 rows and d = 512 in bf16, keys and values are 63 of 71 MB.
Keys from the position on are not read. Invalid ancestors are masked, and nothing is stored at an invalid position: no
access is out of bounds.
Sources: Vaswani et al. 2017, equation 1; Milakov and Gimelshein 2018 (online softmax).
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.launch import width_class
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import chip, product_kind
from fasttfm.kernels.parameter import Int64Pointer, Pointer, Real, Varying
from fasttfm.kernels.tiles.attention import ANCESTORS, Tile


@jit
def _attend(
    joint: Pointer,  # (R, 3 * H * D): query, key and value of each row's new token
    cache: Pointer,  # (R * T, 2 * H * D) out: key and value of each place
    out: Pointer,  # (R, H * D) out
    ancestors: Int64Pointer,  # (R, T): place of each earlier position of a row
    positions: Int64Pointer,  # (R / K,): number of past keys, the same for K rows each
    scale: Real,
    R: Varying, K: Varying, T: Varying, H: Varying,
    D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0) // H, tl.int64)
    width = H * D
    column = tl.arange(0, steps.block(D))
    element = tl.program_id(0) % H * D + column
    exists = column < D
    position = tl.load(positions + row // K)
    new = joint + (row * 3 * width + element)
    q = tl.load(new, mask=exists, other=0.0).to(tl.float32) * (scale * steps.LOG2E)
    new_key = tl.load(new + width, mask=exists, other=0.0)
    new_value = tl.load(new + 2 * width, mask=exists, other=0.0)
    place = cache + ((row * T + position) * 2 * width + element)
    stored = exists & (position >= 0) & (position < T)
    tl.store(place, new_key, mask=stored)
    tl.store(place + width, new_value, mask=stored)

    # All lanes start from the score of the new key as maximum; the first lane holds its weight and value.
    peak = tl.zeros((COLUMNS,), tl.float32) + tl.sum(q * new_key.to(tl.float32), 0)
    is_first = tl.arange(0, COLUMNS) == 0
    total = tl.where(is_first, 1.0, 0.0)
    acc = tl.where(is_first[:, None], new_value.to(tl.float32)[None, :], 0.0)
    end = tl.maximum(tl.minimum(position, T), 0).to(tl.int32)
    for first in range(0, end, COLUMNS):
        keys = first + tl.arange(0, COLUMNS)
        places = tl.load(ancestors + row * T + keys, mask=keys < end, other=-1)
        inside = (places >= 0) & (places < tl.cast(R, tl.int64) * T)
        gathered = cache + (places[:, None] * 2 * width + element[None, :])
        known = inside[:, None] & exists[None, :]
        k = tl.load(gathered, mask=known, other=0.0)
        v = tl.load(gathered + width, mask=known, other=0.0)
        s = tl.where(inside, tl.sum(q[None, :] * k.to(tl.float32), 1), float("-inf"))
        highest = tl.maximum(peak, s)
        p = tl.exp2(s - highest)
        fade = tl.exp2(peak - highest)
        total = total * fade + p
        acc = acc * fade[:, None] + p[:, None] * v.to(tl.float32)
        peak = highest
    fade = tl.exp2(peak - tl.max(peak, 0))
    result = tl.sum(acc * fade[:, None], 0) / tl.sum(total * fade, 0)
    tl.store(out + (row * width + element), result.to(out.dtype.element_ty), mask=exists)


class Ancestors:
    """Self-attention of a beam search step, for one signature."""

    def __init__(
        self, joint: Tensor, cache: Tensor, ancestors: Tensor, positions: Tensor, *, heads: int, scale: float,
        tile: Tile | None = None,
    ) -> None:  # fmt: skip
        """joint (R, 3 * d) and cache (R * T, 2 * d) of one dtype, float32, float16 or bfloat16, d = heads * D with D up
        to 256; ancestors (R, T), positions (S,) int64, R a multiple of S. Raises ValueError for strided tensors."""
        for name, x in (("joint", joint), ("cache", cache), ("ancestors", ancestors), ("positions", positions)):
            if not x.is_contiguous():
                raise ValueError(f"{name} has strides {x.stride()}: it must be contiguous")
        (rows, room), width = ancestors.shape, joint.shape[1] // (3 * heads)
        device = chip(joint.device)
        tile = tile or ANCESTORS(device, product_kind(joint.dtype, device), width_class(max(64, width)))
        self._launch = Launch(_attend, (rows * heads,), {"D": width, **tile.options()})
        self._numbers = scale, rows, rows // max(1, len(positions)), room, heads

    def __call__(self, joint: Tensor, cache: Tensor, ancestors: Tensor, positions: Tensor, out: Tensor) -> None:
        """Store the new keys and values in cache and write out (R, d), contiguous.

        positions: of the new tokens, one per slot of R / S rows, < T; ancestors: places of earlier positions, < R * T,
        ignored from the slot's position on.
        """
        self._launch(joint, cache, out, ancestors, positions, *self._numbers)
