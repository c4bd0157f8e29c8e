"""Scale, mask, softmax and dropout in one pass over scores that cuBLAS made and for weights that cuBLAS takes.

    P = softmax(scores * scale + mask)        W = dropout(P)
    dscores = factor * P * (dropout'(dW) - rowsum(P * dropout'(dW)))

For chips on which Triton's products do not reach the tensor cores (V100, T4), for head sizes above 256 and wherever the
weights themselves are asked for. Forward reads scores and writes P (over them if told so) and, under dropout, W: 2 to 3
times B * H * L * S elements. Backward reads P and dW, writes dscores (over dW if told so) and, if asked, W once more,
whose mask it draws anew. Rows of up to ONE_PASS keys stay in registers; longer ones are walked over twice.
Source: Vaswani et al. 2017, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fasttfm.kernels.attention_launch import Tile, compile_case, mask_arguments, variant_name
from fasttfm.kernels.attention_tile import LOG2E, VARYING, hide
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div, chip, power_of_two
from fasttfm.kernels.philox import dropout_arguments, keep_mask

ONE_PASS = 8192

_VARYING = [name for name in VARYING if name != "S"]  # rows are S long: knowing their alignment makes loads wide


@triton.jit
def _scores(
    x, first_row, column, scale, mask, mask_l, mask_s, queries, keys, visible, causal_offset,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS) scores in base 2; x points at the matrix of this plane, (queries, keys)."""
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16  # whose products easily leave its range
    rows = first_row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < queries) & (columns[None, :] < visible)
    at = rows.to(tl.int64)[:, None] * keys + columns[None, :]
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    return hide(
        s, first_row, column, tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], mask, mask_l, mask_s,
        queries, visible, causal_offset, CAUSAL, MASK, True, HALF,
    )  # fmt: skip


@triton.jit
def _store(
    p, kept, values, first_row, column, queries, keys, random, plane, stream, threshold, keep_scale,
    DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes weights, and the same after dropout."""
    rows = first_row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < queries) & (columns[None, :] < keys)
    at = rows.to(tl.int64)[:, None] * keys + columns[None, :]
    tl.store(p + at, values.to(p.dtype.element_ty), mask=inside)
    if DROPOUT:
        keep = keep_mask(random, stream, plane, rows, column, threshold, COLUMNS)
        tl.store(kept + at, tl.where(keep, values * keep_scale, 0.0).to(p.dtype.element_ty), mask=inside)


@jit(do_not_specialize=_VARYING)
def _forward(
    scores,  # (B, H, L, S)
    p,  # (B, H, L, S) out, the weights; may be scores
    kept,  # (B, H, L, S) out, after dropout; None without it
    key_lengths,  # (B,) int or None
    mask,  # (B, H, L, S) through its strides (0 where it is broadcast), or None
    seed,  # (1,) int64 in device memory, or None: no dropout
    stream,
    threshold,
    keep_scale,
    scale,
    causal_offset,
    H,
    L,
    S,
    tiles,  # row tiles a head
    mask_b,
    mask_h,
    mask_l,
    mask_s,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    ONE: tl.constexpr,  # a tile holds the whole row
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    DROPOUT: tl.constexpr = seed is not None
    plane = tl.program_id(0) // tiles
    first_row = (tl.program_id(0) % tiles) * ROWS
    b = (plane // H).to(tl.int64)
    matrix = plane.to(tl.int64) * L * S
    scores += matrix
    p += matrix
    if DROPOUT:
        kept += matrix
    if MASK != "none":
        mask += b * mask_b + (plane % H).to(tl.int64) * mask_h
    visible = S
    if key_lengths is not None:
        visible = tl.maximum(tl.minimum(tl.load(key_lengths + b), S), 0).to(tl.int32)
    random = 0
    if DROPOUT:
        random = tl.load(seed)
    scale *= LOG2E
    if ONE:
        s = _scores(
            scores, first_row, 0, scale, mask, mask_l, mask_s, L, S, visible, causal_offset, CAUSAL, MASK, ROWS, COLUMNS
        )
        peak = tl.max(s, 1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row that sees no key: -inf - -inf would be NaN
        weights = tl.exp2(s - peak[:, None])
        total = tl.sum(weights, 1)
        weights /= tl.where(total == 0.0, 1.0, total)[:, None]
        _store(
            p, kept, weights, first_row, 0, L, S, random, plane, stream, threshold, keep_scale, DROPOUT, ROWS, COLUMNS
        )
    else:
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for column in range(0, visible, COLUMNS):
            s = _scores(
                scores, first_row, column, scale, mask, mask_l, mask_s, L, S, visible, causal_offset,
                CAUSAL, MASK, ROWS, COLUMNS,
            )  # fmt: skip
            highest = tl.maximum(peak, tl.max(s, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
            peak = highest
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.where(total == 0.0, 1.0, total)
        for column in range(0, S, COLUMNS):
            s = _scores(
                scores, first_row, column, scale, mask, mask_l, mask_s, L, S, visible, causal_offset,
                CAUSAL, MASK, ROWS, COLUMNS,
            )  # fmt: skip
            weights = tl.exp2(s - peak[:, None]) / total[:, None]
            _store(
                p, kept, weights, first_row, column, L, S, random, plane, stream, threshold, keep_scale,
                DROPOUT, ROWS, COLUMNS,
            )  # fmt: skip


@triton.jit
def _gradient(
    p, dkept, at, inside, random, plane, rows, column, stream, threshold, keep_scale,
    DROPOUT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The weights and the gradient of the weights before dropout, float32."""
    weights = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dkept + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.where(weights == 0.0, 0.0, gradient)  # of a hidden key it may have overflowed half precision
    kept = weights
    if DROPOUT:
        keep = keep_mask(random, stream, plane, rows, column, threshold, COLUMNS)
        gradient = tl.where(keep, gradient * keep_scale, 0.0)
        kept = tl.where(keep, weights * keep_scale, 0.0)
    return weights, gradient, kept


@jit(do_not_specialize=_VARYING)
def _backward(
    p,  # (B, H, L, S), the weights before dropout
    dkept,  # (B, H, L, S), gradient of the weights after dropout
    dscores,  # (B, H, L, S) out; may be dkept
    kept,  # (B, H, L, S) out, the weights after dropout; None: not asked for
    seed,  # (1,) int64, or None: no dropout
    stream,
    threshold,
    keep_scale,
    factor,
    L,
    S,
    tiles,  # row tiles a head
    ONE: tl.constexpr,  # a tile holds the whole row
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    DROPOUT: tl.constexpr = seed is not None
    plane = tl.program_id(0) // tiles
    first_row = (tl.program_id(0) % tiles) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    matrix = plane.to(tl.int64) * L * S
    p += matrix
    dkept += matrix
    dscores += matrix
    if kept is not None:
        kept += matrix
    random = 0
    if DROPOUT:
        random = tl.load(seed)
    line = rows.to(tl.int64)[:, None] * S
    columns = tl.arange(0, COLUMNS)[None, :]
    if ONE:
        inside = (rows[:, None] < L) & (columns < S)
        weights, gradient, dropped = _gradient(
            p, dkept, line + columns, inside, random, plane, rows, 0, stream, threshold, keep_scale, DROPOUT, COLUMNS
        )
        ds = weights * (gradient - tl.sum(weights * gradient, 1)[:, None]) * factor
        tl.store(dscores + line + columns, ds.to(dscores.dtype.element_ty), mask=inside)
        if kept is not None:
            tl.store(kept + line + columns, dropped.to(kept.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros((ROWS,), tl.float32)
        for column in range(0, S, COLUMNS):
            inside = (rows[:, None] < L) & (column + columns < S)
            weights, gradient, _ = _gradient(
                p, dkept, line + column + columns, inside, random, plane, rows, column, stream, threshold, keep_scale,
                DROPOUT, COLUMNS,
            )  # fmt: skip
            total += tl.sum(weights * gradient, 1)
        for column in range(0, S, COLUMNS):
            inside = (rows[:, None] < L) & (column + columns < S)
            weights, gradient, dropped = _gradient(
                p, dkept, line + column + columns, inside, random, plane, rows, column, stream, threshold, keep_scale,
                DROPOUT, COLUMNS,
            )  # fmt: skip
            ds = weights * (gradient - total[:, None]) * factor
            tl.store(dscores + line + column + columns, ds.to(dscores.dtype.element_ty), mask=inside)
            if kept is not None:
                tl.store(kept + line + column + columns, dropped.to(kept.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, columns: int) -> list[Tile]:
    rows = [rows for rows in (1, 2, 4, 8, 16, 32) if 1024 <= rows * min(columns, ONE_PASS) <= 8192]
    return [Tile(r, min(columns, ONE_PASS), warps, 1) for r in rows for warps in (1, 2, 4, 8)]


@choice("masked_softmax", alternatives=_alternatives)
def tile(chip: Chip, columns: int) -> Tile:
    """columns: a power of two, at least 16, all keys of a row; above ONE_PASS the width of a step of the walk."""
    columns = min(columns, ONE_PASS)
    elements = max(columns, 2048)
    lanes = 32 if chip.capability else 64
    warps = max(1, min(16 if lanes == 32 else 8, elements // ((16 if columns < 2048 else 8) * lanes)))
    return Tile(max(1, min(32, elements // columns)), columns, warps, 1)


def _tile_of(x: torch.Tensor) -> tuple[Tile, bool]:
    keys = x.shape[-1]
    columns = max(16, power_of_two(keys))
    if columns > ONE_PASS:
        return tile(chip(x.device), 2048), False
    return tile(chip(x.device), columns), True


# --------------------------------------------------------------------------------------------------------- launches


def forward(
    scores,
    scale,
    key_lengths=None,
    mask=None,
    causal=False,
    causal_offset=0,
    dropout_p=0.0,
    seed=None,
    stream=0,
    *,
    in_place=False,
):
    """scores (B, H, L, S) contiguous; the rest as fasttfm.functional.attention takes it.

    Returns the weights before dropout, in scores' own memory if in_place, and after it (None without dropout).
    """
    batch, heads, queries, keys = scores.shape
    p = scores if in_place else torch.empty_like(scores)
    seed, threshold, keep_scale = dropout_arguments(dropout_p, seed)
    kept = None if seed is None else torch.empty_like(scores)
    if scores.numel():
        if key_lengths is not None:
            key_lengths = key_lengths.contiguous()
        mask, kind, mask_strides = mask_arguments(mask, scores.shape)
        to, one = _tile_of(scores)
        tiles = ceil_div(queries, to.rows)
        _forward[(tiles * batch * heads,)](
            scores, p, kept, key_lengths, mask, seed, stream, threshold, keep_scale, scale, causal_offset,
            heads, queries, keys, tiles, *mask_strides,
            CAUSAL=causal, MASK=kind, ONE=one, ROWS=to.rows, COLUMNS=to.columns,
            num_warps=to.warps, num_stages=to.stages,
        )  # fmt: skip
    return p, kept


def backward(grad, p, factor, dropout_p=0.0, seed=None, stream=0, *, in_place=False, with_kept=False):
    """grad, of the weights after dropout, and p (B, H, L, S) contiguous.

    Returns the gradient of the masked scores times factor, in grad's own memory if in_place, and, if asked, the weights
    after dropout (p itself without dropout).
    """
    queries, keys = p.shape[2:]
    dscores = grad if in_place else torch.empty_like(grad)
    seed, threshold, keep_scale = dropout_arguments(dropout_p, seed)
    kept = torch.empty_like(p) if with_kept and seed is not None else None
    if p.numel():
        to, one = _tile_of(p)
        tiles = ceil_div(queries, to.rows)
        _backward[(tiles * p.shape[0] * p.shape[1],)](
            p, grad, dscores, kept, seed, stream, threshold, keep_scale, factor, queries, keys, tiles,
            ONE=one, ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=to.stages,
        )  # fmt: skip
    return dscores, p if kept is None else kept


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in half precision, causal with lengths, dropout and a mask; walked rows and float32 at one size."""
    columns = 16
    while columns <= ONE_PASS:
        yield from _cases(chip, "bf16", columns)
        columns *= 2
    yield from _cases(chip, "bf16", 2048, one=False)
    yield from _cases(chip, "fp32", 128)


def _cases(chip: Chip, kind: str, columns: int, *, one: bool = True) -> Iterator[CompileCase]:
    to = tile(chip, columns)
    for kernel, name in (
        (_forward, f"forward/{variant_name(dropout=True, mask='add')}"),
        (_backward, "backward/dropout"),
    ):
        full = f"masked_softmax.{name}{'' if one else '/walked'}/S{columns}"
        yield compile_case(kernel, full, kind, to, {"ONE": one, "CAUSAL": True}, dropout=True, mask="add")
