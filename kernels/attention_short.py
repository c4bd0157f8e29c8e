"""Attention for short rows: a program holds all keys of its head; softmax takes one pass, backward one launch.

    P = softmax(Q K^T * scale + mask)             O = dropout(P) V
    dP = dropout'(dO V^T)     dS = P * (dP - rowsum(P * dP))     dQ = dS K * scale     dK = dS^T Q * scale
    dV = dropout(P)^T dO

At sentence lengths attention is bound by memory and launches, not by products: with 27 words a tile of 128 computes 16
times what is asked for, one of 32 only 1.4 times. A row of up to 128 scores stays in registers, so its sum of
P * dP is at hand: backward reads neither the output nor delta, and needs no second launch. It walks over the queries
with transposed scores, so that its warps share the keys, and keeps dK and dV in float32 registers: nothing is added up
in memory, and two runs agree bit for bit.
Forward moves 2 * B * H * (L + S) * D elements, backward 3 * L * D + 4 * S * D a head, each once.
Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import triton.language as tl
from fasttfm.kernels.attention import WIDTHS, outputs
from fasttfm.kernels.attention_launch import (
    Tile,
    compile_case,
    fits_short,
    head_constants,
    key_class,
    like_heads,
    prepare,
    product_kinds,
    strides,
    unit,
    variant_name,
)
from fasttfm.kernels.attention_tile import LOG2E, VARYING, hide, load_rows, product, sequence, store_rows
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div
from fasttfm.kernels.philox import keep_mask


@jit(do_not_specialize=VARYING)
def _forward(
    q,  # (B, H, L, D) through its strides, unit stride in D
    k,  # (B, H, S, D), S at most COLUMNS
    v,  # (B, H, S, DV)
    out,  # (B, H, L, DV) out
    lse,  # (B, H, L) float32 out: log2 of the sum of the exponentiated scores; 0 where no key is seen
    key_lengths,  # (B,) int or None
    query_starts,  # (B + 1,) int or None: packed, see attention.py
    key_starts,  # (B + 1,) int or None
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
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    out_b,
    out_h,
    out_l,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    plane = tl.program_id(0) // tiles
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    first_query, first_key, queries, _, visible = sequence(b, L, S, key_lengths, query_starts, key_starts)
    first_row = (tl.program_id(0) % tiles) * ROWS
    if first_row >= queries:
        return
    rows = first_row + tl.arange(0, ROWS)
    count = queries - first_row
    row = first_query + first_row
    x = load_rows(q + b * q_b + h * q_h + row * q_l, q_l, count, ROWS, D, BLOCK_D)
    keys = load_rows(k + b * k_b + h * k_h + first_key * k_s, k_s, visible, COLUMNS, D, BLOCK_D)
    values = load_rows(v + b * v_b + h * v_h + first_key * v_s, v_s, visible, COLUMNS, DV, BLOCK_DV)
    if MASK != "none":
        mask += b * mask_b + h * mask_h
    s = product(x, tl.trans(keys), PRECISION, UPCAST) * (scale * LOG2E)  # (ROWS, COLUMNS)
    s = hide(
        s, first_row, 0, tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], mask, mask_l, mask_s,
        queries, visible, causal_offset, CAUSAL, MASK, True,
    )  # fmt: skip
    peak = tl.max(s, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row that sees no key: -inf - -inf would be NaN
    p = tl.exp2(s - peak[:, None])
    total = tl.sum(p, 1)
    if seed is not None:
        p = tl.where(keep_mask(tl.load(seed), stream, plane, rows, 0, threshold, COLUMNS), p, 0.0)
    total = tl.where(total == 0.0, 1.0, total)
    acc = product(p.to(values.dtype), values, PRECISION, UPCAST) * (keep_scale / total)[:, None]
    store_rows(out + b * out_b + h * out_h + row * out_l, acc, out_l, count, ROWS, DV, BLOCK_DV)
    tl.store(lse + b * lse_b + h * lse_h + first_query + rows, peak + tl.log2(total), mask=rows < queries)


@jit(do_not_specialize=VARYING)
def _backward(
    q,  # (B, H, L, D) through its strides, unit stride in D
    k,  # (B, H, S, D), S at most COLUMNS
    v,  # (B, H, S, DV)
    dout,  # (B, H, L, DV)
    lse,  # (B, H, L) float32, of the forward pass
    dq,  # (B, H, L, D) out
    dk,  # (B, H, S, D) out
    dv,  # (B, H, S, DV) out
    dq_sums,  # (B, H, D) float32 out: dq summed over L, what a projection's bias gets of it; None: nobody wants them
    dk_sums,  # (B, H, D) float32 out: dk summed over S; None with dq_sums
    dv_sums,  # (B, H, DV) float32 out, likewise
    key_lengths,  # (B,) int or None
    query_starts,  # (B + 1,) int or None: packed, see attention.py
    key_starts,  # (B + 1,) int or None
    mask,  # (B, H, L, S) through its strides, or None
    seed,  # (1,) int64, or None: no dropout
    stream,
    threshold,
    keep_scale,
    scale,
    causal_offset,
    H,
    L,
    S,
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
    dq_b,
    dq_h,
    dq_l,
    dk_b,
    dk_h,
    dk_s,
    dv_b,
    dv_h,
    dv_s,
    dq_sums_b,
    dk_sums_b,  # dv_sums' too
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    plane = tl.program_id(0)
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    first_query, first_key, queries, keys, visible = sequence(b, L, S, key_lengths, query_starts, key_starts)
    x = load_rows(k + b * k_b + h * k_h + first_key * k_s, k_s, visible, COLUMNS, D, BLOCK_D)
    y = load_rows(v + b * v_b + h * v_h + first_key * v_s, v_s, visible, COLUMNS, DV, BLOCK_DV)
    q += b * q_b + h * q_h + first_query * q_l
    dout += b * dout_b + h * dout_h + first_query * dout_l
    dq += b * dq_b + h * dq_h + first_query * dq_l
    lse += b * lse_b + h * lse_h + first_query
    if MASK != "none":
        mask += b * mask_b + h * mask_h
    random = 0
    if seed is not None:
        random = tl.load(seed)
    acc_k = tl.zeros((COLUMNS, BLOCK_D), tl.float32)
    acc_v = tl.zeros((COLUMNS, BLOCK_DV), tl.float32)
    if dq_sums is not None:
        sum_q = tl.zeros((BLOCK_D,), tl.float32)
    for row in range(0, queries, ROWS):
        rows = row + tl.arange(0, ROWS)
        here = tl.cast(row, tl.int64)
        count = queries - row
        z = load_rows(q + here * q_l, q_l, count, ROWS, D, BLOCK_D)
        do = load_rows(dout + here * dout_l, dout_l, count, ROWS, DV, BLOCK_DV)
        logarithm = tl.load(lse + rows, mask=rows < queries, other=float("inf"))  # no weight in rows past the end
        s = product(x, tl.trans(z), PRECISION, UPCAST) * (scale * LOG2E)  # (COLUMNS, ROWS)
        s = hide(
            s, row, 0, tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None], mask, mask_l, mask_s,
            queries, visible, causal_offset, CAUSAL, MASK, True,
        )  # fmt: skip
        p = tl.exp2(s - logarithm[None, :])
        dp = product(y, tl.trans(do), PRECISION, UPCAST)
        kept = p
        if seed is not None:
            keep = tl.trans(keep_mask(random, stream, plane, rows, 0, threshold, COLUMNS))
            kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        acc_v += product(kept.to(do.dtype), do, PRECISION, UPCAST)
        ds = (p * (dp - tl.sum(p * dp, 0)[None, :])).to(x.dtype)
        acc_k += product(ds, z, PRECISION, UPCAST)
        if COLUMNS >= 8 * ROWS:
            # Before sm_90 Triton shares out every product of the loop as it does this one: by columns, if they are
            # more than its rows. Eight warps would then share 16 queries' scores, and compute each four times.
            dx = tl.trans(product(tl.trans(x), ds, PRECISION, UPCAST)) * scale
        else:
            dx = product(tl.trans(ds), x, PRECISION, UPCAST) * scale
        store_rows(dq + here * dq_l, dx, dq_l, count, ROWS, D, BLOCK_D)
        if dq_sums is not None:
            sum_q += tl.sum(dx, 0)  # rows past the end have no weights, and so no gradient
    if dq_sums is not None:
        at = tl.arange(0, BLOCK_D)
        tl.store(dq_sums + b * dq_sums_b + h * D + at, sum_q, mask=at < D)
        tl.store(dk_sums + b * dk_sums_b + h * D + at, tl.sum(acc_k, 0) * scale, mask=at < D)
        at = tl.arange(0, BLOCK_DV)
        tl.store(dv_sums + b * dk_sums_b + h * DV + at, tl.sum(acc_v, 0) * keep_scale, mask=at < DV)
    store_rows(dk + b * dk_b + h * dk_h + first_key * dk_s, acc_k * scale, dk_s, keys, COLUMNS, D, BLOCK_D)
    store_rows(dv + b * dv_b + h * dv_h + first_key * dv_s, acc_v * keep_scale, dv_s, keys, COLUMNS, DV, BLOCK_DV)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, kind: str, width: int, extras: int, columns: int) -> list[Tile]:
    return [Tile(rows, columns, warps, 1) for rows in (16, 32, 64) for warps in (1, 2, 4, 8) if rows <= 2 * columns]


@choice("attention_short.forward", alternatives=_alternatives)
def forward_tile(chip: Chip, kind: str, width: int, extras: int, columns: int) -> Tile:
    """kind, width and extras as attention.forward_tile() takes them; columns 16, 32, 64 or 128: all keys fit.

    A warp multiplies 16 rows at a time, or two where mask and dropout would spill; without matrix units
    threads share the work evenly.
    """
    if not chip.matrix_units or kind == "fp32":
        rows = 32 if width == 64 and columns == 32 else 16
        return Tile(rows, columns, max(2, min(8, rows * columns * width // 16384)), 1)
    rows = {16: 16, 128: 64}.get(columns, 32)
    two = columns in (32, 128) or (columns == width == 64 and kind != "tf32" and chip.capability in (86, 89))
    return Tile(rows, columns, rows // 16 * (2 if extras == 2 and two else 1), 1)


@choice("attention_short.backward", alternatives=_alternatives)
def backward_tile(chip: Chip, kind: str, width: int, extras: int, columns: int) -> Tile:
    """As forward_tile(); here warps share keys and head size, and with them dK and dV."""
    if not chip.matrix_units or kind == "fp32":
        return Tile(16, columns, min(8, columns * width // 256), 1)
    rows = 32 if width == 64 and columns > 16 and extras < 2 else 16
    if kind == "tf32":
        if chip.capability == 90 and columns == 64:
            rows = 16  # 32 spill there
        if columns == 16:
            return Tile(rows, columns, 4 if chip.capability in (86, 89) else 2, 1)  # two spill there
        return Tile(rows, columns, 4 if chip.capability == 120 and rows == columns else 8, 1)  # eight spill there
    warps = max(min(4, columns // 8), columns * width // 1024)
    if rows == 16 and columns == 128 and chip.capability == 100:
        warps = 4  # eight spill there
    return Tile(rows, columns, warps, 1)


# --------------------------------------------------------------------------------------------------------- launches


def forward(query, key, value, *, out=None, tile=None, **options):
    """As attention.forward(), as far as attention_launch.fits_short()."""
    query, key, value = unit(query), unit(key), unit(value)
    call = prepare(query, key, value, **options)
    output, lse = out or outputs(query, value.shape[-1])
    if call.planes and call.queries:
        tile = tile or forward_tile(*call.size_class, key_class(call.keys))
        tiles = ceil_div(call.queries, tile.rows)
        _forward[(tiles * call.planes,)](
            query, key, value, output, lse, *call.arguments, tiles,
            *strides(query, key, value, output), *lse.stride()[:2], *call.mask_strides,
            **call.constants, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return output, lse


def backward(grad, query, key, value, lse, *, out=None, sums=None, tile=None, **options):
    """grad (B, H, L, DV), lse (B, H, L) of forward(); the rest as there.

    Returns the gradients of query, key and value; out: memory for them. sums: memory for these summed over queries or
    keys, three (B, H, D) float32 with contiguous heads, those of key and value in equal strides.
    """
    grad, query, key, value = unit(grad), unit(query), unit(key), unit(value)
    call = prepare(query, key, value, **options)
    dq, dk, dv = out or (like_heads(query), like_heads(key), like_heads(value))
    if call.planes:
        tile = tile or backward_tile(*call.size_class, key_class(call.keys))
        dq_sums, dk_sums, dv_sums = sums or (None, None, None)
        sum_strides = (0, 0) if sums is None else (dq_sums.stride(0), dk_sums.stride(0))
        _backward[(call.planes,)](
            query, key, value, grad, lse, dq, dk, dv, dq_sums, dk_sums, dv_sums, *call.arguments,
            *strides(query, key, value, grad, dq, dk, dv), *sum_strides, *lse.stride()[:2], *call.mask_strides,
            **call.constants, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in the heaviest variant that takes it; the usual ones, and float16, at one size."""
    for kernel, name, tile in ((_forward, "forward", forward_tile), (_backward, "backward", backward_tile)):

        def case(kind, width, columns, *, dropout=True, mask="none", D=None, kernel=kernel, name=name, tile=tile):
            to = tile(chip, kind, width, dropout + (mask != "none"), columns)
            sums = kernel is _backward and mask == "none"
            full = f"attention_short.{name}/{variant_name(dropout=dropout, mask=mask, sums=sums)}/D{D or width}"
            constants = head_constants(D or width)
            return compile_case(kernel, full, kind, to, constants, dropout=dropout, mask=mask, sums=sums)

        for kind, width, columns in itertools.product(product_kinds(chip), WIDTHS[:2], (16, 32, 64, 128)):
            if fits_short(chip, kind, width, columns):
                yield case(kind, width, columns, mask="add")
                if kernel is _backward or tile(chip, kind, width, 1, columns) != tile(chip, kind, width, 2, columns):
                    yield case(kind, width, columns)
        yield case("bf16", 64, 32, dropout=False)
        yield case("fp16", 64, 32)
        yield case("bf16", 64, 32, D=32)
