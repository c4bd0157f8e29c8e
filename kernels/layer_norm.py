"""LayerNorm, alone or with the residual connection and its dropout, forward and backward in one pass each.

    s = residual + dropout(x + x_bias)     y = (s - mean(s)) * rstd(s) * weight + bias,     rstd = (variance + eps)^-1/2

    x^ = (s - mean) * rstd             g = dy * weight
    ds_total = rstd * (g - mean(g) - x^ * mean(g * x^)) + ds           dresidual = ds_total
    dx = dropout'(ds_total)            dweight = sum over rows of dy * x^        dbias = sum over rows of dy
                                       dx_bias = sum over rows of dx

RMSNorm (Zhang and Sennrich 2019) is the same without the mean and without the bias, y = s * rstd(s) * weight with
rstd = (mean(s^2) + eps)^-1/2; its derivative lacks the term mean(g). The kernels are told so by a missing `mean`.

x_bias is that of the product that made x: here it costs no reading, and its gradient no pass over dx.

Forward reads x and residual, writes y and s: 4 * M * N elements, so an H200 (4.3 TB/s) needs at least 24 us at
M = 25,000, N = 512 in bfloat16. Backward reads dy, ds and s, writes dresidual and dx: 5 * M * N elements with dropout
on a pre-norm site, 3 * M * N without both. The keep-mask is drawn anew from the seed, M * N / 8 Philox blocks each
way. Two float32 numbers a row (mean, rstd) are kept between the passes.

A program holds whole rows in registers, several where rows are short. In backward, a fixed number of programs walk over
all row tiles, each summing its own part of dweight and dbias in float32, and a second small kernel adds the parts in a
fixed order: no atomics, the same bits every time. Rows of more than WIDEST columns, where row and sums no longer fit
the registers, have a backward pass of their own in layer_norm_wide.py.
Source: Ba et al. 2016; placement of dropout, Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CompileCase, kernel_case
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div, chip
from fasttfm.kernels.layer_norm_tile import programs_of, tile
from fasttfm.kernels.layer_norm_wide import wide_backward
from fasttfm.kernels.parameter import (
    Float32Pointer,
    ParameterPointer,
    Pointer,
    Real,
    ResidualPointer,
    Shape,
)
from fasttfm.kernels.partial_sums import add_parts
from fasttfm.kernels.philox import Dropout, drop, dropout_arguments, dropped, with_seed
from fasttfm.kernels.tiles.rows import MAX_COLUMNS, NARROWEST

WIDEST = 4096
"""Columns of a row that backward keeps in registers, with its sums of dweight and dbias."""


@jit
def _forward(
    x: Pointer,  # (M, N)
    x_bias: ParameterPointer,  # (N,) or None
    residual: ResidualPointer,  # (M, N), or None: s = x and neither dropout nor s
    weight: ParameterPointer,  # (N,) or None
    bias: ParameterPointer,  # (N,) or None
    y: Pointer,  # (M, N) out
    s: ResidualPointer,  # (M, N) out, the new residual stream; None without residual
    mean: Float32Pointer,  # (M,) out; None: RMSNorm
    rstd: Float32Pointer,  # (M,) out
    dropout: Dropout,
    eps: Real,
    shape: Shape,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    M, N = shape
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    row_inside = rows < M
    inside = row_inside[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]

    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if x_bias is not None:
        value += tl.load(x_bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        value = drop(value, dropout, rows, 0, COLUMNS)
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(s.dtype.element_ty)
        tl.store(s + offsets, rounded, mask=inside)
        value = rounded.to(tl.float32)  # backward will see s as it was stored

    centered = value
    if mean is not None:
        row_mean = tl.sum(value, axis=1) / N
        centered = tl.where(inside, value - row_mean[:, None], 0.0)
    row_rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / N + eps)
    if mean is not None:
        tl.store(mean + rows, row_mean, mask=row_inside)
    tl.store(rstd + rows, row_rstd, mask=row_inside)

    out = centered * row_rstd[:, None]
    if weight is not None:
        out *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        out += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offsets, out.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    dy: Pointer,  # (M, N)
    dy2: Pointer,  # (M, N): y was used twice, and this is to be added to dy; or None
    ds: ResidualPointer,  # (M, N), or None: nothing but the LayerNorm used s
    s: ResidualPointer,  # (M, N)
    mean: Float32Pointer,  # (M,), or None: RMSNorm
    rstd: Float32Pointer,  # (M,)
    weight: ParameterPointer,  # (N,) or None
    dresidual: ResidualPointer,  # (M, N) out
    dx: Pointer,  # (M, N) out, or None: the same as dresidual
    parts: Float32Pointer,  # (2, programs, N) out: what each program adds to dweight and dbias, (1, programs, N) for
    # RMSNorm, which has no bias; None: nobody wants them
    x_parts: Float32Pointer,  # (programs, N) out: what it adds to dx_bias; or None
    dropout: Dropout,
    shape: Shape,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    M, N = shape
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, COLUMNS)
    column_inside = columns < N
    if weight is not None:
        scale = tl.load(weight + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    if parts is not None:
        dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
        if mean is not None:
            dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    if x_parts is not None:
        dx_bias = tl.zeros((ROWS, COLUMNS), tl.float32)

    for block in range(program, tl.cdiv(M, ROWS), programs):
        rows = block * ROWS + tl.arange(0, ROWS)
        row_inside = rows < M
        inside = row_inside[:, None] & column_inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        if dy2 is not None:
            gradient += tl.load(dy2 + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        if mean is not None:
            row_mean = tl.load(mean + rows, mask=row_inside, other=0.0)[:, None]
        row_rstd = tl.load(rstd + rows, mask=row_inside, other=0.0)[:, None]
        if mean is not None:
            value -= row_mean
        normal = value * row_rstd  # past the last column it may be noise, but gradient is zero there
        if parts is not None:
            dweight += gradient * normal
            if mean is not None:
                dbias += gradient
        if weight is not None:
            gradient *= scale
        if mean is not None:
            along_mean = tl.sum(gradient, axis=1)[:, None] / N
        along_normal = tl.sum(gradient * normal, axis=1)[:, None] / N
        if mean is not None:
            gradient -= along_mean
        total = row_rstd * (gradient - normal * along_normal)
        if ds is not None:
            total += tl.load(ds + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + offsets, total.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            if dropout.seed is not None:
                total = dropped(total, with_seed(dropout), 0, rows, 0, COLUMNS)
            tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=inside)
        if x_parts is not None:
            dx_bias += tl.where(inside, total, 0.0)

    if parts is not None:
        sums = parts + program * N + columns
        tl.store(sums, tl.sum(dweight, axis=0), mask=column_inside)
        if mean is not None:
            tl.store(sums + programs * N, tl.sum(dbias, axis=0), mask=column_inside)
    if x_parts is not None:
        tl.store(x_parts + program * N + columns, tl.sum(dx_bias, axis=0), mask=column_inside)


# --------------------------------------------------------------------------------------------------------- launches


def sum_programs(M: int, N: int, device: torch.device) -> int | None:
    """Into how many parts a backward pass over (M, N) sums the gradients of its parameters; None: they come summed."""
    if not M or N > WIDEST:
        return None
    return programs_of(chip(device), tile(chip(device), N, backward=True), M)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) contiguous, weight and bias (N,) or None. Returns y (M, N), mean and rstd (M,) float32."""
    y, _, mean, rstd = _run_forward(x, None, None, weight, bias, eps, 0.0, None, 0)
    assert mean is not None
    return y, mean, rstd


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x, residual (M, N) contiguous, residual or None; weight (N,) or None.

    Returns y in x's dtype, s in residual's or None without one, and rstd (M,) float32.
    """
    y, s, _, rstd = _run_forward(x, None, residual, weight, None, eps, dropout_p, seed, site, rms=True)
    return y, s, rstd


def residual_layer_norm(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual (M, N) contiguous; x_bias, weight, bias (N,) or None, or (P, N) as in residual_layer_norm_backward().

    Returns y in x's dtype, s in residual's, mean and rstd (M,) float32.
    """
    y, s, mean, rstd = _run_forward(x, x_bias, residual, weight, bias, eps, dropout_p, seed, site)
    assert s is not None
    assert mean is not None
    return y, s, mean, rstd


def _run_forward(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    site: int,
    *,
    rms: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    M, N = x.shape
    y = torch.empty_like(x)
    s = None if residual is None else torch.empty_like(residual)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    mean = None if rms else torch.empty_like(rstd)
    if M:
        block = tile(chip(x.device), N, backward=False)
        dropout = dropout_arguments(dropout_p, seed, site)
        x_bias, weight, bias = _values(x_bias), _values(weight), _values(bias)
        _forward[(ceil_div(M, block.rows),)](
            x, x_bias, residual, weight, bias, y, s, mean, rstd, dropout, eps, Shape(M, N),
            ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps, num_stages=1,
        )  # fmt: skip
    return y, s, mean, rstd


def _values(parameter: Tensor | None) -> Tensor | None:
    """A parameter (N,), contiguous, of (N,) or of P times the same in (P, N)."""
    if parameter is None:
        return None
    return (parameter[0] if parameter.dim() == 2 else parameter).contiguous()


def layer_norm_backward(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (M, N) in x's dtype, dweight and dbias (N,) in their parameters' dtypes, empty where there is none.

    ds (M, N) or None: a gradient of x from elsewhere, to be added.
    """
    _, dx, dweight, dbias, _ = residual_layer_norm_backward(dy, None, ds, x, mean, rstd, weight, bias, None)
    return dx, dweight, dbias


def residual_layer_norm_backward(
    dy: Tensor,
    dy2: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    x_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """dy, s, dy2 and ds (or None) (M, N) contiguous. Returns dx, dresidual, dweight, dbias, dx_bias.

    dx comes in x_dtype; None: it equals dresidual and is returned as None. mean None: it was rms_norm(). Parameters
    given as (P, N), P being sum_programs(), have their gradients returned as P float32 parts of the sum.
    """
    M, N = s.shape
    dresidual = torch.empty_like(s)
    dx = None if x_dtype is None else torch.empty_like(s, dtype=x_dtype)
    parametric = weight is not None or bias is not None
    dropout = dropout_arguments(dropout_p, seed, site)
    if N > WIDEST:
        dy = dy if dy2 is None else dy + dy2
        parts = wide_backward(dy, ds, s, mean, rstd, _values(weight), dresidual, dx, dropout, sums=parametric)
        x_parts = None
    else:
        device = chip(s.device)
        block = tile(device, N, backward=True)
        programs = programs_of(device, block, M)
        sums = 1 if mean is None else 2
        parts = torch.empty(sums, programs, N, dtype=torch.float32, device=s.device) if parametric else None
        x_parts = torch.empty(programs, N, dtype=torch.float32, device=s.device) if x_bias is not None else None
        if M:
            _backward[(programs,)](
                dy, dy2, ds, s, mean, rstd, _values(weight), dresidual, dx, parts, x_parts, dropout, Shape(M, N),
                ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps, num_stages=1,
            )  # fmt: skip
    weight_parts, bias_parts = (None, None) if parts is None else (parts[0], parts[-1])
    if x_bias is not None and x_parts is None:  # a wide row's
        dx_bias = (dresidual if dx is None else dx).sum(0, dtype=torch.float32).to(x_bias.dtype)
        dweight, dbias = _summed((weight, weight_parts), (bias, bias_parts), like=s)
        return dx, dresidual, dweight, dbias, dx_bias
    dweight, dbias, dx_bias = _summed((weight, weight_parts), (bias, bias_parts), (x_bias, x_parts), like=s)
    return dx, dresidual, dweight, dbias, dx_bias


def _summed(*pairs: tuple[Tensor | None, Tensor | None], like: Tensor) -> list[Tensor]:
    """The gradient of each (parameter, its parts): their sum, or they themselves where the parameter is (P, N)."""
    gradients, sums = [], []
    for parameter, parts in pairs:
        if parameter is None or parts is None:
            gradients.append(like.new_empty(0))
        elif parameter.dim() == 2:
            gradients.append(parts)
        else:
            gradients.append(torch.empty_like(parameter))
            sums.append((parts, gradients[-1]))
    add_parts(sums)
    return gradients


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in its heaviest variant (residual, dropout, both parameters); the lighter ones at N = 512, and every
    combination of dtypes that a model has, under autocast or not."""
    columns = NARROWEST
    while columns <= MAX_COLUMNS:
        for dtype in ("fp32", "bf16"):
            yield _forward_case(chip, columns, dtype)
            if columns <= WIDEST:
                yield _backward_case(chip, columns, dtype)
        columns *= 2
    yield _forward_case(chip, 512, "fp16")
    yield _backward_case(chip, 512, "fp16")
    for dtype in ("fp16", "bf16"):
        for others in ({"residual": "fp32"}, {"parameter": dtype}):
            yield _forward_case(chip, 512, dtype, others)
            yield _backward_case(chip, 512, dtype, others)
        yield _forward_case(chip, 512, dtype, {"parameter": dtype}, without=_PLAIN)
    for dtype in ("fp32", "fp16", "bf16"):
        yield _forward_case(chip, 512, dtype, without=_PLAIN)
        yield _forward_case(chip, 512, dtype, without=("seed",))
        yield _backward_case(chip, 512, dtype, without=("ds", "dy2", "seed", "dx"))
        yield _backward_case(chip, 512, dtype, without=("dy2", "seed", "dx"))
        yield _backward_case(chip, 512, dtype, without=("ds", "dy2"))
        yield _backward_case(chip, 512, dtype, without=("ds",))
        yield _forward_case(chip, 512, dtype, without=("mean", "bias"))
        yield _forward_case(chip, 512, dtype, without=(*_PLAIN, "mean", "bias"))
        yield _backward_case(chip, 512, dtype, without=("dy2", "mean"))
        yield _backward_case(chip, 512, dtype, without=("ds", "dy2", "seed", "dx", "mean"))


_PLAIN = ("residual", "x_bias", "s", "seed")
"""What LayerNorm alone is not given."""
_SAME: dict[str, str] = {}
"""The residual stream has x's dtype, parameters are float32."""


def _forward_case(
    chip: Chip, N: int, dtype: str, dtypes: Mapping[str, str] = _SAME, *, without: tuple[str, ...] = ()
) -> CompileCase:
    words = ["rms"] * ("mean" in without)
    words += ["residual"] * ("residual" not in without) + ["dropout"] * ("seed" not in without)
    block = tile(chip, N, backward=False)
    name = f"layer_norm.forward/{_variant(words, dtypes)}/N{N}"
    return kernel_case(_forward, name, dtype, block, dtypes=dtypes, given=dict.fromkeys(without))


def _backward_case(
    chip: Chip, N: int, dtype: str, dtypes: Mapping[str, str] = _SAME, *, without: tuple[str, ...] = ("dy2",)
) -> CompileCase:
    words = ["rms"] * ("mean" in without)
    words += ["ds"] * ("ds" not in without) + ["twice"] * ("dy2" not in without) + ["dropout"] * ("seed" not in without)
    block = tile(chip, N, backward=True)
    name = f"layer_norm.backward/{_variant(words, dtypes)}/N{N}"
    return kernel_case(_backward, name, dtype, block, dtypes=dtypes, given=dict.fromkeys(without))


def _variant(words: list[str], dtypes: Mapping[str, str]) -> str:
    """The variant in a case's name."""
    return "+".join([*(words or ["plain"]), *(f"{dtype}-{what}" for what, dtype in dtypes.items())])
