"""Gradient of an additive attention mask, summed over the dimensions in which the mask was broadcast.

    dmask = sum over broadcast batches, heads, queries and keys of P * (dropout'(dO V^T) - rowsum(dO * O))

A program owns a tile of the mask itself and computes the scores anew for every batch row, head and tile that read it,
so nothing of size L * S is written but the mask's own gradient. Where the mask is small, several programs share a tile;
each writes a part of its own and the parts are added in a fixed order: no atomics, the same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from fasttfm.kernels.attention_launch import (
    Tile,
    compile_case,
    head_constants,
    prepare,
    product_kinds,
    spills,
    strides,
    unit,
    variant_name,
)
from fasttfm.kernels.attention_tile import LOG2E, VARYING, hide, load_rows, product, sequence
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div
from fasttfm.kernels.philox import keep_mask


@jit(do_not_specialize=VARYING)
def _gradient(
    q,  # (B, H, L, D) through its strides, unit stride in D
    k,  # (B, H, S, D)
    v,  # (B, H, S, DV)
    dout,  # (B, H, L, DV)
    lse,  # (B, H, L) float32, of the forward pass
    delta,  # (B, H, L) float32, sum of dO * O
    parts,  # (shares, MB, MH, ML, MS) float32 out
    key_lengths,  # (B,) int or None
    query_starts,  # None: packed sequences take no mask
    key_starts,  # None
    mask,  # (B, H, L, S) through its strides (0 where it is broadcast)
    seed,  # (1,) int64, or None: no dropout
    stream,
    threshold,
    keep_scale,
    scale,
    causal_offset,
    H,
    L,
    S,
    planes,  # B * H
    shares,
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    dout_b,
    dout_h,
    dout_l,
    lse_b,
    lse_h,
    mask_b,
    mask_h,
    mask_l,
    mask_s,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    MB: tl.constexpr,  # whether the mask has batches, heads, queries, keys of its own
    MH: tl.constexpr,
    ML: tl.constexpr,
    MS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_tiles = (L + ROWS - 1) // ROWS
    column_tiles = (S + COLUMNS - 1) // COLUMNS
    place = tl.program_id(0)
    share = place % shares
    place = place // shares
    own_row = 0
    own_column = 0
    own_head = 0
    own_batch = 0
    if MS:
        own_column = place % column_tiles
        place = place // column_tiles
    if ML:
        own_row = place % row_tiles
        place = place // row_tiles
    if MH:
        own_head = place % H
        place = place // H
    if MB:
        own_batch = place
    # What reads the tile, numbered from 0 to readers.
    B = planes // H
    batches = 1 if MB else B
    heads = 1 if MH else H
    rows_read = 1 if ML else row_tiles
    columns_read = 1 if MS else column_tiles
    readers = batches * heads * rows_read * columns_read
    random = 0
    if seed is not None:
        random = tl.load(seed)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for reader in range(share, readers, shares):
        column = (own_column + reader % columns_read) * COLUMNS
        rest = reader // columns_read
        row = (own_row + rest % rows_read) * ROWS
        rest = rest // rows_read
        head = own_head + rest % heads
        batch = own_batch + rest // heads
        b = tl.cast(batch, tl.int64)
        h = tl.cast(head, tl.int64)
        here_row = tl.cast(row, tl.int64)
        here_column = tl.cast(column, tl.int64)
        _, _, _, _, visible = sequence(b, L, S, key_lengths, query_starts, key_starts)
        rows = row + tl.arange(0, ROWS)
        x = load_rows(q + b * q_b + h * q_h + here_row * q_l, q_l, L - row, ROWS, D, BLOCK_D)
        keys = load_rows(k + b * k_b + h * k_h + here_column * k_s, k_s, visible - column, COLUMNS, D, BLOCK_D)
        do = load_rows(dout + b * dout_b + h * dout_h + here_row * dout_l, dout_l, L - row, ROWS, DV, BLOCK_DV)
        values = load_rows(v + b * v_b + h * v_h + here_column * v_s, v_s, visible - column, COLUMNS, DV, BLOCK_DV)
        line = b * lse_b + h * lse_h + rows
        logarithm = tl.load(lse + line, mask=rows < L, other=float("inf"))  # no weight in rows past the end
        sums = tl.load(delta + line, mask=rows < L, other=0.0)
        s = product(x, tl.trans(keys), PRECISION, UPCAST) * (scale * LOG2E)
        s = hide(
            s, row, column, tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], mask + b * mask_b + h * mask_h,
            mask_l, mask_s, L, visible, causal_offset, CAUSAL, MASK, True,
        )  # fmt: skip
        p = tl.exp2(s - logarithm[:, None])
        dp = product(do, tl.trans(values), PRECISION, UPCAST)
        if seed is not None:
            keep = keep_mask(random, stream, batch * H + head, rows, column, threshold, COLUMNS)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        acc += p * (dp - sums[:, None])
    columns_kept = S if MS else 1
    rows_kept = L if ML else 1
    line = tl.cast(share, tl.int64)
    if MB:
        line = line * B + own_batch
    if MH:
        line = line * H + own_head
    if not ML:
        acc = tl.broadcast_to(tl.sum(acc, 0)[None, :], (ROWS, COLUMNS))
    if not MS:
        acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], (ROWS, COLUMNS))
    rows = own_row * ROWS + tl.arange(0, ROWS)[:, None]
    columns = own_column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at = (line * rows_kept + rows) * columns_kept + columns
    tl.store(parts + at, acc, mask=(rows < rows_kept) & (columns < columns_kept))


def tile(chip: Chip, kind: str, width: int, extras: int) -> Tile:
    """Arguments as attention.forward_tile()'s."""
    if kind == "fp32":
        return {64: Tile(16, 16, 4, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)}[width]
    if kind == "tf32":
        return {64: Tile(32, 32, 8, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 32, 8, 1)}[width]
    warps = 8 if chip.capability == 100 else 4  # four spill there
    return {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, warps, 1)}[width]


def gradient(grad, query, key, value, output, lse, mask, *, to=None, **options):
    """grad, output (B, H, L, DV), lse (B, H, L) of the forward pass, which took this mask; the rest as there.

    Returns the gradient in mask's shape and dtype.
    """
    grad, query, key, value = unit(grad), unit(query), unit(key), unit(value)
    call = prepare(query, key, value, mask=mask, **options)
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    full = (*query.shape[:3], key.shape[2])
    if 0 in full:
        return torch.zeros_like(mask)
    # A dimension of size 1 counts as the mask's own.
    own = [m == f for m, f in zip(shape, full)]
    to = to or tile(*call.size_class)
    rows, columns = ceil_div(full[2], to.rows), ceil_div(full[3], to.columns)
    sizes = (full[0], full[1], rows, columns)
    tiles = readers = 1
    for size, owned in zip(sizes, own):
        tiles, readers = (tiles * size, readers) if owned else (tiles, readers * size)
    shares = min(readers, max(1, 4 * call.chip.processors // tiles))
    parts = torch.empty(shares, *shape, dtype=torch.float32, device=mask.device)
    delta = (output.float() * grad.float()).sum(-1).contiguous()
    _gradient[(tiles * shares,)](
        query, key, value, grad, lse, delta, parts, *call.arguments, call.planes, shares,
        *strides(query, key, value, grad), *lse.stride()[:2], *call.mask_strides,
        **call.constants, MB=own[0], MH=own[1], ML=own[2], MS=own[3], ROWS=to.rows, COLUMNS=to.columns,
        num_warps=to.warps, num_stages=to.stages,
    )  # fmt: skip
    return parts.sum(0).view(mask.shape).to(mask.dtype)


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile, for a mask shared by all heads."""
    own = {"MB": True, "MH": False, "ML": True, "MS": True}
    for width in (64, 128, 256):
        for kind in product_kinds(chip):
            if spills(chip, kind, width):
                continue  # the route takes another way
            to = tile(chip, kind, width, 2)
            name = f"attention_mask_gradient/{variant_name(dropout=True, mask='add')}/D{width}"
            yield compile_case(_gradient, name, kind, to, head_constants(width) | own, dropout=True, mask="add")
