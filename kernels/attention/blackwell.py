"""Attention forward for long rows on sm_100, in Gluon: attention/hopper/forward.py with products by tcgen05.

Scores, weights and output accumulator are in tensor memory. A work item is 256 queries of a head, 128 per worker, a
thread per row: row sums need no shuffles. A worker issues its own products; a step, over key tiles t from the last to
the first, is

    load S(t)   start S(t - 1) = Q K(t - 1)^T   P(t) from S(t)   wait for O   O *= fade   start O += P(t) V(t)

so that the tensor core computes S(t - 1), and the other worker's products, during the exponentials. FlashAttention-4
has further warps issue the products and rescale O, which it rarely does. Compiled and executed on a CPU; not run on a
GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import jit as device
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fasttfm.kernels.attention.hopper import forward as hopper
from fasttfm.kernels.attention.hopper import steps
from fasttfm.kernels.attention.hopper.rule import Persistent
from fasttfm.kernels.attention.hopper.steps import Origins
from fasttfm.kernels.attention.launch import Call
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.gluon import jit
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, TensorMap, Varying
from fasttfm.kernels.tiles.table import Tile


class Memory(NamedTuple):
    """Tensor memory of a worker, and mbarriers that end the products into it."""

    scores: Any
    """(128, COLUMNS) float32."""
    weights: Any
    """(128, COLUMNS) in the dtype of the values."""
    acc: Any
    """(128, D) float32."""
    scored: Any
    summed: Any


@gluon.constexpr_function
def _layout(columns):
    """Layout of a worker's tile (128, columns) of float32: a thread has a row."""
    return get_tmem_reg_layout(gl.float32, (128, columns), TensorMemoryLayout([128, columns], 1), 4)


@device
def _score(rings, memory, queries, tile, T: gl.constexpr):
    """Start S = Q K^T for the key tile of this turn, and release the tile when it is computed."""
    steps.await_tile(rings.k, tile, T.STAGES)
    keys = steps.tile_of(rings.k, tile, T.STAGES, T.COLUMNS)[0].permute([1, 0])
    read = rings.k.empty.index(tile % T.STAGES)
    tcgen05_mma(queries[0], keys, memory.scores, use_acc=False, mbarriers=[memory.scored, read])


@device
def _begin(rings, memory, rows, tile, DROP: gl.constexpr, T: gl.constexpr):
    """Return running max and sum of no keys; the product of the first tile is started."""
    _score(rings, memory, rows.queries, tile, T)
    LINE: gl.constexpr = gl.SliceLayout(1, _layout(T.COLUMNS))
    return gl.full([128], hopper.LOWEST, gl.float32, LINE), gl.zeros([128], gl.float32, LINE)


@device
def _step(rings, memory, rows, sums, tile, t, CHECKED: gl.constexpr, DROP: gl.constexpr, T: gl.constexpr):
    """Return running max and sum after key tile t; its product with the values is started."""
    peak, total = sums
    column = t * T.COLUMNS
    mbarrier.wait(memory.scored, tile & 1)
    s = memory.scores.load(_layout(T.COLUMNS))
    gl.barrier()  # every warp has loaded its scores
    if column > rows.begin:
        _score(rings, memory, rows.queries, tile + 1, T)
    words = hopper.words_of(rows, column, DROP, T)
    p, fade, added, peak = hopper.weights_of(s, rows, column, peak, CHECKED, DROP, T)
    total = total * fade + added
    p = p.to(memory.weights.dtype)
    if DROP:
        p = steps.drop(p, words, rows.dropout.threshold, T.COLUMNS)
    if t < rows.last:
        mbarrier.wait(memory.summed, (tile - 1) & 1)
        acc = memory.acc.load(_layout(T.D))
        memory.acc.store(acc * gl.convert_layout(fade, gl.SliceLayout(1, _layout(T.D)))[:, None])
    memory.weights.store(p)
    steps.await_tile(rings.v, tile, T.STAGES)
    values = steps.tile_of(rings.v, tile, T.STAGES, T.COLUMNS)[0]
    read = rings.v.empty.index(tile % T.STAGES)
    tcgen05_mma(memory.weights, values, memory.acc, use_acc=t < rows.last, mbarriers=[memory.summed, read])
    return peak, total


@device
def _end(rings, memory, sums, tile, T: gl.constexpr):
    """Return acc after the last product, running max and sum."""
    mbarrier.wait(memory.summed, (tile - 1) & 1)
    return (memory.acc.load(_layout(T.D)),), sums[0], sums[1]


@device
def _of(memory, WORKER: gl.constexpr):
    """Return the Memory of a worker, from that of both."""
    return Memory(
        memory.scores.index(WORKER), memory.weights.index(WORKER), memory.acc.index(WORKER),
        memory.scored.index(WORKER), memory.summed.index(WORKER),
    )  # fmt: skip


@jit
def _forward(
    q: TensorMap, k: TensorMap, v: TensorMap, out: Pointer, lse: Float32Pointer,
    origins: Origins, strides: Strides, lse_strides: LineStrides, problem: Problem, planes: Varying, section: Varying,
    D: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write out and lse."""
    OF_SCORES: gl.constexpr = TensorMemoryLayout([128, COLUMNS], 1)
    memory = Memory(
        allocate_tensor_memory(gl.float32, [2, 128, COLUMNS], OF_SCORES),
        allocate_tensor_memory(v.dtype, [2, 128, COLUMNS], OF_SCORES),
        allocate_tensor_memory(gl.float32, [2, 128, D], TensorMemoryLayout([128, D], 1)),
        steps.barriers(2, 1),
        steps.barriers(2, 1),
    )
    given = (q, k, v, origins, (out, lse, strides[0], lse_strides), problem, planes, section)
    LINE: gl.constexpr = gl.SliceLayout(1, _layout(COLUMNS))
    T: gl.constexpr = hopper.Sizes(D, COLUMNS, STAGES)
    owned = _of(memory, 0), _of(memory, 1)
    hopper.forward(given, owned, CAUSAL, GROUP, ROWS, LINE, T, _begin, _step, _end, 0)


class Forward(Persistent):
    """The forward pass for one signature that rule.takes() accepts; called like attention.forward.Forward."""

    def __init__(self, call: Call, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """out (B, H, L, DV) and lse (B, H, L): tensors with the layout of the outputs."""
        super().__init__(_forward, call, tile, hopper.read_by(call, tile), [out], lse)
