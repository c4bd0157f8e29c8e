"""Gradient of an additive attention mask, summed over its broadcast dimensions.

    dmask = sum over broadcast batches, heads, queries and keys of P * (dropout'(dO V^T) - rowsum(dO * O))

A program owns a tile of the mask and recomputes the scores of every batch row, head and tile that read it: nothing of
size L * S is stored but the gradient itself. For small masks, several programs split the readers of a tile and write
partial sums, which are added in a fixed order: deterministic, without atomics.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.launch import Call, strides
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, Varying
from fasttfm.kernels.philox import keep_mask, with_seed
from fasttfm.kernels.tiles.attention import MASK_GRADIENT


@jit
def _gradient(
    q: Pointer, k: Pointer, v: Pointer, dout: Pointer, lse: Float32Pointer, delta: Float32Pointer,
    parts: Float32Pointer,  # (shares, MB, MH, ML, MS) out
    problem: Problem,  # packed sequences take no mask
    planes: Varying,  # B * H
    shares: Varying, strides: Strides, lse_strides: LineStrides,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    # whether the mask has its own batch, head, query, key dimension, not a broadcast one
    MB: tl.constexpr, MH: tl.constexpr, ML: tl.constexpr, MS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    spans, masking, dropout, scale, sizes = problem
    H, L, S = sizes
    q_strides, k_strides, v_strides, dout_strides = strides
    row_tiles = (L + ROWS - 1) // ROWS
    column_tiles = (S + COLUMNS - 1) // COLUMNS
    # Tile of the mask. The program takes every shares-th of its readers, from `share` on.
    index = tl.program_id(0)
    share = index % shares
    index = index // shares
    mask_row = 0
    mask_column = 0
    mask_head = 0
    mask_batch = 0
    if MS:
        mask_column = index % column_tiles
        index = index // column_tiles
    if ML:
        mask_row = index % row_tiles
        index = index // row_tiles
    if MH:
        mask_head = index % H
        index = index // H
    if MB:
        mask_batch = index
    # Readers: the batch rows, heads, row tiles and column tiles to which the tile is broadcast.
    B = planes // H
    batches = 1 if MB else B
    heads = 1 if MH else H
    rows_read = 1 if ML else row_tiles
    columns_read = 1 if MS else column_tiles
    readers = batches * heads * rows_read * columns_read
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for reader in range(share, readers, shares):
        column = (mask_column + reader % columns_read) * COLUMNS
        rest = reader // columns_read
        row = (mask_row + rest % rows_read) * ROWS
        rest = rest // rows_read
        head = steps.head_of(mask_batch + rest // heads, mask_head + rest % heads, sizes, spans)
        row_offset = tl.cast(row, tl.int64)
        column_offset = tl.cast(column, tl.int64)
        rows = row + tl.arange(0, ROWS)
        q_tile = steps.load_tile(q, q_strides, head, row_offset, L - row, ROWS, D)
        count = head.visible - column
        k_tile = steps.load_tile(k, k_strides, steps.keys_of(head, GROUP), column_offset, count, COLUMNS, D)
        dout_tile = steps.load_tile(dout, dout_strides, head, row_offset, L - row, ROWS, DV)
        v_tile = steps.load_tile(v, v_strides, steps.keys_of(head, GROUP), column_offset, count, COLUMNS, DV)
        line = steps.line_of(lse_strides, head, rows)
        lse_tile = tl.load(lse + line, mask=rows < L, other=float("inf"))  # weight 0 past the end
        delta_tile = tl.load(delta + line, mask=rows < L, other=0.0)
        # Keys stay consecutive, so that the mask is read and its gradient written coalesced.
        of_head = steps.masking_of(masking, head)
        HALF: tl.constexpr = q_tile.dtype != tl.float32  # as in dQ
        if HALF:
            mask = steps.load_mask(of_head, row, column, head.queries, head.visible, ROWS, COLUMNS, True, ORDER="plain")
        s = steps.product(q_tile, tl.trans(k_tile), PRECISION) * (scale * steps.LOG2E)  # (ROWS, COLUMNS)
        s = steps.capped(s, masking)
        if not HALF:
            mask = steps.load_mask(of_head, row, column, head.queries, head.visible, ROWS, COLUMNS, True, ORDER="plain")
        s = steps.hide(s, mask, row, column, of_head, head.queries, head.visible, CAUSAL, True, ORDER="plain")
        p = tl.exp2(s - lse_tile[:, None])
        dp = steps.product(dout_tile, tl.trans(v_tile), PRECISION)
        if dropout.seed is not None:
            keep = keep_mask(dropout.seed, dropout.site, head.plane, rows, column, dropout.threshold, COLUMNS)
            dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
        acc += p * (dp - delta_tile[:, None])
    columns_kept = S if MS else 1
    rows_kept = L if ML else 1
    part = tl.cast(share, tl.int64)
    if MB:
        part = part * B + mask_batch
    if MH:
        part = part * H + mask_head
    if not ML:
        acc = tl.broadcast_to(tl.sum(acc, 0)[None, :], (ROWS, COLUMNS))
    if not MS:
        acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], (ROWS, COLUMNS))
    rows = mask_row * ROWS + tl.arange(0, ROWS)[:, None]
    columns = mask_column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    offsets = (part * rows_kept + rows) * columns_kept + columns
    tl.store(parts + offsets, acc, mask=(rows < rows_kept) & (columns < columns_kept))


class Gradient:
    """The gradient of a mask for one signature."""

    def __init__(self, call: Call, grad: Tensor, lse: Tensor, mask: Tensor) -> None:
        """call: prepared with this mask; grad, lse, mask: tensors with the layouts of those of the calls."""
        self._like = shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        planes, _, keys, _ = call.inputs[1].shape
        full = (planes, call.planes // max(1, planes), call.queries, keys)
        self._shares = 0
        if 0 in full:
            return
        tile = MASK_GRADIENT(*call.size_class[:3])
        whole = [m == f for m, f in zip(shape, full)]  # also if both sizes are 1
        tiles, scores = (B * H * ceil_div(L, tile.rows) * ceil_div(S, tile.columns) for B, H, L, S in (shape, full))
        self._shares = shares = min(scores // tiles, max(1, 4 * call.chip.processors // tiles))
        reduced = dict(zip(("MB", "MH", "ML", "MS"), whole))
        self._launch = Launch(_gradient, (tiles * shares,), {**call.constants, **reduced, **tile.options()})
        self._tail = call.planes, shares, strides(*call.inputs, grad), LineStrides(*lse.stride()[:2])

    def __call__(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor,
        problem: tuple,
    ) -> Tensor:  # fmt: skip
        """Return the gradient in mask's shape and dtype; out (B, H, L, DV), lse (B, H, L): from the forward pass."""
        if not self._shares:
            return torch.zeros_like(mask)
        parts = mask.new_empty((self._shares, *self._like), dtype=torch.float32)
        delta = (out.float() * grad.float()).sum(-1).contiguous()
        self._launch(query, key, value, grad, lse, delta, parts, problem, *self._tail)
        return parts.sum(0).view(mask.shape).to(mask.dtype)
