"""LayerNorm, alone or with the residual connection and its dropout, forward and backward in one pass each.

    s = residual + dropout(x + x_bias)     y = (s - mean(s)) * rstd(s) * weight + bias,     rstd = (variance + eps)^-1/2

    x^ = (s - mean) * rstd             g = dy * weight
    ds_total = rstd * (g - mean(g) - x^ * mean(g * x^)) + ds           dresidual = ds_total
    dx = dropout'(ds_total)            dweight = sum over rows of dy * x^        dbias = sum over rows of dy
                                       dx_bias = sum over rows of dx

x_bias is that of the product that made x: here it costs no reading, and its gradient no pass over dx.

Forward reads x and residual, writes y and s: 4 * M * N elements, so an H200 (4.3 TB/s) needs at least 24 us at
M = 25,000, N = 512 in bfloat16. Backward reads dy, ds and s, writes dresidual and dx: 5 * M * N elements with dropout
on a pre-norm stream, 3 * M * N without both. The keep-mask is drawn anew from the seed, M * N / 8 Philox blocks each
way. Two float32 numbers a row (mean, rstd) are kept between the passes.

A program holds whole rows in registers, several where rows are short. In backward, a fixed number of programs walk over
all row tiles, each summing its own part of dweight and dbias in float32, and a second small kernel adds the parts in a
fixed order: no atomics, the same bits every time. Above _WIDEST columns row and sums no longer fit: backward walks over
each row twice, the second time from the cache, and a third kernel reads dy and s once more for the sums.
Source: Ba et al. 2016; placement of dropout, Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div, chip, power_of_two
from fasttfm.kernels.partial_sums import add_parts
from fasttfm.kernels.philox import dropout_arguments, keep_mask
from fasttfm.kernels.row_tile import NARROWEST, RowTile, row_case, warps

MAX_COLUMNS = 16384
_WIDEST = 4096  # columns of a row that backward keeps in registers, with its sums of dweight and dbias
_COLUMN_SHARES = 32  # into how many programs _column_sums splits the rows of a block of columns


@jit(do_not_specialize=["stream", "threshold", "M"])
def _forward(
    x,  # (M, N)
    x_bias,  # (N,) or None
    residual,  # (M, N), or None: s = x and neither dropout nor s
    weight,  # (N,) or None
    bias,  # (N,) or None
    y,  # (M, N) out
    s,  # (M, N) out, the new residual stream; None without residual
    mean,  # (M,) float32 out
    rstd,  # (M,) float32 out
    seed,  # (1,) int64 in device memory, so that a captured graph draws anew at each replay; None: no dropout
    stream,
    threshold,
    keep_scale,
    eps,
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    row_inside = rows < M
    inside = row_inside[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]

    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if x_bias is not None:
        value += tl.load(x_bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        if seed is not None:
            keep = keep_mask(tl.load(seed), stream, 0, rows, 0, threshold, COLUMNS)
            value = tl.where(keep, value * keep_scale, 0.0)
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(s.dtype.element_ty)
        tl.store(s + offsets, rounded, mask=inside)
        value = rounded.to(tl.float32)  # backward will see s as it was stored

    row_mean = tl.sum(value, axis=1) / N
    centered = tl.where(inside, value - row_mean[:, None], 0.0)
    row_rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / N + eps)
    tl.store(mean + rows, row_mean, mask=row_inside)
    tl.store(rstd + rows, row_rstd, mask=row_inside)

    out = centered * row_rstd[:, None]
    if weight is not None:
        out *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        out += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offsets, out.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["stream", "threshold", "M"])
def _backward(
    dy,  # (M, N)
    dy2,  # (M, N): y was used twice, and this is to be added to dy; or None
    ds,  # (M, N), or None: nothing but the LayerNorm used s
    s,  # (M, N)
    mean,  # (M,) float32
    rstd,  # (M,) float32
    weight,  # (N,) or None
    dresidual,  # (M, N) out
    dx,  # (M, N) out, or None: the same as dresidual
    parts,  # (2, programs, N) float32 out: what each program adds to dweight and dbias; None: nobody wants them
    x_parts,  # (programs, N) float32 out: what it adds to dx_bias; or None
    seed,  # (1,) int64 or None
    stream,
    threshold,
    keep_scale,
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, COLUMNS)
    column_inside = columns < N
    if weight is not None:
        scale = tl.load(weight + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    if parts is not None:
        dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
        dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    if x_parts is not None:
        dx_bias = tl.zeros((ROWS, COLUMNS), tl.float32)

    for tile in range(program, tl.cdiv(M, ROWS), programs):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_inside = rows < M
        inside = row_inside[:, None] & column_inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        if dy2 is not None:
            gradient += tl.load(dy2 + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        row_mean = tl.load(mean + rows, mask=row_inside, other=0.0)[:, None]
        row_rstd = tl.load(rstd + rows, mask=row_inside, other=0.0)[:, None]
        normal = (value - row_mean) * row_rstd  # past the last column it is noise, but gradient is zero there
        if parts is not None:
            dweight += gradient * normal
            dbias += gradient
        if weight is not None:
            gradient *= scale
        along_mean = tl.sum(gradient, axis=1)[:, None] / N
        along_normal = tl.sum(gradient * normal, axis=1)[:, None] / N
        total = row_rstd * (gradient - along_mean - normal * along_normal)
        if ds is not None:
            total += tl.load(ds + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + offsets, total.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            if seed is not None:
                keep = keep_mask(tl.load(seed), stream, 0, rows, 0, threshold, COLUMNS)
                total = tl.where(keep, total * keep_scale, 0.0)
            tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=inside)
        if x_parts is not None:
            dx_bias += tl.where(inside, total, 0.0)

    if parts is not None:
        at = parts + program * N + columns
        tl.store(at, tl.sum(dweight, axis=0), mask=column_inside)
        tl.store(at + programs * N, tl.sum(dbias, axis=0), mask=column_inside)
    if x_parts is not None:
        tl.store(x_parts + program * N + columns, tl.sum(dx_bias, axis=0), mask=column_inside)


@jit(do_not_specialize=["stream", "threshold", "M"])
def _backward_wide(
    dy,  # (M, N); this and the rest as for _backward
    ds,
    s,
    mean,
    rstd,
    weight,
    dresidual,
    dx,
    seed,
    stream,
    threshold,
    keep_scale,
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """For rows that would fill the registers: block by block, once for the two means and once for all else."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = rows < M
    row_mean = tl.load(mean + rows, mask=row_inside, other=0.0)[:, None]
    row_rstd = tl.load(rstd + rows, mask=row_inside, other=0.0)[:, None]
    along_mean = tl.zeros((ROWS, COLUMNS), tl.float32)
    along_normal = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = row_inside[:, None] & (columns < N)[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            gradient *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        along_mean += gradient
        along_normal += gradient * (value - row_mean) * row_rstd
    along_mean = tl.sum(along_mean, axis=1)[:, None] / N
    along_normal = tl.sum(along_normal, axis=1)[:, None] / N
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = row_inside[:, None] & (columns < N)[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            gradient *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        total = row_rstd * (gradient - along_mean - (value - row_mean) * row_rstd * along_normal)
        if ds is not None:
            total += tl.load(ds + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + offsets, total.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            if seed is not None:
                keep = keep_mask(tl.load(seed), stream, 0, rows, start, threshold, COLUMNS)
                total = tl.where(keep, total * keep_scale, 0.0)
            tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["M"])
def _column_sums(
    dy,  # (M, N)
    s,  # (M, N)
    mean,  # (M,) float32
    rstd,  # (M,) float32
    parts,  # (2, programs, N) float32 out
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What the rows of program (., p) add to dweight and dbias, for a block of columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    column_inside = columns < N
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), programs):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_inside = rows < M
        inside = row_inside[:, None] & column_inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        row_mean = tl.load(mean + rows, mask=row_inside, other=0.0)[:, None]
        row_rstd = tl.load(rstd + rows, mask=row_inside, other=0.0)[:, None]
        dweight += gradient * (value - row_mean) * row_rstd
        dbias += gradient
    at = parts + program * N + columns
    tl.store(at, tl.sum(dweight, axis=0), mask=column_inside)
    tl.store(at + programs * N, tl.sum(dbias, axis=0), mask=column_inside)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, columns: int, direction: str) -> tuple[RowTile, ...]:
    """Half and twice the rows, half and twice the elements a thread."""
    to = row_tile.shipped(chip, columns, direction)
    found = [RowTile(to.rows, columns, to.warps * 2), RowTile(to.rows, columns, max(1, to.warps // 2))]
    if to.rows > 1:
        found.append(RowTile(to.rows // 2, columns, max(1, to.warps // 2)))
    if columns <= 1024:
        found.append(RowTile(2 * to.rows, columns, to.warps * 2))
    return tuple(t for t in found if t.warps <= 16 and t != to)


@choice("layer_norm.tile", alternatives=_alternatives)
def row_tile(chip: Chip, columns: int, direction: str) -> RowTile:
    """Whole rows: 2,048 elements or one row a program; columns a power of two.

    direction forward has 16 elements a thread; backward, whose sums stay in registers too, 8: more would spill.
    Both more where that would take over 512 threads; the widest rows of backward spill with 8, and take 1,024.
    """
    if direction == "backward" and columns == _WIDEST:
        return RowTile(1, columns, warps(chip, columns, 4, threads=1024))
    if direction == "backward" and columns == 1024 and chip.capability == 80:
        return RowTile(1, columns, 4)  # two rows by eight warps spill in float32 with Triton 3.6.0
    rows = max(1, 2048 // columns)
    return RowTile(rows, columns, warps(chip, rows * columns, 8 if direction == "backward" else 16))


def tile(chip: Chip, N: int, *, backward: bool) -> RowTile:
    """The tile for rows of N columns. Raises ValueError above MAX_COLUMNS."""
    if N > MAX_COLUMNS:
        raise ValueError(f"LayerNorm over {N} columns: the kernel holds a row in registers, at most {MAX_COLUMNS}")
    return row_tile(chip, max(NARROWEST, power_of_two(N)), "backward" if backward else "forward")


def _wide_tile(chip: Chip) -> RowTile:
    """Rows of more than _WIDEST columns, 2,048 at a time."""
    return RowTile(1, 2048, warps(chip, 2048, 8))


def _column_tile(chip: Chip) -> RowTile:
    return RowTile(16, 128, warps(chip, 2048))


def _programs(chip: Chip, tile: RowTile, tiles: int) -> int:
    """How many programs share the row tiles in backward: 24 warps a processor, as many as their registers let in."""
    return min(tiles, max(1, 24 // tile.warps) * chip.processors)


# --------------------------------------------------------------------------------------------------------- launches


def sum_programs(M, N, device):
    """Into how many parts a backward pass over (M, N) sums the gradients of its parameters; None: they come summed."""
    if not M or N > _WIDEST:
        return None
    here = chip(device)
    to = tile(here, N, backward=True)
    return _programs(here, to, ceil_div(M, to.rows))


def layer_norm(x, weight, bias, eps):
    """x (M, N) contiguous, weight and bias (N,) or None. Returns y (M, N), mean and rstd (M,) float32."""
    y, _, mean, rstd = _run_forward(x, None, None, weight, bias, eps, 0.0, None, 0)
    return y, mean, rstd


def residual_layer_norm(x, x_bias, residual, weight, bias, eps, *, dropout_p=0.0, seed=None, stream=0):
    """x, residual (M, N) contiguous; x_bias, weight, bias (N,) or None, or (P, N) as in residual_layer_norm_backward().

    Returns y in x's dtype, s in residual's, mean and rstd (M,) float32.
    """
    return _run_forward(x, x_bias, residual, weight, bias, eps, dropout_p, seed, stream)


def _run_forward(x, x_bias, residual, weight, bias, eps, dropout_p, seed, stream):
    M, N = x.shape
    y = torch.empty_like(x)
    s = None if residual is None else torch.empty_like(residual)
    mean = torch.empty(M, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if M:
        to = tile(chip(x.device), N, backward=False)
        seed, threshold, scale = dropout_arguments(dropout_p, seed)
        x_bias, weight, bias = _values(x_bias), _values(weight), _values(bias)
        _forward[(ceil_div(M, to.rows),)](
            x, x_bias, residual, weight, bias, y, s, mean, rstd, seed, stream, threshold, scale, eps, M, N,
            ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=1,
        )  # fmt: skip
    return y, s, mean, rstd


def _values(parameter):
    """A parameter (N,), contiguous, of (N,) or of P times the same in (P, N)."""
    if parameter is None:
        return None
    return (parameter[0] if parameter.dim() == 2 else parameter).contiguous()


def layer_norm_backward(dy, ds, x, mean, rstd, weight, bias):
    """dx (M, N) in x's dtype, dweight and dbias (N,) in their parameters' dtypes, empty where there is none.

    ds (M, N) or None: a gradient of x from elsewhere, to be added.
    """
    _, dx, dweight, dbias, _ = residual_layer_norm_backward(dy, None, ds, x, mean, rstd, weight, bias, None)
    return dx, dweight, dbias


def residual_layer_norm_backward(
    dy, dy2, ds, s, mean, rstd, weight, bias, x_bias, *, dropout_p=0.0, seed=None, stream=0, x_dtype=None
):
    """dy, s, dy2 and ds (or None) (M, N) contiguous. Returns dx, dresidual, dweight, dbias, dx_bias.

    dx comes in x_dtype; None: it equals dresidual and is returned as None. Parameters given as (P, N), P being
    sum_programs(), have their gradients returned as P float32 parts of the sum.
    """
    M, N = s.shape
    dresidual = torch.empty_like(s)
    dx = None if x_dtype is None else torch.empty_like(s, dtype=x_dtype)
    here = chip(s.device)
    wide = N > _WIDEST
    to = _wide_tile(here) if wide else tile(here, N, backward=True)
    tiles = ceil_div(M, to.rows)
    shares = min(_COLUMN_SHARES, tiles) if wide else _programs(here, to, tiles)
    wanted = x_parts = None
    if weight is not None or bias is not None:
        wanted = torch.empty(2, shares, N, dtype=torch.float32, device=s.device)
    if x_bias is not None and not wide:
        x_parts = torch.empty(shares, N, dtype=torch.float32, device=s.device)
    if M:
        seed, threshold, scale = dropout_arguments(dropout_p, seed)
        options = {"ROWS": to.rows, "COLUMNS": to.columns, "num_warps": to.warps, "num_stages": 1}
        if wide:
            dy = dy if dy2 is None else dy + dy2
            _backward_wide[(tiles,)](
                dy, ds, s, mean, rstd, _values(weight), dresidual, dx, seed, stream, threshold, scale, M, N, **options
            )  # fmt: skip
            if wanted is not None:
                _launch_column_sums(here, dy, s, mean, rstd, wanted)
        else:
            _backward[(shares,)](
                dy, dy2, ds, s, mean, rstd, _values(weight), dresidual, dx, wanted, x_parts, seed, stream, threshold,
                scale, M, N, **options,
            )  # fmt: skip
    parts = (None, None) if wanted is None else wanted.unbind()
    gradients, sums = [], []
    for parameter, part in ((weight, parts[0]), (bias, parts[1]), (x_bias, x_parts)):
        if parameter is None:
            gradient = s.new_empty(0)
        elif part is None:  # x_bias of a wide row
            gradient = (dresidual if dx is None else dx).sum(0, dtype=torch.float32).to(parameter.dtype)
        elif parameter.dim() == 2:
            gradient = part
        else:
            gradient = torch.empty_like(parameter)
            sums.append((part, gradient))
        gradients.append(gradient)
    add_parts(sums)
    return dx, dresidual, *gradients


def _launch_column_sums(here, dy, s, mean, rstd, parts):
    M, N = s.shape
    to = _column_tile(here)
    _column_sums[(ceil_div(N, to.columns), parts.shape[1])](
        dy, s, mean, rstd, parts, M, N, ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=1
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in its heaviest variant (residual, dropout, both parameters); the lighter ones at N = 512."""
    columns = NARROWEST
    while columns <= MAX_COLUMNS:
        for dtype in ("fp32", "bf16"):
            yield _forward_case(chip, columns, dtype, dtype)
            if columns <= 2 * _WIDEST:
                yield _backward_case(chip, columns, dtype, dtype)
        columns *= 2
    for x, stream in (("fp16", "fp16"), ("bf16", "fp32")):
        yield _forward_case(chip, 512, x, stream)
        yield _backward_case(chip, 512, x, stream)
    yield _forward_case(chip, 512, "bf16", "bf16", residual=False, dropout=False)
    yield _forward_case(chip, 512, "bf16", "bf16", dropout=False)
    yield _backward_case(chip, 512, "bf16", "bf16", dropout=False, ds=False)
    yield _backward_case(chip, 512, "bf16", "bf16", dropout=False)
    yield _backward_case(chip, 512, "bf16", "bf16", ds=False)
    yield _backward_case(chip, 512, "bf16", "bf16", ds=False, again=True)
    for dtype in ("fp32", "bf16"):
        yield _column_sums_case(chip, dtype)


_DROPOUT = {"stream": "i32", "threshold": "i32", "keep_scale": "fp32"}


def _forward_case(chip: Chip, N: int, x: str, s: str, *, residual: bool = True, dropout: bool = True) -> CompileCase:
    arguments = {
        "x": f"*{x}",
        "x_bias": "*fp32" if residual else None,
        "residual": f"*{s}" if residual else None,
        "weight": "*fp32",
        "bias": "*fp32",
        "y": f"*{x}",
        "s": f"*{s}" if residual else None,
        "mean": "*fp32",
        "rstd": "*fp32",
        "seed": "*i64" if dropout else None,
        "eps": "fp32",
        "M": "i32",
        **_DROPOUT,
    }
    variant = "+".join(["residual"] * residual + ["dropout"] * dropout) or "plain"
    variant += f"+{s}-stream" if x != s else ""
    return row_case(_forward, f"layer_norm.forward/{variant}/N{N}", x, tile(chip, N, backward=False), arguments)


def _backward_case(
    chip: Chip, N: int, x: str, s: str, *, ds: bool = True, dropout: bool = True, again: bool = False
) -> CompileCase:
    wide = N > _WIDEST
    arguments = {
        "dy": f"*{x}",
        **({} if wide else {"dy2": f"*{x}" if again else None}),
        "ds": f"*{s}" if ds else None,
        "s": f"*{s}",
        "mean": "*fp32",
        "rstd": "*fp32",
        "weight": "*fp32",
        "dresidual": f"*{s}",
        "dx": f"*{x}" if dropout or x != s else None,
        "seed": "*i64" if dropout else None,
        "M": "i32",
        **({} if wide else {"parts": "*fp32", "x_parts": "*fp32"}),
        **_DROPOUT,
    }
    variant = "+".join(["ds"] * ds + ["twice"] * again + ["dropout"] * dropout) or "plain"
    variant += f"+{s}-stream" if x != s else ""
    if wide:
        return row_case(_backward_wide, f"layer_norm.backward_wide/{variant}", x, _wide_tile(chip), arguments)
    return row_case(_backward, f"layer_norm.backward/{variant}/N{N}", x, tile(chip, N, backward=True), arguments)


def _column_sums_case(chip: Chip, dtype: str) -> CompileCase:
    arguments = {"dy": f"*{dtype}", "s": f"*{dtype}", "mean": "*fp32", "rstd": "*fp32", "parts": "*fp32", "M": "i32"}
    return row_case(_column_sums, "layer_norm.column_sums", dtype, _column_tile(chip), arguments)
