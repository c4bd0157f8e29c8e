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

from collections.abc import Iterator

import triton
import triton.language as tl
from fasttfm.kernels.attention import outputs
from fasttfm.kernels.attention_launch import (
    Tile,
    compile_case,
    fits_short,
    head_constants,
    key_class,
    like_heads,
    prepare,
    strides,
    unit,
)
from fasttfm.kernels.attention_tile import LOG2E, hide, load_rows, product, sequence, store_rows
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.launch import Chip
from fasttfm.kernels.philox import keep_mask


@triton.jit(do_not_specialize=["stream", "threshold", "causal_offset", "H", "L", "S", "tiles"])
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


@triton.jit(do_not_specialize=["stream", "threshold", "causal_offset", "H", "L", "S"])
def _backward(
    q,  # (B, H, L, D) through its strides, unit stride in D
    k,  # (B, H, S, D), S at most COLUMNS
    v,  # (B, H, S, DV)
    dout,  # (B, H, L, DV)
    lse,  # (B, H, L) float32, of the forward pass
    dq,  # (B, H, L, D) out
    dk,  # (B, H, S, D) out
    dv,  # (B, H, S, DV) out
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
        dx = product(tl.trans(ds), x, PRECISION, UPCAST) * scale
        store_rows(dq + here * dq_l, dx, dq_l, count, ROWS, D, BLOCK_D)
    store_rows(dk + b * dk_b + h * dk_h + first_key * dk_s, acc_k * scale, dk_s, keys, COLUMNS, D, BLOCK_D)
    store_rows(dv + b * dv_b + h * dv_h + first_key * dv_s, acc_v * keep_scale, dv_s, keys, COLUMNS, DV, BLOCK_DV)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, kind: str, width: int, extras: int, columns: int) -> list[Tile]:
    return [Tile(rows, columns, warps, 1) for rows in (16, 32, 64) for warps in (1, 2, 4, 8) if rows <= 2 * columns]


@choice("attention_short.forward", alternatives=_alternatives)
def forward_tile(chip: Chip, kind: str, width: int, extras: int, columns: int) -> Tile:
    """kind, width and extras as attention.forward_tile() takes them; columns 16, 32, 64 or 128: all keys fit.

    A warp multiplies 16 rows at a time; where it does so without matrix units, threads share the work evenly.
    """
    if not chip.matrix_units or kind == "fp32":
        rows = 32 if width == 64 and columns == 32 else 16
        return Tile(rows, columns, max(2, min(8, rows * columns * width // 16384)), 1)
    rows = {16: 16, 128: 64}.get(columns, 32)
    return Tile(rows, columns, rows // 16 * (2 if width == 256 else 1), 1)


@choice("attention_short.backward", alternatives=_alternatives)
def backward_tile(chip: Chip, kind: str, width: int, extras: int, columns: int) -> Tile:
    """As forward_tile(); here a warp takes 16 keys at a time, and holds dK and dV of its own."""
    if not chip.matrix_units or kind == "fp32":
        return Tile(16, columns, max(2, min(8, columns * width // 512)), 1)
    rows = 32 if width == 64 and columns > 16 and extras < 2 else 16
    warps = columns // 16 * (width // 64) * (2 if kind == "tf32" else 1)
    return Tile(rows, columns, min(8, warps), 1)


# --------------------------------------------------------------------------------------------------------- launches


def forward(query, key, value, *, out=None, tile=None, **options):
    """As attention.forward(), as far as attention_launch.fits_short()."""
    query, key, value = unit(query), unit(key), unit(value)
    call = prepare(query, key, value, **options)
    output, lse = out or outputs(query, value.shape[-1])
    if call.planes and call.queries:
        tile = tile or forward_tile(*call.size_class, key_class(call.keys))
        tiles = triton.cdiv(call.queries, tile.rows)
        _forward[(tiles * call.planes,)](
            query, key, value, output, lse, *call.arguments, tiles,
            *strides(query, key, value, output), *lse.stride()[:2], *call.mask_strides,
            **call.constants, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return output, lse


def backward(grad, query, key, value, lse, *, out=None, tile=None, **options):
    """grad (B, H, L, DV), lse (B, H, L) of forward(); the rest as there.

    Returns the gradients of query, key and value; out: memory for them.
    """
    grad, query, key, value = unit(grad), unit(query), unit(key), unit(value)
    call = prepare(query, key, value, **options)
    dq, dk, dv = out or (like_heads(query), like_heads(key), like_heads(value))
    if call.planes:
        tile = tile or backward_tile(*call.size_class, key_class(call.keys))
        _backward[(call.planes,)](
            query, key, value, grad, lse, dq, dk, dv, *call.arguments,
            *strides(query, key, value, grad, dq, dk, dv), *lse.stride()[:2], *call.mask_strides,
            **call.constants, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that the route allows, with dropout, causal and with key lengths; lighter variants at one size."""
    kinds = ("bf16", "fp32", "tf32") if chip.capability >= 80 else ("bf16", "fp32")
    for kernel, name, tile in ((_forward, "forward", forward_tile), (_backward, "backward", backward_tile)):

        def case(kind, D, columns, dropout=True, mask="none", kernel=kernel, name=name, tile=tile):
            to = tile(chip, kind, max(64, D), dropout + (mask != "none"), columns)
            variant = "+".join(["causal", "lengths", *(["dropout"] * dropout), *([mask] * (mask != "none"))])
            full = f"attention_short.{name}/{variant}/D{D}"
            return compile_case(kernel, full, kind, to, head_constants(D), dropout=dropout, mask=mask)

        for kind in kinds:
            for width in (64, 128, 256) if kind == "bf16" else (64,):
                for columns in (16, 32, 64, 128):
                    if fits_short(chip, kind, width, columns):
                        yield case(kind, width, columns)
        for kind in ("bf16", "fp32"):
            if fits_short(chip, kind, 64, 64):
                yield case(kind, 32, 64)
        yield case("bf16", 64, 32, dropout=False)
        yield case("bf16", 64, 32, mask="add")
