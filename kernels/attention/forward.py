"""Attention for long rows, forward: softmax(Q K^T * scale + mask) V without ever writing the scores.

    S = Q K^T * scale + mask           P = softmax(S)           O = dropout(P) V           LSE = log2 sum exp S

A program owns ROWS queries of one head and walks over the keys in tiles of COLUMNS with the softmax kept online
(Milakov and Gimelshein 2018; Dao et al. 2022): a running maximum m and sum l in float32, in base 2,

    m' = max(m, max S)       l' = l * 2^(m - m') + sum 2^(S - m')       acc' = acc * 2^(m - m') + dropout(2^(S - m')) V

Tiles right of the diagonal and tiles past the visible keys are never touched; only the tiles that cross one of these
borders pay for comparisons. 4 * B * H * L * S * D floating-point operations (half of it when causal); reads Q, K, V,
writes O and 4 bytes of log-sum-exp a row. Dropout draws L * S / 16 Philox blocks a head.
Query heads that share a head of keys (Ainslie et al. 2023) are neighbours in the grid and read the same K and V.
Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention.launch import (
    MASKS,
    compile_case,
    distinct,
    every_kind,
    extras,
    head_constants,
    launch_options,
    like_heads,
    positive,
    prepare,
    product_kinds,
    spills,
    stages_for,
    strides,
    unit,
    variant_name,
)
from fasttfm.kernels.attention.tile import (
    LOG2E,
    LineStrides,
    Masking,
    Sizes,
    block,
    hide_keys,
    key_range,
    keys_of,
    line_of,
    load_keys,
    load_tile,
    locate_queries,
    masking_of,
    product,
    rows_of,
    store_tile,
    unscaled,
    window_range,
)
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Int64Pointers, Pointer, Real, Strides
from fasttfm.kernels.philox import Dropout, lanes_of, select, with_seed
from fasttfm.kernels.tiles.attention import FORWARD, Tile


@triton.jit
def _walk(
    acc,  # (ROWS, DV)
    peak,  # (ROWS,), the running maximum
    total,  # (ROWS,), the running sum
    q_tile,  # (ROWS, D)
    k,  # first key of the head
    v,
    first,
    last,
    first_row,
    head,
    masking,
    dropout,
    scale,
    k_stride,
    v_stride,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Takes the key tiles from first to last into the running softmax."""
    rows = first_row + tl.arange(0, ROWS)
    for column in range(first, last, COLUMNS):
        offset = tl.cast(column, tl.int64)
        k_tile = load_keys(k + offset * k_stride, k_stride, head.visible - column, COLUMNS, D, not CHECKED)
        s = product(q_tile, tl.trans(k_tile), PRECISION)  # (ROWS, COLUMNS)
        s, factor = unscaled(s, masking, scale)
        s = hide_keys(s, first_row, column, head, masking, CAUSAL, CHECKED)
        highest = tl.maximum(peak, tl.max(s, 1) * factor)
        base = highest
        if CHECKED or masking.mask is not None:
            base = tl.where(highest == float("-inf"), 0.0, highest)  # no key seen yet: -inf - -inf would be NaN
        p = tl.exp2(s * factor - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, 1)
        peak = highest
        v_tile = load_keys(v + offset * v_stride, v_stride, head.visible - column, COLUMNS, DV, not CHECKED)
        weights = p.to(v_tile.dtype)
        if dropout.seed is not None:
            lane = lanes_of(dropout, head.plane, rows, column, COLUMNS)
            weights = select(weights, lane, dropout.threshold)
        acc = acc * fade[:, None] + product(weights, v_tile, PRECISION)
    return acc, peak, total


@jit
def _forward(
    q: Pointer,  # (B, H, L, D) through its strides, unit stride in D
    k: Pointer,  # (B, H // GROUP, S, D)
    v: Pointer,  # (B, H // GROUP, S, DV)
    out: Pointer,  # (B, H, L, DV) out
    lse: Float32Pointer,  # (B, H, L) out: log2 of the sum of the exponentiated scores; 0 where no key is seen
    strides: Strides,  # of q, k, v, out
    lse_strides: LineStrides,
    spans: Int64Pointers,  # key_lengths, query_starts, key_starts, each or None
    masking: Masking,
    dropout: Dropout,
    scale: Real,
    sizes: Sizes,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, first_row = locate_queries(sizes, spans, CAUSAL, ROWS)
    if first_row >= head.queries:
        return
    q_strides, k_strides, v_strides, out_strides = strides
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    row = head.first_query + first_row
    count = head.queries - first_row
    k = rows_of(k, k_strides, keys_of(head, GROUP), head.first_key)
    v = rows_of(v, v_strides, keys_of(head, GROUP), head.first_key)
    masking = masking_of(masking, head, sizes)
    q_tile = load_tile(q, q_strides, head, row, count, ROWS, D)
    scale = tl.maximum(scale * LOG2E, 1e-37)  # of 0 times -inf there would be no number

    end, free = key_range(head.visible, first_row, masking.causal_offset, CAUSAL, ROWS, COLUMNS)
    acc = tl.zeros((ROWS, block(DV)), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    first = 0
    if masking.window is not None:
        start, first = window_range(first_row, masking, free, ROWS, COLUMNS)
        free = tl.maximum(free, first)
        acc, peak, total = _walk(
            acc, peak, total, q_tile, k, v, start, first, first_row, head, masking, dropout, scale,
            k_strides[2], v_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, True,
        )  # fmt: skip
    acc, peak, total = _walk(
        acc, peak, total, q_tile, k, v, first, free, first_row, head, masking, dropout, scale,
        k_strides[2], v_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, False,
    )  # fmt: skip
    acc, peak, total = _walk(
        acc, peak, total, q_tile, k, v, free, end, first_row, head, masking, dropout, scale,
        k_strides[2], v_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, True,
    )  # fmt: skip
    if masking.sinks is not None:
        highest = tl.maximum(peak, masking.sinks)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.exp2(masking.sinks - highest)
        acc *= fade[:, None]
        peak = highest
    empty = total == 0.0
    acc *= (dropout.keep_scale / tl.where(empty, 1.0, total))[:, None]
    store_tile(out, acc, out_strides, head, row, count, ROWS, DV)
    rows = tl.arange(0, ROWS)
    logarithm = tl.where(empty, 0.0, peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + line_of(lse_strides, head, row) + rows, logarithm, mask=rows < count)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, kind: str, width: int, extras: int) -> list[Tile]:
    sizes = ((128, 64, 4), (128, 64, 8), (128, 32, 4), (64, 64, 4), (64, 32, 4), (32, 32, 4))
    return [Tile(rows, columns, warps, stages) for rows, columns, warps in sizes for stages in (2, 3)]


@choice("attention.forward", alternatives=_alternatives)
def forward_tile(chip: Chip, kind: str, width: int, extras: int) -> Tile:
    """kind as launch.product_kind() names it; width 64, 128 or 256: the larger head size, at most; extras as
    launch.extras() counts them."""
    return FORWARD(chip, kind, width, extras)


# --------------------------------------------------------------------------------------------------------- launches


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """query (B, H, L, D), key (B, Hk, S, D), value (B, Hk, S, DV), H a multiple of Hk; options as launch.prepare()'s.

    Returns the output (B, H, L, DV) and the log-sum-exp (B, H, L) float32 in base 2; out: memory for them.
    """
    query, options = positive(query, options)
    query, key, value = unit(query), unit(key), unit(value)
    call = prepare(query, key, value, **options)
    output, lse = out or outputs(query, value.shape[-1])
    if call.planes and call.queries:
        tile = tile or forward_tile(*call.size_class)
        _forward[(ceil_div(call.queries, tile.rows) * call.planes,)](
            query, key, value, output, lse,
            strides(query, key, value, output), LineStrides(*lse.stride()[:2]), *call.arguments,
            **call.constants, **launch_options(tile, stages_for(call.chip, tile, key, value)),
        )  # fmt: skip
    return output, lse


def outputs(query: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Memory for the output and the log-sum-exp."""
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return like_heads(query, value_width), lse


# ---------------------------------------------------------------------------------------------------- compile cases

WIDTHS = (64, 128, 256)
"""Head sizes that tiles are chosen for. Narrower heads take the tile of 64 and need less of everything."""


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in the heaviest variant that takes it; at one size every dtype with every mask, packed,
    and with shared keys."""
    yield from distinct(long_cases(chip, _forward, "attention.forward", forward_tile))


def long_cases(chip: Chip, kernel: Any, name: str, choose: Callable[..., Tile]) -> Iterator[CompileCase]:
    """The cases of a kernel for long rows whose tile choose() says, as forward_tile() does."""

    def case(
        kind: str, width: int, *, dropout: bool = True, mask: str = "add", packed: bool = False, shared: bool = False,
        scoring: bool = False, D: int | None = None,
    ) -> CompileCase:  # fmt: skip
        tile = choose(chip, kind, width, extras(kind, dropout, mask != "none", shared=shared, scored=scoring))
        variant: dict[str, Any] = {"dropout": dropout, "mask": mask, "packed": packed, "shared": shared}
        variant |= {"scoring": scoring}
        full = f"{name}/{variant_name(**variant)}/D{D or width}"
        return compile_case(kernel, full, kind, tile, **variant, **head_constants(D or width))

    for width in WIDTHS:
        for kind in product_kinds(chip):
            if spills(chip, kind, width):
                continue  # the route takes another way
            yield case(kind, width)
            if choose(chip, kind, width, 1) != choose(chip, kind, width, 2):
                yield case(kind, width, mask="none")
            if kind in ("bf16", "fp16"):
                yield case(kind, width, dropout=False, mask="none")
    for kind in every_kind(chip):
        for mask in MASKS:
            yield case(kind, 64, mask=mask)
        yield case(kind, 64, mask="none", packed=True)
    for kind in product_kinds(chip):
        yield case(kind, 64, mask="none", shared=True)
        yield case(kind, 64, mask="none", scoring=True)
    if chip.matrix_units:
        yield case("bf16", 128, dropout=False, mask="none", shared=True)
        yield case("bf16", 128, dropout=False, mask="none", scoring=True)
    yield case("bf16", 64, D=32)
