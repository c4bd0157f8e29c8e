"""Label-smoothed cross entropy that leaves its gradient in the logits' memory.

    lse = log sum over v of exp x[v]
    loss = lse - (1 - a) x[target] - a / V * sum over v of x[v]            nll = lse - x[target]
    dx[v] = factor * (exp(x[v] - lse) - a / V - (1 - a) [v == target])

A program has a row. It reads the row once for the maximum, the sum of exponentials (rescaled when the maximum grows,
Milakov and Gimelshein 2018) and the plain sum, and once more, from the last tile back so that the cache still has it,
to overwrite it with the gradient; a row that fits one tile stays in registers between the two. From and to memory that
is 2 * M * V elements, with 2 * M * V exponentials: an H200 (4.3 TB/s) needs at least 0.86 ms at M = 25,000, V = 37,000
in bfloat16, where a gradient beside the logits would take a second 1.85 GB. Statistics are float32.
Source: Szegedy et al. 2016; Vaswani et al. 2017 section 5.4; torch.nn.functional.cross_entropy's definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div, chip, power_of_two


@triton.jit
def _gradient(x, columns, target, lse, factor, smoothing, V):
    """factor * d loss / d x for a tile (C,) of a row, in float32."""
    gradient = tl.exp(x - lse) - smoothing / V
    return factor * tl.where(columns == target, gradient - (1.0 - smoothing), gradient)


@jit(do_not_specialize=["ignore_index", "M"])
def _forward(
    logits,  # (M, V), rows `stride` elements apart; with OVERWRITE the gradient comes in its place
    target,  # (M,) int64
    losses,  # (2, M) float32 out: loss, and loss without smoothing, of every row
    lses,  # (M,) float32 out, or None
    factor,  # () float32 that multiplies the gradient, or None for 1
    smoothing,
    ignore_index,
    stride,
    M,
    V,
    COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,  # V <= COLUMNS
    OVERWRITE: tl.constexpr,
):
    row = tl.program_id(0)
    start = row.to(tl.int64) * stride
    t = tl.load(target + row)
    counted = t != ignore_index
    if counted:
        # A class that does not exist gives a loss that is not a number, and reads nothing.
        picked = tl.load(logits + start + t, mask=(t >= 0) & (t < V), other=float("nan")).to(tl.float32)
        if ONE_TILE:
            columns = tl.arange(0, COLUMNS)
            x = tl.load(logits + start + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
            top = tl.max(x, axis=0)
            exponentials = tl.sum(tl.exp(x - top), axis=0)
            total = tl.sum(tl.where(columns < V, x, 0.0), axis=0)
        else:
            top = tl.full((), float("-inf"), tl.float32)
            exponentials = tl.full((), 0.0, tl.float32)
            total = tl.full((), 0.0, tl.float32)
            for first in range(0, V, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                x = tl.load(logits + start + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
                higher = tl.maximum(top, tl.max(x, axis=0))
                base = tl.where(higher == float("-inf"), 0.0, higher)  # a tile that is masked everywhere
                exponentials = exponentials * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
                total += tl.sum(tl.where(columns < V, x, 0.0), axis=0)
                top = higher
        lse = top + tl.log(exponentials)
        # A class switched off by -inf does not matter without smoothing, as in torch; with it the loss is infinite.
        spread = tl.where(smoothing > 0.0, smoothing * (total / V), 0.0)
        tl.store(losses + row, lse - (1.0 - smoothing) * picked - spread)
        tl.store(losses + M + row, lse - picked)
        if lses is not None:
            tl.store(lses + row, lse)
        if OVERWRITE:
            scale = 1.0
            if factor is not None:
                scale = tl.load(factor)
            if ONE_TILE:
                out = _gradient(x, columns, t, lse, scale, smoothing, V)
                tl.store(logits + start + columns, out.to(logits.dtype.element_ty), mask=columns < V)
            else:
                tiles = tl.cdiv(V, COLUMNS)
                for done in range(tiles):
                    columns = (tiles - 1 - done) * COLUMNS + tl.arange(0, COLUMNS)
                    x = tl.load(logits + start + columns, mask=columns < V, other=0.0).to(tl.float32)
                    out = _gradient(x, columns, t, lse, scale, smoothing, V)
                    tl.store(logits + start + columns, out.to(logits.dtype.element_ty), mask=columns < V)
    else:
        tl.store(losses + row, 0.0)
        tl.store(losses + M + row, 0.0)
        if lses is not None:
            tl.store(lses + row, 0.0)
        if OVERWRITE:
            for first in range(0, V, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                zeros = tl.zeros((COLUMNS,), logits.dtype.element_ty)
                tl.store(logits + start + columns, zeros, mask=columns < V)


@jit(do_not_specialize=["ignore_index"])
def _backward(
    logits,  # (M, V), rows `stride` apart
    target,  # (M,) int64
    lses,  # (M,) float32
    gradient,  # (M, V) out, contiguous
    factor,  # () float32
    smoothing,
    ignore_index,
    stride,
    V,
    COLUMNS: tl.constexpr,
):
    """The gradient out of place, when backward comes: logits that someone else still needs."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.load(target + row)
    out = tl.zeros((COLUMNS,), tl.float32)
    if t != ignore_index:
        x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < V, other=0.0).to(tl.float32)
        out = _gradient(x, columns, t, tl.load(lses + row), tl.load(factor), smoothing, V)
    tl.store(gradient + row.to(tl.int64) * V + columns, out.to(gradient.dtype.element_ty), mask=columns < V)


@jit
def _scale(
    gradient,  # (M, V), rows `stride` apart, changed
    factor,  # ()
    stride,
    V,
    COLUMNS: tl.constexpr,
):
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:  # as it is under loss.backward(): then nothing is read
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        at = gradient + tl.program_id(0).to(tl.int64) * stride + columns
        x = tl.load(at, mask=columns < V, other=0.0).to(tl.float32) * scale
        tl.store(at, x.to(gradient.dtype.element_ty), mask=columns < V)


# ------------------------------------------------------------------------------------------------------------ tiles


@dataclass(frozen=True, slots=True)
class Tile:
    columns: int
    warps: int


_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def size_class(V: int) -> int:
    """Rows of up to so many classes are treated alike; the last size is open upwards."""
    return min(_SIZES[-1], max(_SIZES[0], power_of_two(V)))


def _alternatives(chip: Chip, columns: int) -> list[Tile]:
    """Worth measuring where time is spent: rows of thousands of classes."""
    tiles = (Tile(2048, 4), Tile(4096, 8), Tile(8192, 16))
    return [to for to in tiles if to.columns <= columns] if columns > 2048 else []


@choice("cross_entropy.row", alternatives=_alternatives)
def tile(chip: Chip, columns: int) -> Tile:
    """Tile of a row whose size_class is columns: the whole row up to 4,096 classes, else 4,096 at a time. 16 elements a
    thread keep loads 16 bytes wide, and several small programs share a multiprocessor, so that one reads while another
    computes."""
    columns = min(columns, 4096)
    return Tile(columns, columns // 512)


# --------------------------------------------------------------------------------------------------------- launches


def forward(logits, target, *, label_smoothing, ignore_index, overwrite=False, factor=None, keep_lse=False):
    """logits (M, V) with unit stride along V, target (M,) int64 contiguous.

    overwrite: logits become factor * d loss / d logits; factor () float32, None for 1. Returns losses (2, M) float32,
    with and without smoothing, zero at ignored rows, and lse (M,) float32, or None without keep_lse.
    """
    M, V = logits.shape
    losses = torch.empty(2, M, dtype=torch.float32, device=logits.device)
    lses = torch.empty(M, dtype=torch.float32, device=logits.device) if keep_lse else None
    if M:
        to = tile(chip(logits.device), size_class(V))
        _forward[(M,)](
            logits, target, losses, lses, factor, label_smoothing, ignore_index, logits.stride(0), M, V,
            COLUMNS=to.columns, ONE_TILE=to.columns >= V, OVERWRITE=overwrite, num_warps=to.warps, num_stages=1,
        )  # fmt: skip
    return losses, lses


def backward(factor, logits, target, lses, *, label_smoothing, ignore_index):
    """factor * d loss / d logits, (M, V) contiguous in logits' dtype; factor () float32, lses from forward()."""
    M, V = logits.shape
    gradient = torch.empty(M, V, dtype=logits.dtype, device=logits.device)
    if M:
        to = tile(chip(logits.device), size_class(V))
        _backward[(M, ceil_div(V, to.columns))](
            logits, target, lses, gradient, factor, label_smoothing, ignore_index, logits.stride(0), V,
            COLUMNS=to.columns, num_warps=to.warps, num_stages=1,
        )  # fmt: skip
    return gradient


def scale(gradient, factor):
    """gradient (M, V) *= factor, a 0-d tensor, in place; touches no memory when it is 1."""
    M, V = gradient.shape
    if M:
        to = tile(chip(gradient.device), size_class(V))
        _scale[(M, ceil_div(V, to.columns))](
            gradient, factor, gradient.stride(0), V, COLUMNS=to.columns, num_warps=to.warps, num_stages=1
        )


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships in float32; half precision, which needs less, and the lighter kernel at the widest."""
    for to in {tile.shipped(chip, columns): None for columns in _SIZES}:
        yield _forward_case(to, True, "fp32", overwrite=True)
        yield from _gradient_cases(to, "fp32")
    for dtype in ("fp32", "bf16", "fp16"):
        yield _forward_case(to, False, dtype, overwrite=True)
    yield _forward_case(to, False, "fp32", overwrite=False)
    yield _forward_case(to, True, "bf16", overwrite=True)
    yield from _gradient_cases(to, "bf16")


def _gradient_cases(to: Tile, dtype: str) -> Iterator[CompileCase]:
    yield _case(
        _backward, "backward", dtype, to,
        {"logits": f"*{dtype}", "target": "*i64", "lses": "*fp32", "gradient": f"*{dtype}", "factor": "*fp32",
         "smoothing": "fp32", "ignore_index": "i32", "stride": "i32:16", "V": "i32:16"},
    )  # fmt: skip
    yield _case(
        _scale, "scale", dtype, to, {"gradient": f"*{dtype}", "factor": "*fp32", "stride": "i32:16", "V": "i32:16"}
    )


def _forward_case(to: Tile, one_tile: bool, dtype: str, *, overwrite: bool) -> CompileCase:
    variant = f"{'in_place' if overwrite else 'loss+lse'}{'+whole_row' if one_tile else ''}"
    return _case(
        _forward, f"forward/{variant}", dtype, to,
        {"logits": f"*{dtype}", "target": "*i64", "losses": "*fp32", "lses": None if overwrite else "*fp32",
         "factor": "*fp32" if overwrite else None, "smoothing": "fp32", "ignore_index": "i32", "stride": "i32:16",
         "M": "i32", "V": "i32", "ONE_TILE": one_tile, "OVERWRITE": overwrite},
    )  # fmt: skip


def _case(kernel, name: str, dtype: str, to: Tile, arguments: dict) -> CompileCase:
    return CompileCase(
        kernel=kernel,
        name=f"cross_entropy.{name}/{to.columns}w{to.warps}s1",
        dtype=dtype,
        arguments={**arguments, "COLUMNS": to.columns},
        num_warps=to.warps,
        num_stages=1,
    )
