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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fasttfm.kernels.attention import steps as plain
from fasttfm.kernels.attention.hopper import forward as hopper
from fasttfm.kernels.attention.hopper import steps
from fasttfm.kernels.attention.hopper.forward import Sizes
from fasttfm.kernels.attention.hopper.rule import Persistent
from fasttfm.kernels.attention.hopper.steps import Origins
from fasttfm.kernels.attention.launch import Call
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.gluon import jit
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, TensorMap, Varying
from fasttfm.kernels.philox import with_seed
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
    keys = steps.tile_of(rings.k, tile, T.STAGES, [T.COLUMNS, T.D]).permute([1, 0])
    read = rings.k.empty.index(tile % T.STAGES)
    tcgen05_mma(queries, keys, memory.scores, use_acc=False, mbarriers=[memory.scored, read])


@device
def _step(rings, memory, rows, sums, tile, t, last, CHECKED: gl.constexpr, DROP: gl.constexpr, T: gl.constexpr):
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
    if t < last:
        mbarrier.wait(memory.summed, (tile - 1) & 1)
        acc = memory.acc.load(_layout(T.D))
        memory.acc.store(acc * gl.convert_layout(fade, gl.SliceLayout(1, _layout(T.D)))[:, None])
    memory.weights.store(p)
    steps.await_tile(rings.v, tile, T.STAGES)
    values = steps.tile_of(rings.v, tile, T.STAGES, [T.COLUMNS, T.D])
    read = rings.v.empty.index(tile % T.STAGES)
    tcgen05_mma(memory.weights, values, memory.acc, use_acc=t < last, mbarriers=[memory.summed, read])
    return peak, total


@device
def _attend(given, WORKER: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr):
    """Consumer: compute and store 128 queries of each work item."""
    rings, cleared, of_both, outputs, problem, planes, section = given
    scores, weights, acc, scored, summed = of_both
    memory = Memory(
        scores.index(WORKER), weights.index(WORKER), acc.index(WORKER), scored.index(WORKER), summed.index(WORKER)
    )
    LINE: gl.constexpr = gl.SliceLayout(1, _layout(T.COLUMNS))
    DROP: gl.constexpr = problem.dropout.seed is not None
    # With key lengths or packed sequences, a head's last tile may hold rows past its visible keys.
    FOLLOWED: gl.constexpr = problem.spans[0] is not None or problem.spans[1] is not None
    dropout = problem.dropout
    if DROP:
        dropout = with_seed(dropout)
    scale = gl.maximum(problem.scale * plain.LOG2E, 1e-37)  # 0 * -inf would be NaN
    turn = 0
    tile = 0
    clearings = 0
    for number in range(gl.program_id(0), steps.turns(problem, planes, section, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, T.COLUMNS)
        head = work.head
        if work.first_row < head.queries:
            first_row = work.first_row + 128 * WORKER
            seen = steps.seen_keys(first_row + gl.arange(0, 128, LINE), head.visible, problem.masking, CAUSAL)
            queries = steps.tile_of(rings.q, turn, 1, [ROWS, T.D]).slice(128 * WORKER, 128)
            rows = hopper.Rows(queries, first_row, head.plane, seen, work.begin * T.COLUMNS, dropout, scale)
            last = work.tiles - 1
            steps.await_tile(rings.q, turn, 1)
            _score(rings, memory, queries, tile, T)
            if FOLLOWED:  # noqa: SIM102 Triton does not short-circuit `and`
                if last * T.COLUMNS + T.COLUMNS > head.visible:
                    hopper.clear(rings, cleared, tile, clearings, last * T.COLUMNS, head.visible, WORKER, DROP, T)
                    clearings += 1
            free, whole = hopper.borders(work, CAUSAL, problem.masking.window is not None, T.COLUMNS)
            sums = gl.full([128], hopper.LOWEST, gl.float32, LINE), gl.zeros([128], gl.float32, LINE)
            for t in range(last, free - 1, -1):
                sums = _step(rings, memory, rows, sums, tile, t, last, True, DROP, T)
                tile += 1
            for t in range(free - 1, whole - 1, -1):
                sums = _step(rings, memory, rows, sums, tile, t, last, False, DROP, T)
                tile += 1
            for t in range(whole - 1, work.begin - 1, -1):
                sums = _step(rings, memory, rows, sums, tile, t, last, True, DROP, T)
                tile += 1
            steps.release(rings.q, turn, 1)
            mbarrier.wait(memory.summed, (tile - 1) & 1)
            hopper.store(outputs, memory.acc.load(_layout(T.D)), *sums, head, first_row, dropout.keep_scale)
            turn += 1


@jit
def _forward(
    q: TensorMap, k: TensorMap, v: TensorMap, out: Pointer, lse: Float32Pointer,
    origins: Origins, strides: Strides, lse_strides: LineStrides, problem: Problem, planes: Varying, section: Varying,
    D: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write out and lse."""
    rings = steps.Rings(steps.ring(q, 1), steps.ring(k, STAGES), steps.ring(v, STAGES))
    cleared = steps.barriers(1, steps.WORKERS).index(0)
    OF_SCORES: gl.constexpr = TensorMemoryLayout([128, COLUMNS], 1)
    memory = (
        allocate_tensor_memory(gl.float32, [2, 128, COLUMNS], OF_SCORES),
        allocate_tensor_memory(v.dtype, [2, 128, COLUMNS], OF_SCORES),
        allocate_tensor_memory(gl.float32, [2, 128, D], TensorMemoryLayout([128, D], 1)),
        steps.barriers(2, 1),
        steps.barriers(2, 1),
    )
    fence_async_shared()
    given = (rings, cleared, memory, (out, lse, strides[0], lse_strides), problem, planes, section)
    copied = (q, k, v, rings, origins, problem, planes, section)
    T: gl.constexpr = Sizes(D, COLUMNS, STAGES)
    gl.warp_specialize(
        [
            (_attend, (given, 0, CAUSAL, ROWS, T)),
            (_attend, (given, 1, CAUSAL, ROWS, T)),
            (hopper.copy, (copied, CAUSAL, GROUP, ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers per thread: second worker, producer warp; the first worker has the rest
    )


class Forward(Persistent):
    """The forward pass for one signature that rule.takes() accepts; called like attention.forward.Forward."""

    def __init__(self, call: Call, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """out (B, H, L, DV) and lse (B, H, L): tensors with the layout of the outputs."""
        super().__init__(_forward, call, tile, hopper.read_by(call, tile), [out], lse)
