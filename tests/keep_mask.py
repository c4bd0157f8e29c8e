"""A kernel that writes dropout's keep-mask, for tests."""

from __future__ import annotations

import triton.language as tl

from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Int8Pointer, Int64Pointer, Size, Varying
from fasttfm.kernels.philox import Dropout, keep_mask, keep_transposed, lanes_spread, select, spread


@jit
def _write(
    out: Int8Pointer,  # (P, R, C) out
    seed: Int64Pointer,  # (1,)
    site: Varying,
    threshold: Varying,
    R: Varying,
    C: Size,
    HOW: tl.constexpr,  # plain; as attention does: transposed, or the dtype in which ones are selected
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * COLUMNS
    plane = tl.program_id(2)
    columns = first_column + tl.arange(0, COLUMNS)
    dropout = Dropout(tl.load(seed), site, threshold, 1.0)
    if HOW == "plain":
        kept = keep_mask(dropout.seed, site, plane, rows, first_column, threshold, COLUMNS)
    elif HOW == "transposed":
        kept = tl.trans(keep_transposed(dropout, plane, rows, first_column, COLUMNS))
    else:
        columns = first_column + spread(COLUMNS)
        ones = tl.full((ROWS, COLUMNS), 1.0, tl.float32).to(HOW)  # the interpreter makes no bfloat16 of nothing
        kept = select(ones, lanes_spread(dropout, plane, rows, first_column, COLUMNS), threshold)
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    offsets = (plane.to(tl.int64) * R + rows[:, None]) * C + columns[None, :]
    tl.store(out + offsets, (kept != 0).to(tl.int8), mask=inside)


def write(out, seed, site, threshold, how="plain", rows=16, columns=64, warps=4):
    """Write the keep-mask to out (P, R, C) int8, in tiles of rows and columns."""
    P, R, C = out.shape
    grid = (ceil_div(R, rows), ceil_div(C, columns), P)
    _write[grid](out, seed, site, threshold, R, C, HOW=how, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=1)
    return out
