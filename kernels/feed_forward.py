"""The feed-forward network's two hidden products with everything between them fused into their epilogues.

    forward     hidden = keep * max(0, x W1^T + b1)          out = scale * hidden W2^T + b2
    backward    dhidden = open * scale * (dout W2)           db1, db2 = sums over rows of dhidden and dout
                dW2 = scale * dout^T hidden, dx = dhidden W1, dW1 = dhidden^T x: plain products, left to cuBLAS

keep is dropout's mask (M, F), scale its 1 / (1 - p), which rides in the products as a factor. open is the one mask
that backward needs: the ReLU was positive and dropout kept. The forward kernel writes it as bits, M * F / 8 bytes: an
eighth of a bool mask, and a sixteenth of what reading half-precision hidden for its sign costs. torch.nn keeps the
ReLU's output, the dropout mask and the dropped output, in half precision 5 bytes for each hidden element; here hidden
and the bits are kept, 2.125 bytes.

Cost: forward 2 * M * N * F FLOPs a product, backward twice that. The epilogues hide under the products and save the
separate passes over hidden, each of which reads and writes 2 * M * F elements: on an H200 (4.3 TB/s) 48 us at
M = 25,000, F = 2048 in half precision, for bias and ReLU, for dropout, and for the two of them in backward. Where a
chip's matrix units are out of Triton's reach (tiles/feed_forward.py), cuBLAS computes the products, and _gate, one
pass, does the rest.
Source: Vaswani et al. 2017, equation 2; dropout on the hidden activation, tensor2tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CompileCase, kernel_case
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Int32Pointer, Int64Pointer, Pointer, Real, Size, Varying
from fasttfm.kernels.philox import dropout_arguments, keep_mask
from fasttfm.kernels.product import (
    bias_gradients,
    gate_launch,
    parts_for,
    product_launch,
    route_of,
    row_sums,
    tile_of_product,
)
from fasttfm.kernels.residual_add import drop_
from fasttfm.kernels.scaled_product import scaled_linear, scaled_mm
from fasttfm.kernels.tiles.feed_forward import GATE, product_tile


@jit
def _forward(
    x: Pointer,  # (M, K)
    weight: Pointer,  # (N, K)
    bias: Pointer,  # (N,) or None
    hidden: Pointer,  # (M, N) out
    bits: Int32Pointer,  # (M, ceil(N / 32)) out: bit j of word w tells whether hidden[:, 32 w + j] is open
    seed: Int64Pointer,  # (1,) in device memory, so that a captured graph draws anew at each replay; None: no dropout
    site: Varying,
    threshold: Varying,
    M: Varying,
    N: Size,
    K: Size,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sizes = (M, N, K)
    _, tile_n, rows, columns, value = tile_of_product(x, weight, sizes, True, EVEN_K, ROWS, COLUMNS, DEPTH, PRECISION)
    if bias is not None:
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    rounded = value.to(hidden.dtype.element_ty)
    shut = rounded.to(tl.float32) <= 0.0  # a NaN is open: it must show
    if seed is not None:
        shut = shut | (keep_mask(tl.load(seed), site, 0, rows, tile_n * COLUMNS, threshold, COLUMNS) == 0)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    rounded = tl.where(shut, tl.zeros_like(rounded), rounded)
    tl.store(hidden + rows.to(tl.int64)[:, None] * N + columns[None, :], rounded, mask=inside)

    lanes = tl.arange(0, 32)[None, None, :]
    opened = tl.reshape((inside & (shut == 0)).to(tl.int32), (ROWS, COLUMNS // 32, 32)) << lanes
    words = tile_n * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    W = tl.cdiv(N, 32)
    tl.store(
        bits + rows.to(tl.int64)[:, None] * W + words[None, :],
        tl.sum(opened, axis=2),
        mask=(rows < M)[:, None] & (words < W)[None, :],
    )


@jit
def _backward(
    dout: Pointer,  # (M, K)
    weight: Pointer,  # (K, N)
    hidden: Pointer,  # (M, N), whose sign tells what is open; None: bits do
    bits: Int32Pointer,  # (M, ceil(N / 32)), or None
    dhidden: Pointer,  # (M, N) out
    parts: Float32Pointer,  # (tiles of rows, N) out, what each adds to the first bias's gradient; None: nobody wants it
    parts2: Float32Pointer,  # (tiles of rows, K) out, likewise the second bias's, the sum of dout; None likewise
    scale: Real,
    M: Varying,
    N: Size,
    K: Size,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sizes = (M, N, K)
    tile_m, tile_n, rows, columns, value = tile_of_product(
        dout, weight, sizes, False, EVEN_K, ROWS, COLUMNS, DEPTH, PRECISION
    )
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    if bits is not None:
        words = tile_n * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
        W = tl.cdiv(N, 32)
        word = tl.load(
            bits + rows.to(tl.int64)[:, None] * W + words[None, :],
            mask=(rows < M)[:, None] & (words < W)[None, :],
            other=0,
        )
        lanes = tl.arange(0, 32)[None, None, :]
        opened = tl.reshape((word[:, :, None] >> lanes) & 1, (ROWS, COLUMNS)) != 0
    else:
        opened = (tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32) <= 0.0) == 0
    value = tl.where(opened & inside, value * scale, 0.0)
    tl.store(dhidden + offsets, value.to(dhidden.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + tile_m.to(tl.int64) * N + columns, tl.sum(value, axis=0), mask=columns < N)
    if parts2 is not None:  # noqa: SIM102 (the outer one is decided when compiling, the inner one when running)
        if tile_n == 0:  # dout's rows are in the cache now
            row_sums(dout, parts2 + tile_m.to(tl.int64) * K, rows, M, K, DEPTH)


@jit
def _gate(
    dhidden: Pointer,  # (M, N) in and out: the product, then the gradient before the ReLU
    hidden: Pointer,  # (M, N)
    parts: Float32Pointer,  # (programs along rows, N) out, or None
    M: Varying,
    N: Size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What _backward's epilogue does, for a product that cuBLAS left in memory."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(1)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        shut = tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32) <= 0.0
        value = tl.load(dhidden + offsets, mask=inside, other=0.0)
        value = tl.where(shut, tl.zeros_like(value), value)
        tl.store(dhidden + offsets, value, mask=inside)
        total += value.to(tl.float32)
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
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    route: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) contiguous; weights and biases of any strides, of one dtype with x.

    route fused or cublas; None takes what the table says. Returns out (M, N'), hidden (M, F) and, from the fused route,
    the bits (M, ceil(F / 32)) int32, else an empty tensor.
    """
    seed, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
    if (route or forward_route(x, seed is not None)) == "fused":
        hidden, bits = _fused_forward(x, weight1, bias1, seed, site, threshold)
    else:
        hidden, bits = _cublas_forward(x, weight1, bias1), x.new_empty(0, dtype=torch.int32)
        if seed is not None:
            drop_(hidden, seed, site, threshold)
    return scaled_linear(hidden, weight2, bias2, scale), hidden, bits


def forward_route(x: Tensor, dropped: bool) -> str:
    """fused or cublas, as the table has it for this tensor's chip and dtype."""
    return route_of("forward+dropout" if dropped else "forward", x.dtype, x.device)


def _fused_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None, site: int, threshold: int
) -> tuple[Tensor, Tensor]:
    (M, K), N = x.shape, weight.shape[0]
    hidden = torch.empty(M, N, dtype=x.dtype, device=x.device)
    bits = torch.empty(M, ceil_div(N, 32), dtype=torch.int32, device=x.device)
    if M:
        grid, options = product_launch(x.dtype, x.device, M, N, K)
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        _forward[grid](x, weight, bias, hidden, bits, seed, site, threshold, M, N, K, **options)
    return hidden, bits


def _cublas_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """max(0, x weight^T + bias), bias and ReLU in cuBLASLt's epilogue."""
    if bias is None:
        return torch.mm(x, weight.t()).relu_()
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=False)


def feed_forward_backward(
    dout: Tensor,
    x: Tensor,
    hidden: Tensor,
    bits: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    *,
    bias1: bool,
    bias2: bool,
    scale: float = 1.0,
    route: str | None = None,
    in_parts: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dout (M, N') contiguous; hidden and bits as feed_forward returned them; bias1, bias2: whether to return theirs.

    Returns dx, dweight1, dbias1, dweight2, dbias2, a bias gradient that was not asked for being empty. in_parts: that
    of bias1 comes as (sum_programs(), F) float32, which are still to be added up.
    """
    if (route or route_of("backward", x.dtype, x.device)) == "fused":
        dhidden, dbias1, dbias2 = _fused_backward(dout, hidden, bits, weight2, bias1, bias2, scale, in_parts)
    else:
        dhidden = scaled_mm(dout, weight2, scale)
        dbias1 = _run_gate(dhidden, hidden, bias1, in_parts)
        dbias2 = dout.sum(0) if bias2 else dout.new_empty(0)
    return (
        torch.mm(dhidden, weight1),
        torch.mm(dhidden.t(), x),
        dbias1,
        scaled_mm(dout.t(), hidden, scale),
        dbias2,
    )


def _fused_backward(
    dout: Tensor,
    hidden: Tensor,
    bits: Tensor,
    weight: Tensor,
    bias1: bool,
    bias2: bool,
    scale: float,
    in_parts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (M, K), N = dout.shape, weight.shape[1]
    dhidden = torch.empty_like(hidden)
    grid, options = product_launch(dout.dtype, dout.device, M, N, K)
    tiles = ceil_div(M, options["ROWS"])
    parts1, parts2 = parts_for(dout, tiles, N, bias1), parts_for(dout, tiles, K, bias2)
    if M:
        has_bits = bits.numel() > 0
        _backward[grid](
            dout, weight.contiguous(), None if has_bits else hidden, bits if has_bits else None, dhidden,
            parts1, parts2, scale, M, N, K, **options,
        )  # fmt: skip
    return dhidden, *bias_gradients(dout, parts1, parts2, in_parts)


def _run_gate(dhidden: Tensor, hidden: Tensor, bias: bool, in_parts: bool) -> Tensor:
    M, N = dhidden.shape
    tile, programs = gate_launch(dhidden)
    parts = parts_for(dhidden, programs, N, bias)
    if M:
        _gate[(ceil_div(N, tile.columns), programs)](
            dhidden, hidden, parts, M, N, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=1
        )
    return bias_gradients(dhidden, parts, None, in_parts)[0]


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships, for every kind of product; the lighter variants in bfloat16."""
    for kind in ("fp32", "tf32", "fp16", "bf16"):
        if kind == "tf32" and chip.capability < 80:
            continue
        small, large = (product_tile.shipped(chip, kind, size) for size in ("small", "large"))
        even: dict[str, Any] = {
            "EVEN_K": True,
            "PRECISION": "tf32" if kind == "tf32" else "ieee",
        }
        for tile in dict.fromkeys((small, large)):
            yield kernel_case(_forward, "feed_forward.forward/dropout", kind, tile, given=even)
            yield kernel_case(_backward, "feed_forward.backward/bits", kind, tile, given=even | {"hidden": None})
            if kind == "bf16":
                yield kernel_case(_forward, "feed_forward.forward/plain", kind, tile, given=even | {"seed": None})
                yield kernel_case(_backward, "feed_forward.backward/sign", kind, tile, given=even | {"bits": None})
        odd = even | {"EVEN_K": False, "K": "i32"}
        yield kernel_case(_forward, "feed_forward.forward/dropout+odd-depth", kind, small, given=odd)
    for dtype in ("fp32", "fp16", "bf16"):
        yield kernel_case(_gate, "feed_forward.gate", dtype, GATE(chip))
