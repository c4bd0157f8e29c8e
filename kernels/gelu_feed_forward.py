"""The feed-forward network with GELU: what is between its products fused into their epilogues, as feed_forward.py does.

    forward     before = x W1^T + b1        hidden = keep * gelu(before)            out = scale * hidden W2^T + b2
    backward    dbefore = keep * scale * gelu'(before) * (dout W2)      db1, db2 = sums over rows of dbefore and dout
                dW2 = scale * dout^T hidden, dx = dbefore W1, dW1 = dbefore^T x: plain products, left to cuBLAS

    gelu(u) = u * Phi(u)       Phi(u) = (1 + erf(u / sqrt 2)) / 2, or with tanh 1 / (1 + exp(-2 w)),
                               w = sqrt(2 / pi) * (u + 0.044715 u^3): (1 + tanh w) / 2, and nothing cancels
    gelu'(u) = Phi(u) + u * Phi'(u)

A ReLU's derivative is one bit. GELU's depends on all of `before`, so that is what is kept: M * F elements. hidden,
which dW2 needs, is not kept as well: the epilogue of dout W2 reads `before` anyway and writes hidden again, M * F
elements more in the backward pass for half the memory between the passes. The forward pass rounds `before` first and
computes hidden from what is stored, so that both passes have the same hidden, bit by bit.

Cost: as in feed_forward.py, and 2 * M * F elements more written: forward `before`, backward hidden. Where cuBLAS
computes the products, _activate and _gate, one pass each, do the rest.
Source: Hendrycks and Gimpel 2016; the approximation by tanh, section 2 there, is GPT-2's, the other one BERT's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CompileCase, kernel_case
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div, chip
from fasttfm.kernels.parameter import Float32Pointer, Int64Pointer, Pointer, Real, Size, Varying
from fasttfm.kernels.philox import dropout_arguments, keep_mask
from fasttfm.kernels.product import (
    bias_gradients,
    gate_launch,
    parts_for,
    places,
    product_launch,
    route_of,
    row_sums,
    tile_of_product,
)
from fasttfm.kernels.residual_add import tile as pass_tile
from fasttfm.kernels.scaled_product import scaled_linear, scaled_mm
from fasttfm.kernels.tiles.feed_forward import GATE, of_two_results, product_tile


@triton.jit
def _gelu(u, TANH: tl.constexpr):
    """gelu(u) and gelu'(u), all float32."""
    if TANH:
        square = u * u
        phi = 1.0 / (1.0 + tl.exp(u * (-1.5957691216057308 - 0.07135481282553182 * square)))
        slope = u * phi * (1.0 - phi) * (1.5957691216057308 + 0.21406443847659546 * square)
    else:
        phi = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)
        slope = u * tl.exp(-0.5 * u * u) * 0.3989422804014327
    return u * phi, phi + slope


@jit
def _forward(
    x: Pointer,  # (M, K)
    weight: Pointer,  # (N, K)
    bias: Pointer,  # (N,) or None
    before: Pointer,  # (M, N) out
    hidden: Pointer,  # (M, N) out
    seed: Int64Pointer,  # (1,) in device memory, so that a captured graph draws anew at each replay; None: no dropout
    site: Varying,
    threshold: Varying,
    M: Varying,
    N: Size,
    K: Size,
    TANH: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sizes = (M, N, K)
    tile_m, tile_n, _, _, value = tile_of_product(x, weight, sizes, True, EVEN_K, ROWS, COLUMNS, DEPTH, PRECISION)
    rows, columns, inside, offsets = places(tile_m, tile_n, sizes, ROWS, COLUMNS)
    if bias is not None:
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    rounded = value.to(before.dtype.element_ty)
    tl.store(before + offsets, rounded, mask=inside)
    value, _ = _gelu(rounded.to(tl.float32), TANH)
    if seed is not None:
        value = tl.where(keep_mask(tl.load(seed), site, 0, rows, tile_n * COLUMNS, threshold, COLUMNS), value, 0.0)
    tl.store(hidden + offsets, value.to(hidden.dtype.element_ty), mask=inside)


@jit
def _backward(
    dout: Pointer,  # (M, K)
    weight: Pointer,  # (K, N)
    before: Pointer,  # (M, N)
    dbefore: Pointer,  # (M, N) out
    hidden: Pointer,  # (M, N) out
    parts: Float32Pointer,  # (tiles of rows, N) out, what each adds to the first bias's gradient; None: nobody wants it
    parts2: Float32Pointer,  # (tiles of rows, K) out, likewise the second bias's, the sum of dout; None likewise
    seed: Int64Pointer,  # (1,) or None
    site: Varying,
    threshold: Varying,
    scale: Real,
    M: Varying,
    N: Size,
    K: Size,
    TANH: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sizes = (M, N, K)
    tile_m, tile_n, _, _, value = tile_of_product(dout, weight, sizes, False, EVEN_K, ROWS, COLUMNS, DEPTH, PRECISION)
    rows, columns, inside, offsets = places(tile_m, tile_n, sizes, ROWS, COLUMNS)
    activated, slope = _gelu(tl.load(before + offsets, mask=inside, other=0.0).to(tl.float32), TANH)
    value = value * scale * slope
    if seed is not None:
        keep = keep_mask(tl.load(seed), site, 0, rows, tile_n * COLUMNS, threshold, COLUMNS)
        activated, value = tl.where(keep, activated, 0.0), tl.where(keep, value, 0.0)
    tl.store(hidden + offsets, activated.to(hidden.dtype.element_ty), mask=inside)
    tl.store(dbefore + offsets, value.to(dbefore.dtype.element_ty), mask=inside)
    if parts is not None:  # rows past the last one are of zeros, dout being
        tl.store(parts + tile_m.to(tl.int64) * N + columns, tl.sum(value, axis=0), mask=columns < N)
    if parts2 is not None:  # noqa: SIM102 (the outer one is decided when compiling, the inner one when running)
        if tile_n == 0:  # dout's rows are in the cache now
            row_sums(dout, parts2 + tile_m.to(tl.int64) * K, rows, M, K, DEPTH)


@jit
def _activate(
    before: Pointer,  # (M, N)
    hidden: Pointer,  # (M, N) out
    seed: Int64Pointer,  # (1,) or None
    site: Varying,
    threshold: Varying,
    M: Varying,
    N: Size,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What _forward's epilogue does, for a product that cuBLAS left in memory."""
    tile_n = tl.program_id(1)
    rows, _, inside, offsets = places(tl.program_id(0), tile_n, (M, N, N), ROWS, COLUMNS)
    value, _ = _gelu(tl.load(before + offsets, mask=inside, other=0.0).to(tl.float32), TANH)
    if seed is not None:
        value = tl.where(keep_mask(tl.load(seed), site, 0, rows, tile_n * COLUMNS, threshold, COLUMNS), value, 0.0)
    tl.store(hidden + offsets, value.to(hidden.dtype.element_ty), mask=inside)


@jit
def _gate(
    dhidden: Pointer,  # (M, N) in and out: the product, then the gradient before GELU
    before: Pointer,  # (M, N)
    hidden: Pointer,  # (M, N) out
    parts: Float32Pointer,  # (programs along rows, N) out, or None
    seed: Int64Pointer,  # (1,) or None
    site: Varying,
    threshold: Varying,
    M: Varying,
    N: Size,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What _backward's epilogue does, likewise."""
    tile_n = tl.program_id(0)
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(1)):
        rows, _, inside, offsets = places(tile, tile_n, (M, N, N), ROWS, COLUMNS)
        activated, slope = _gelu(tl.load(before + offsets, mask=inside, other=0.0).to(tl.float32), TANH)
        value = tl.load(dhidden + offsets, mask=inside, other=0.0).to(tl.float32) * slope
        if seed is not None:
            keep = keep_mask(tl.load(seed), site, 0, rows, tile_n * COLUMNS, threshold, COLUMNS)
            activated, value = tl.where(keep, activated, 0.0), tl.where(keep, value, 0.0)
        tl.store(hidden + offsets, activated.to(hidden.dtype.element_ty), mask=inside)
        tl.store(dhidden + offsets, value.to(dhidden.dtype.element_ty), mask=inside)
        total += value
    if parts is not None:
        tl.store(parts + program * N + columns, tl.sum(total, axis=0), mask=columns < N)


# --------------------------------------------------------------------------------------------------------- launches


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    tanh: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    route: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x (M, N) contiguous; weights and biases of any strides, of one dtype with x.

    route fused or cublas; None takes what the table says. Returns out (M, N') and what GELU is applied to, (M, F).
    """
    seed, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
    if (route or route_of("forward+gelu", x.dtype, x.device)) == "fused":
        (M, K), N = x.shape, weight1.shape[0]
        before = torch.empty(M, N, dtype=x.dtype, device=x.device)
        hidden = torch.empty_like(before)
        if M:
            grid, options = product_launch(x.dtype, x.device, M, N, K)
            weight, bias = weight1.contiguous(), None if bias1 is None else bias1.contiguous()
            _forward[grid](
                x, weight, bias, before, hidden, seed, site, threshold, M, N, K, TANH=tanh, **options
            )  # fmt: skip
    else:
        before = torch.nn.functional.linear(x, weight1, bias1)
        hidden = _run_activate(before, seed, site, threshold, tanh)
    return scaled_linear(hidden, weight2, bias2, scale), before


def _run_activate(before: Tensor, seed: Tensor | None, site: int, threshold: int, tanh: bool) -> Tensor:
    hidden = torch.empty_like(before)
    M, N = before.shape
    if M:
        tile = pass_tile(chip(before.device), N)
        _activate[(ceil_div(M, tile.rows), ceil_div(N, tile.columns))](
            before, hidden, seed, site, threshold, M, N,
            TANH=tanh, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=1,
        )  # fmt: skip
    return hidden


def feed_forward_backward(
    dout: Tensor,
    x: Tensor,
    before: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    *,
    bias1: bool,
    bias2: bool,
    tanh: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    route: str | None = None,
    in_parts: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dout (M, N') contiguous; before as feed_forward() returned it; bias1, bias2: whether to return theirs.

    Returns dx, dweight1, dbias1, dweight2, dbias2, a bias gradient that was not asked for being empty. in_parts: that
    of bias1 comes as (sum_programs(), F) float32, which are still to be added up.
    """
    seed, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
    (M, N), K = before.shape, dout.shape[1]
    hidden = torch.empty_like(before)
    if (route or route_of("backward", x.dtype, x.device)) == "fused":
        dbefore = torch.empty_like(before)
        grid, options = product_launch(dout.dtype, dout.device, M, N, K, two_results=True)
        tiles = ceil_div(M, options["ROWS"])
        parts1, parts2 = parts_for(dout, tiles, N, bias1), parts_for(dout, tiles, K, bias2)
        if M:
            _backward[grid](
                dout, weight2.contiguous(), before, dbefore, hidden, parts1, parts2, seed, site, threshold, scale,
                M, N, K, TANH=tanh, **options,
            )  # fmt: skip
        dbias1, dbias2 = bias_gradients(dout, parts1, parts2, in_parts)
    else:
        dbefore = scaled_mm(dout, weight2, scale)
        dbias1 = _run_gate(dbefore, before, hidden, seed, site, threshold, tanh, bias1, in_parts)
        dbias2 = dout.sum(0) if bias2 else dout.new_empty(0)
    return (
        torch.mm(dbefore, weight1),
        torch.mm(dbefore.t(), x),
        dbias1,
        scaled_mm(dout.t(), hidden, scale),
        dbias2,
    )


def _run_gate(
    dhidden: Tensor,
    before: Tensor,
    hidden: Tensor,
    seed: Tensor | None,
    site: int,
    threshold: int,
    tanh: bool,
    bias: bool,
    in_parts: bool,
) -> Tensor:
    """Makes dhidden the gradient before GELU and writes hidden; returns the first bias's gradient."""
    M, N = dhidden.shape
    tile, programs = gate_launch(dhidden)
    parts = parts_for(dhidden, programs, N, bias)
    if M:
        _gate[(ceil_div(N, tile.columns), programs)](
            dhidden, before, hidden, parts, seed, site, threshold, M, N,
            TANH=tanh, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=1,
        )  # fmt: skip
    return bias_gradients(dhidden, parts, None, in_parts)[0]


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships, for every kind of product, with dropout; the lighter variants in bfloat16."""
    for kind in ("fp32", "tf32", "fp16", "bf16"):
        if kind == "tf32" and chip.capability < 80:
            continue
        small, large = (product_tile.shipped(chip, kind, size) for size in ("small", "large"))
        even: dict[str, Any] = {"EVEN_K": True, "PRECISION": "tf32" if kind == "tf32" else "ieee", "TANH": False}
        for tile in dict.fromkeys((small, large)):
            yield kernel_case(_forward, "gelu_feed_forward.forward/erf+dropout", kind, tile, given=even)
        for tile in dict.fromkeys(map(of_two_results, (small, large))):
            yield kernel_case(_backward, "gelu_feed_forward.backward/erf+dropout", kind, tile, given=even)
        if kind == "bf16":
            for name, given in (("tanh+dropout", even | {"TANH": True}), ("erf", even | {"seed": None})):
                yield kernel_case(_forward, f"gelu_feed_forward.forward/{name}", kind, large, given=given)
                tile = of_two_results(large)
                yield kernel_case(_backward, f"gelu_feed_forward.backward/{name}", kind, tile, given=given)
            odd = even | {"EVEN_K": False, "K": "i32"}
            yield kernel_case(_forward, "gelu_feed_forward.forward/erf+dropout+odd-depth", kind, small, given=odd)
    for dtype in ("fp32", "fp16", "bf16"):
        for N in (128, 256, 512) if dtype == "bf16" else (512,):
            given = {"TANH": False}
            yield kernel_case(_activate, "gelu_feed_forward.activate/erf", dtype, pass_tile(chip, N), given=given)
        yield kernel_case(_gate, "gelu_feed_forward.gate/erf", dtype, GATE(chip), given={"TANH": False})
