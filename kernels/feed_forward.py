"""The feed-forward network, with bias, activation and dropout fused into the epilogues of its matrix products.

    forward     before = x W1^T + b1        hidden = keep * f(before)               out = scale * hidden W2^T + b2
    backward    dbefore = keep * scale * f'(before) * (dout W2)     db1, db2 = sums over rows of dbefore and dout
                dW2 = scale * dout^T hidden, dx = dbefore W1, dW1 = dbefore^T x: plain cuBLAS products

keep is the dropout mask (M, F), scale its 1 / (1 - p), applied as a factor of the products. f is one of

    relu        f(u) = max(0, u)
    gelu        f(u) = u * Phi(u)           Phi(u) = (1 + erf(u / sqrt 2)) / 2
    gelu_tanh   f(u) = u * Phi(u)           Phi(u) = 1 / (1 + exp(-2 w)), w = sqrt(2 / pi) * (u + 0.044715 u^3), equal
                                            to (1 + tanh w) / 2 without cancellation
    silu        f(u) = u * Phi(u)           Phi(u) = 1 / (1 + exp(-u))
    but relu    f'(u) = Phi(u) + u * Phi'(u)

Backward of ReLU needs one bit per element, positive and kept by dropout: the forward kernel writes M * F bits, so it
saves 2.125 bytes per element for backward where torch.nn saves 5 in half precision. The others need `before`, which is
saved in place of hidden: the epilogue of dout W2 reads it anyway and recomputes hidden for dW2, at half the memory.
Forward computes hidden from the rounded `before`, so that hidden is bitwise the same in both passes.

Cost: forward 2 * M * N * F FLOPs per product, backward twice that. The epilogues overlap with the products and save
passes over hidden of 2 * M * F elements each, 48 us on an H200 (4.3 TB/s) at M = 25,000, F = 2048 in half precision:
bias and activation, dropout, and both in backward. `before` is 2 * M * F elements more. Where Triton cannot use matrix
units (tiles/feed_forward.py), cuBLAS computes the products, and _activate and _gate do the rest in one pass each.
Source: Vaswani et al. 2017, equation 2; dropout on the hidden activation, tensor2tensor. GELU and SiLU: Hendrycks and
Gimpel 2016; BERT uses the exact GELU, GPT-2 the tanh approximation of section 2, Marian SiLU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels import product
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip, product_kind
from fasttfm.kernels.parameter import Float32Pointer, Int32Pointer, Pointer, Shape
from fasttfm.kernels.partial_sums import Sums
from fasttfm.kernels.philox import Dropout, dropout_rate, lanes, lanes_exchanged, select
from fasttfm.kernels.product import BiasParts, ProductSizes
from fasttfm.kernels.residual_add import Add
from fasttfm.kernels.residual_add import tile as pass_tile
from fasttfm.kernels.scaled_product import scaled_linear, scaled_mm
from fasttfm.kernels.tiles.rows import COLUMN_SUMS


@triton.jit
def _activated(u, ACTIVATION: tl.constexpr):
    """Return f(u) and f'(u) in float32, for all but ReLU."""
    HALF: tl.constexpr = u.dtype.primitive_bitwidth == 16
    u = u.to(tl.float32)
    if ACTIVATION == "silu":
        phi = 1.0 / (1.0 + tl.exp(-u))
        slope = u * phi * (1.0 - phi)
    elif ACTIVATION == "gelu_tanh":
        square = u * u
        phi = 1.0 / (1.0 + tl.exp(u * (-1.5957691216057308 - 0.07135481282553182 * square)))
        slope = u * phi * (1.0 - phi) * (1.5957691216057308 + 0.21406443847659546 * square)
    else:
        # Phi(-a) = 2^p(a), because erf() is slower: it evaluates both of its ranges and selects every coefficient. p is
        # the minimax fit to Phi for a <= 5.6 and decreases beyond. The error of Phi is at most 5e-8, as with erf(). For
        # 16-bit u it is 6e-5 relative for a <= 3.5, 1e-4 relative up to 4 and 5e-9 absolute beyond: less than erf(),
        # rounded to float32, loses in the tail.
        a = tl.abs(u)
        if HALF:
            p = 0.006251474376767874 + a * -0.0003638874914031476
            p = -1.0 + a * (-1.150233507156372 + a * (-0.4620804190635681 + a * (-0.04968644678592682 + a * p)))
        else:
            p = -0.00018254847964271903 + a * (3.8620957639068365e-05 + a * -2.7720695925381733e-06)
            p = 0.007075469475239515 + a * (-0.0001458681799704209 + a * p)
            p = -1.0 + a * (-1.1511057615280151 + a * (-0.45920491218566895 + a * (-0.05250502750277519 + a * p)))
        tail = tl.exp2(p)
        phi = tl.where(u < 0.0, tail, 1.0 - tail)
        slope = u * tl.exp2(-1.3257480647361595 - 0.7213475204444817 * (u * u))
    return u * phi, phi + slope


@triton.jit
def _dropped(first, second, dropout, rows, first_column, COLUMNS: tl.constexpr, LOADED: tl.constexpr):
    """Zero what dropout drops in both, without scaling. LOADED: the tile was loaded, not computed by a product."""
    if dropout.seed is not None:
        if LOADED:
            lane = lanes_exchanged(tl.load(dropout.seed), dropout.site, 0, rows, first_column, COLUMNS)
        else:
            lane = lanes(tl.load(dropout.seed), dropout.site, 0, rows, first_column, COLUMNS)
        first, second = select(first, lane, dropout.threshold), select(second, lane, dropout.threshold)
    return first, second


@triton.jit
def _words(bits, rows, tile_n, M, N, COLUMNS: tl.constexpr):
    """Return the pointers to a tile's words of bits, and their mask."""
    words = tile_n * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    W = tl.cdiv(N, 32)
    return bits + rows.to(tl.int64)[:, None] * W + words[None, :], (rows < M)[:, None] & (words < W)[None, :]


@jit
def _forward(
    x: Pointer,  # (M, K)
    weight: Pointer,  # (N, K)
    bias: Pointer,  # (N,) or None
    before: Pointer,  # (M, N) out; None with ReLU
    hidden: Pointer,  # (M, N) out
    bits: Int32Pointer,  # (M, ceil(N / 32)) out: bit j of word w is 1 if hidden[:, 32 w + j] is open; or None
    sizes: ProductSizes,
    dropout: Dropout,
    ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, NEIGHBOURS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    M, N, _ = sizes
    _, tile_n, rows, columns, value = product.tile_of_product(
        x, weight, sizes, True, EVEN_K, NEIGHBOURS, ROWS, COLUMNS, DEPTH, PRECISION
    )
    if bias is not None:
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    rounded = value.to(hidden.dtype.element_ty)
    if ACTIVATION == "relu":
        shut = rounded.to(tl.float32) <= 0.0  # NaN is open, so that it propagates
        if dropout.seed is not None:
            lane = lanes(tl.load(dropout.seed), dropout.site, 0, rows, tile_n * COLUMNS, COLUMNS)
            shut = shut | (lane < dropout.threshold)
        # Columns past the last have value 0 and are shut; rows past the last store no word.
        bit = (1 << (tl.arange(0, COLUMNS) % 32))[None, :]
        opened = tl.reshape(tl.where(shut, 0, bit), (ROWS, COLUMNS // 32, 32))
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        rounded = tl.where(shut, tl.zeros_like(rounded), rounded)
        tl.store(hidden + rows.to(tl.int64)[:, None] * N + columns[None, :], rounded, mask=inside)
        words, words_inside = _words(bits, rows, tile_n, M, N, COLUMNS)
        tl.store(words, tl.sum(opened, axis=2), mask=words_inside)
    else:
        inside, offsets = product.tile_offsets(rows, columns, M, N)
        tl.store(before + offsets, rounded, mask=inside)
        value, _ = _activated(rounded, ACTIVATION)
        value, _ = _dropped(value, value, dropout, rows, tile_n * COLUMNS, COLUMNS, False)
        tl.store(hidden + offsets, value.to(hidden.dtype.element_ty), mask=inside)


@jit
def _backward(
    dout: Pointer,  # (M, K)
    weight: Pointer,  # (K, N)
    kept: Pointer,  # (M, N): before; with ReLU hidden, open unless <= 0, or None: use bits
    bits: Int32Pointer,  # (M, ceil(N / 32)), or None
    dbefore: Pointer,  # (M, N) out
    hidden: Pointer,  # (M, N) out; None with ReLU
    parts: BiasParts,
    sizes: ProductSizes,
    dropout: Dropout,
    ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    M, N, K = sizes
    tile_m, tile_n, rows, columns, value = product.tile_of_product(
        dout, weight, sizes, False, EVEN_K, False, ROWS, COLUMNS, DEPTH, PRECISION
    )
    inside, offsets = product.tile_offsets(rows, columns, M, N)
    if ACTIVATION == "relu":
        if bits is not None:
            words, words_inside = _words(bits, rows, tile_n, M, N, COLUMNS)
            word = tl.load(words, mask=words_inside, other=0)
            bit = tl.arange(0, 32)[None, None, :]
            opened = tl.reshape((word[:, :, None] >> bit) & 1, (ROWS, COLUMNS)) != 0
        else:
            opened = (tl.load(kept + offsets, mask=inside, other=0.0).to(tl.float32) <= 0.0) == 0
        value = tl.where(opened & inside, value * dropout.keep_scale, 0.0)
    else:
        activated, slope = _activated(tl.load(kept + offsets, mask=inside, other=0.0), ACTIVATION)
        value = value * dropout.keep_scale * slope
        activated, value = _dropped(activated, value, dropout, rows, tile_n * COLUMNS, COLUMNS, False)
        tl.store(hidden + offsets, activated.to(hidden.dtype.element_ty), mask=inside)
    tl.store(dbefore + offsets, value.to(dbefore.dtype.element_ty), mask=inside)
    if parts.first is not None:  # rows past the last are zero, like dout's
        tl.store(parts.first + tile_m.to(tl.int64) * N + columns, tl.sum(value, axis=0), mask=columns < N)
    if parts.second is not None:  # noqa: SIM102 (the outer condition is compile-time, the inner one is not)
        if tile_n == 0:  # dout's rows are in the cache now
            product.row_sums(dout, parts.second + tile_m.to(tl.int64) * K, rows, M, K, DEPTH)


@jit
def _activate(
    before: Pointer,  # (M, N)
    hidden: Pointer,  # (M, N) out
    dropout: Dropout,
    shape: Shape,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply _forward's epilogue with GELU to a product that cuBLAS left in memory."""
    M, N = shape
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    begin = tl.program_id(0).to(tl.int64) * ROWS * N  # 64-bit start of the tile: offsets within it fit 32 bits
    before += begin
    hidden += begin
    offsets = tl.arange(0, ROWS)[:, None] * N + columns[None, :]
    value, _ = _activated(tl.load(before + offsets, mask=inside, other=0.0), ACTIVATION)
    value = value.to(hidden.dtype.element_ty)
    value, _ = _dropped(value, value, dropout, rows, first_column, COLUMNS, True)
    tl.store(hidden + offsets, value, mask=inside)


@jit
def _gate(
    dhidden: Pointer,  # (M, N) in and out: the product, then the gradient before the activation
    kept: Pointer,  # (M, N): before; with ReLU hidden, open unless <= 0
    hidden: Pointer,  # (M, N) out; None with ReLU
    parts: Float32Pointer,  # (programs along rows, N) out, or None
    dropout: Dropout,
    shape: Shape,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply _backward's epilogue to a product that cuBLAS left in memory."""
    M, N = shape
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    program = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(1)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside, offsets = product.tile_offsets(rows, columns, M, N)
        kept_value = tl.load(kept + offsets, mask=inside, other=0.0)
        if ACTIVATION == "relu":
            value = tl.load(dhidden + offsets, mask=inside, other=0.0)
            value = tl.where(kept_value.to(tl.float32) <= 0.0, tl.zeros_like(value), value)
        else:
            activated, slope = _activated(kept_value, ACTIVATION)
            value = tl.load(dhidden + offsets, mask=inside, other=0.0).to(tl.float32) * slope
            activated = activated.to(hidden.dtype.element_ty)
            activated, value = _dropped(activated, value, dropout, rows, first_column, COLUMNS, True)
            tl.store(hidden + offsets, activated, mask=inside)
        tl.store(dhidden + offsets, value.to(dhidden.dtype.element_ty), mask=inside)
        total += value.to(tl.float32)
    if parts is not None:
        tl.store(parts + program * N + columns, tl.sum(total, axis=0), mask=columns < N)


class Forward:
    """The forward pass for one signature: x (..., K) contiguous, parameters with any strides, all of one dtype."""

    def __init__(
        self, x: Tensor, weight1: Tensor, weight2: Tensor, *, activation: str = "relu", dropout_p: float = 0.0,
        route: str = "table",
    ) -> None:  # fmt: skip
        """activation: relu, gelu, gelu_tanh or silu; route: fused, cublas or table (ROUTE)."""
        (N, K), device = weight1.shape, chip(x.device)
        M = math.prod(x.shape[:-1])
        self.rows, self.hidden, self.out = (M, K), (M, N), (*x.shape[:-1], len(weight2))
        self.relu, self.dropout = activation == "relu", dropout_rate(dropout_p)
        self.numbers: Shape | ProductSizes = Shape(M, N)
        self.fused = forward_route(x, activation, self.dropout[0] > 0, route) == "fused"
        if self.fused:
            self.numbers = ProductSizes(M, N, K)
            grid, options = product.product_launch(x.dtype, x.device, M, N, K)
            options["NEIGHBOURS"] = product.needs_neighbours(device, product_kind(x.dtype, device))
        else:
            block = pass_tile(device, N)
            grid, options = (ceil_div(M, block.rows), ceil_div(N, block.columns)), block.options()
        self.launch = Launch(_forward if self.fused else _activate, grid, {"ACTIVATION": activation, **options})
        self.drop = Add((M, N), x.device, dropout_p, scaled=False) if self.dropout[0] else None  # for cublas and ReLU

    def __call__(
        self, x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None,
        seed: Tensor | None = None, site: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Return out (..., N'); the tensor (M, F) saved for backward, hidden for ReLU and `before` for GELU; and the
        bits (M, ceil(F / 32)) int32 for ReLU by the fused route, else None."""
        x, dropout, bits = x.view(self.rows), (seed, site, *self.dropout), None
        if self.fused:
            hidden = kept = x.new_empty(self.hidden)
            if self.relu:
                bits = x.new_empty((len(x), ceil_div(self.hidden[1], 32)), dtype=torch.int32)
            else:
                kept = torch.empty_like(hidden)
            weight1, bias1 = weight1.contiguous(), None if bias1 is None else bias1.contiguous()
            self.launch(x, weight1, bias1, None if self.relu else kept, hidden, bits, self.numbers, dropout)
        elif self.relu:  # bias and ReLU in the epilogue of cuBLASLt
            if bias1 is None:
                hidden = kept = torch.mm(x, weight1.t()).relu_()
            else:
                hidden = kept = torch._addmm_activation(bias1, x, weight1.t(), use_gelu=False)
            if self.drop is not None:
                self.drop(hidden, None, hidden, seed, site)
        else:
            kept = torch.nn.functional.linear(x, weight1, bias1)
            hidden = torch.empty_like(kept)
            self.launch(kept, hidden, dropout, self.numbers)
        out = scaled_linear(hidden, weight2, bias2, self.dropout[1])
        return out.view(self.out).detach(), kept, bits  # autograd outputs must not be views


def forward_route(x: Tensor, activation: str, dropped: bool, route: str) -> str:
    """Return the route of the forward pass, fused or cublas; route: as for Forward."""
    which = "forward+gelu" if activation != "relu" else "forward+dropout" if dropped else "forward"
    return product.route_of(which, x.dtype, x.device, route)


class Backward:
    """The backward pass for one signature: dout (..., N') and x contiguous."""

    def __init__(
        self, x: Tensor, kept: Tensor, bits: Tensor | None, weight2: Tensor, *, bias1: bool, bias2: bool,
        activation: str = "relu", dropout_p: float = 0.0, route: str = "table",
    ) -> None:  # fmt: skip
        """kept and bits of Forward, other arguments as there. bias1, bias2: whether to return their gradients."""
        (M, N), K, device = kept.shape, len(weight2), chip(x.device)
        self.x, self.rows, self.dout = x.shape, (M, x.shape[-1]), (M, K)
        self.relu, self.dropout = activation == "relu", dropout_rate(dropout_p)
        self.numbers: Shape | ProductSizes = Shape(M, N)
        which = "backward+gelu" if not self.relu else "backward" if bits is None else "backward+bits"
        self.fused = product.route_of(which, x.dtype, x.device, route) == "fused"
        if self.fused:
            self.numbers = ProductSizes(M, N, K)
            grid, options = product.product_launch(x.dtype, x.device, M, N, K, two_results=not self.relu)
            programs = ceil_div(M, options["ROWS"])
        else:
            block = COLUMN_SUMS(device)
            programs = product.gate_programs(device, M)
            grid, options = (ceil_div(N, block.columns), programs), block.options()
        self.launch = Launch(_backward if self.fused else _gate, grid, {"ACTIVATION": activation, **options})
        self.bias2 = bias2
        self.parts = (programs, N) if bias1 else None, (programs, K) if bias2 and self.fused else None
        shapes = {i: shape for i, shape in enumerate(self.parts) if shape}
        self.sums = Sums([*shapes], [*shapes.values()], [x.dtype] * len(shapes), device)

    def __call__(
        self, dout: Tensor, x: Tensor, kept: Tensor, bits: Tensor | None, weight1: Tensor, weight2: Tensor,
        seed: Tensor | None = None, site: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """Return dx, dweight1, dbias1, dweight2, dbias2; bias gradients are None unless requested."""
        dout, x, scale = dout.view(self.dout), x.view(self.rows), self.dropout[1]
        hidden = None if self.relu else torch.empty_like(kept)
        dropout = None if self.relu else seed, site, *self.dropout  # hidden or bits already hold ReLU's keep-mask
        parts = tuple([shape and kept.new_empty(shape, dtype=torch.float32) for shape in self.parts])
        if self.fused:
            dbefore, sign = torch.empty_like(kept), kept if bits is None else None
            self.launch(dout, weight2.contiguous(), sign, bits, dbefore, hidden, parts, self.numbers, dropout)
        else:
            dbefore = scaled_mm(dout, weight2, scale)
            self.launch(dbefore, kept, hidden, parts[0], dropout, self.numbers)
        biases = self.sums(parts)
        if self.bias2 and not self.fused:
            biases[1] = dout.sum(0)
        dx, dweight1 = torch.mm(dbefore, weight1), torch.mm(dbefore.t(), x)
        dweight2 = scaled_mm(dout.t(), kept if hidden is None else hidden, scale)
        return dx.view(self.x).detach(), dweight1, biases[0], dweight2, biases[1]
