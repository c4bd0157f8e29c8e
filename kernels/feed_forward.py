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
chip's matrix units are out of Triton's reach (feed_forward_tile.py), cuBLAS computes the products, and _gate, one pass,
does the rest.
Source: Vaswani et al. 2017, equation 2; dropout on the hidden activation, tensor2tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.feed_forward_tile import ProductTile, epilogue_route, gate_tile, product_tile, size_class
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div, chip, interpreted, product_kind
from fasttfm.kernels.partial_sums import add_parts
from fasttfm.kernels.philox import dropout_arguments, keep_mask
from fasttfm.kernels.residual_add import drop_
from fasttfm.kernels.row_tile import RowTile, row_case


@triton.jit
def _place(M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Row tile and column tile of this program: GROUP row tiles at a time, so that the second-level cache serves b."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, ROWS)
    tiles_n = tl.cdiv(N, COLUMNS)
    group = program // (GROUP * tiles_n)
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def _product(
    a,  # (M, K)
    b,  # (K, N), or (N, K) when B_TRANSPOSED
    rows,
    columns,
    M,
    N,
    K,
    B_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The (ROWS, COLUMNS) tile of a b in float32."""
    depth = tl.arange(0, DEPTH)
    row_inside = (rows < M)[:, None]
    column_inside = (columns < N)[None, :]
    a_at = a + rows.to(tl.int64)[:, None] * K + depth[None, :]
    if B_TRANSPOSED:
        b_at = b + columns[None, :] * K + depth[:, None]
    else:
        b_at = b + depth[:, None] * N + columns[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN_K:
            left = tl.load(a_at, mask=row_inside, other=0.0)
            right = tl.load(b_at, mask=column_inside, other=0.0)
        else:
            depth_inside = start + depth < K
            left = tl.load(a_at, mask=row_inside & depth_inside[None, :], other=0.0)
            right = tl.load(b_at, mask=column_inside & depth_inside[:, None], other=0.0)
        if UPCAST:  # the interpreter's tl.dot is wrong for bfloat16
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        a_at += DEPTH
        b_at += DEPTH if B_TRANSPOSED else DEPTH * N
    return total


@jit(do_not_specialize=["stream", "threshold", "M"])
def _forward(
    x,  # (M, K)
    weight,  # (N, K)
    bias,  # (N,) or None
    hidden,  # (M, N) out
    bits,  # (M, ceil(N / 32)) int32 out: bit j of word w tells whether hidden[:, 32 w + j] is open
    seed,  # (1,) int64 in device memory, so that a captured graph draws anew at each replay; None: no dropout
    stream,
    threshold,
    M,
    N,
    K,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile_m, tile_n = _place(M, N, ROWS, COLUMNS, GROUP)
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    value = _product(
        x, weight, rows, columns, M, N, K, True, EVEN_K, ROWS, COLUMNS, DEPTH, PRECISION, UPCAST
    )  # fmt: skip
    if bias is not None:
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    rounded = value.to(hidden.dtype.element_ty)
    shut = rounded.to(tl.float32) <= 0.0  # a NaN is open: it must show
    if seed is not None:
        shut = shut | (keep_mask(tl.load(seed), stream, 0, rows, tile_n * COLUMNS, threshold, COLUMNS) == 0)
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


@jit(do_not_specialize=["M"])
def _backward(
    dout,  # (M, K)
    weight,  # (K, N)
    hidden,  # (M, N), whose sign tells what is open; None: bits do
    bits,  # (M, ceil(N / 32)) int32, or None
    dhidden,  # (M, N) out
    parts,  # (tiles of rows, N) float32 out, what each adds to the first bias's gradient; None: nobody wants it
    parts2,  # (tiles of rows, K) float32 out, likewise the second bias's, the sum of dout; None likewise
    scale,
    M,
    N,
    K,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile_m, tile_n = _place(M, N, ROWS, COLUMNS, GROUP)
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    value = _product(
        dout, weight, rows, columns, M, N, K, False, EVEN_K, ROWS, COLUMNS, DEPTH, PRECISION, UPCAST
    )  # fmt: skip
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    if bits is not None:
        words = tile_n * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
        W = tl.cdiv(N, 32)
        at = bits + rows.to(tl.int64)[:, None] * W + words[None, :]
        word = tl.load(at, mask=(rows < M)[:, None] & (words < W)[None, :], other=0)
        lanes = tl.arange(0, 32)[None, None, :]
        opened = tl.reshape((word[:, :, None] >> lanes) & 1, (ROWS, COLUMNS)) != 0
    else:
        opened = (tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32) <= 0.0) == 0
    value = tl.where(opened & inside, value * scale, 0.0)
    tl.store(dhidden + offsets, value.to(dhidden.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + tile_m * N + columns, tl.sum(value, axis=0), mask=columns < N)
    if parts2 is not None:  # noqa: SIM102 (the outer one is decided when compiling, the inner one when running)
        if tile_n == 0:  # dout's rows are in the cache now
            _row_sums(dout, parts2 + tile_m * K, rows, M, K, DEPTH)


@triton.jit
def _row_sums(
    a,  # (M, K)
    out,  # (K,) float32 out
    rows,
    M,
    K,
    DEPTH: tl.constexpr,
):
    """The sum of these rows."""
    for start in range(0, K, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = (rows < M)[:, None] & (depth < K)[None, :]
        part = tl.load(a + rows.to(tl.int64)[:, None] * K + depth[None, :], mask=inside, other=0.0)
        tl.store(out + depth, tl.sum(part.to(tl.float32), axis=0), mask=depth < K)


@jit(do_not_specialize=["M"])
def _gate(
    dhidden,  # (M, N) in and out: the product, then the gradient before the ReLU
    hidden,  # (M, N)
    parts,  # (programs along rows, N) float32 out, or None
    M,
    N,
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


def feed_forward(x, weight1, bias1, weight2, bias2, *, dropout_p=0.0, seed=None, stream=0, route=None):
    """x (M, N) contiguous; weights and biases of any strides, of one dtype with x.

    route fused or cublas; None takes what the table says. Returns out (M, N'), hidden (M, F) and, from the fused route,
    the bits (M, ceil(F / 32)) int32, else an empty tensor.
    """
    seed, threshold, scale = dropout_arguments(dropout_p, seed)
    if (route or forward_route(x, seed is not None)) == "fused":
        hidden, bits = _fused_forward(x, weight1, bias1, seed, stream, threshold)
    else:
        hidden, bits = _cublas_forward(x, weight1, bias1), x.new_empty(0, dtype=torch.int32)
        if seed is not None:
            drop_(hidden, seed, stream, threshold)
    return scaled_linear(hidden, weight2, bias2, scale), hidden, bits


def forward_route(x, dropped):
    """fused or cublas, as the table has it for this tensor's chip and dtype."""
    here = chip(x.device)
    return epilogue_route(here, product_kind(x.dtype, here), "forward+dropout" if dropped else "forward")


def _fused_forward(x, weight, bias, seed, stream, threshold):
    (M, K), N = x.shape, weight.shape[0]
    hidden = torch.empty(M, N, dtype=x.dtype, device=x.device)
    bits = torch.empty(M, ceil_div(N, 32), dtype=torch.int32, device=x.device)
    if M:
        grid, options = _launch(x.dtype, x.device, M, N, K)
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        _forward[grid](x, weight, bias, hidden, bits, seed, stream, threshold, M, N, K, **options)
    return hidden, bits


def _launch(dtype, device, M, N, K):
    here = chip(device)
    kind = product_kind(dtype, here)
    to = product_tile(here, kind, size_class(here, M, N, K))
    return (ceil_div(M, to.rows) * ceil_div(N, to.columns),), {
        "EVEN_K": K % to.depth == 0,
        "ROWS": to.rows,
        "COLUMNS": to.columns,
        "DEPTH": to.depth,
        "GROUP": 8,
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
        "UPCAST": interpreted() and kind == "bf16",
        "num_warps": to.warps,
        "num_stages": to.stages,
    }


def _cublas_forward(x, weight, bias):
    """max(0, x weight^T + bias), bias and ReLU in cuBLASLt's epilogue."""
    if bias is None:
        return torch.mm(x, weight.t()).relu_()
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=False)


def _backward_route(dtype, device):
    """fused or cublas, as the table has it."""
    here = chip(device)
    return epilogue_route(here, product_kind(dtype, here), "backward")


def sum_programs(M, hidden, out, dtype, device, route=None):
    """Into how many parts a backward pass over x (M, N) sums the gradient of bias1; hidden and out: F and N'."""
    if (route or _backward_route(dtype, device)) == "fused":
        return ceil_div(M, _launch(dtype, device, M, hidden, out)[1]["ROWS"])
    to = gate_tile(chip(device))
    return min(ceil_div(M, to.rows), to.shares)


def feed_forward_backward(
    dout, x, hidden, bits, weight1, weight2, *, bias1, bias2, scale=1.0, route=None, in_parts=False
):
    """dout (M, N') contiguous; hidden and bits as feed_forward returned them; bias1, bias2: whether to return theirs.

    Returns dx, dweight1, dbias1, dweight2, dbias2, a bias gradient that was not asked for being empty. in_parts: that
    of bias1 comes as (sum_programs(), F) float32, which are still to be added up.
    """
    if (route or _backward_route(x.dtype, x.device)) == "fused":
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


def _fused_backward(dout, hidden, bits, weight, bias1, bias2, scale, in_parts):
    (M, K), N = dout.shape, weight.shape[1]
    dhidden = torch.empty_like(hidden)
    grid, options = _launch(dout.dtype, dout.device, M, N, K)
    tiles = ceil_div(M, options["ROWS"])
    parts1, dbias1 = _partial_sums(dout, tiles, N, bias1)
    parts2, dbias2 = _partial_sums(dout, tiles, K, bias2)
    if M:
        has_bits = bits.numel() > 0
        _backward[grid](
            dout, weight.contiguous(), None if has_bits else hidden, bits if has_bits else None, dhidden,
            parts1, parts2, scale, M, N, K, **options,
        )  # fmt: skip
    if in_parts:
        dbias1, parts1 = parts1, None
    add_parts([pair for pair in ((parts1, dbias1), (parts2, dbias2)) if pair[0] is not None])
    return dhidden, dbias1, dbias2


def _partial_sums(like, programs, N, wanted):
    """Room for a bias gradient's parts (programs, N) float32, and for their sum; None and nothing unless wanted."""
    if not wanted:
        return None, like.new_empty(0)
    return torch.empty(programs, N, dtype=torch.float32, device=like.device), like.new_empty(N)


def _run_gate(dhidden, hidden, bias, in_parts):
    M, N = dhidden.shape
    to = gate_tile(chip(dhidden.device))
    shares = min(ceil_div(M, to.rows), to.shares)
    parts, dbias = _partial_sums(dhidden, shares, N, bias)
    if M:
        _gate[(ceil_div(N, to.columns), shares)](
            dhidden, hidden, parts, M, N, ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=1
        )
    if in_parts:
        return parts
    if parts is not None:
        add_parts([(parts, dbias)])
    return dbias


def scaled_mm(a, b, scale):
    """scale * a b, the scale inside the product."""
    return torch.mm(a, b) if scale == 1.0 else torch.addmm(a.new_empty(1, 1), a, b, beta=0, alpha=scale)


def scaled_linear(x, weight, bias, scale):
    """scale * x weight^T + bias."""
    if scale == 1.0:
        return torch.nn.functional.linear(x, weight, bias)
    if bias is None:
        return scaled_mm(x, weight.t(), scale)
    return torch.addmm(bias, x, weight.t(), alpha=scale)


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships, for every kind of product; the lighter variants in bfloat16."""
    kinds = ("fp32", "tf32", "fp16", "bf16") if chip.capability >= 80 else ("fp32", "fp16", "bf16")
    for kind in kinds:
        for to in {product_tile.shipped(chip, kind, size): None for size in ("small", "large")}:
            yield from _product_cases(chip, kind, to, ("forward/dropout", "backward/bits"))
            if kind == "bf16":
                yield from _product_cases(chip, kind, to, ("forward/plain", "backward/sign"))
        small = product_tile.shipped(chip, kind, "small")
        yield from _product_cases(chip, kind, small, ("forward/dropout+odd-depth",))
    for dtype in ("fp32", "bf16"):
        to = gate_tile(chip)
        arguments = {"dhidden": f"*{dtype}", "hidden": f"*{dtype}", "parts": "*fp32", "M": "i32"}
        yield row_case(_gate, "feed_forward.gate", dtype, RowTile(to.rows, to.columns, to.warps), arguments)


def _product_cases(chip: Chip, kind: str, to: ProductTile, variants: Sequence[str]) -> Iterator[CompileCase]:
    dtype = "fp32" if kind == "tf32" else kind
    shared = {
        "bits": "*i32",
        "M": "i32",
        "N": "i32:16",
        "K": "i32:16",
        "EVEN_K": True,
        "ROWS": to.rows,
        "COLUMNS": to.columns,
        "DEPTH": to.depth,
        "GROUP": 8,
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
        "UPCAST": False,
    }
    forward = {"x": f"*{dtype}", "weight": f"*{dtype}", "bias": f"*{dtype}", "hidden": f"*{dtype}"}
    forward |= {"seed": "*i64", "stream": "i32", "threshold": "i32"}
    backward = {"dout": f"*{dtype}", "weight": f"*{dtype}", "hidden": None, "dhidden": f"*{dtype}"}
    backward |= {"parts": "*fp32", "parts2": "*fp32", "scale": "fp32"}
    every = {
        "forward/dropout": (_forward, {**forward, **shared}),
        "forward/plain": (_forward, {**forward, **shared, "seed": None}),
        "forward/dropout+odd-depth": (_forward, {**forward, **shared, "K": "i32", "EVEN_K": False}),
        "backward/bits": (_backward, {**backward, **shared}),
        "backward/sign": (_backward, {**backward, **shared, "bits": None, "hidden": f"*{dtype}"}),
    }
    for variant in variants:
        kernel, arguments = every[variant]
        yield CompileCase(
            kernel=kernel,
            name=f"feed_forward.{variant}/{to.rows}x{to.columns}x{to.depth}w{to.warps}s{to.stages}",
            dtype=kind,
            arguments=arguments,
            num_warps=to.warps,
            num_stages=to.stages,
            matrix_product=True,
        )
