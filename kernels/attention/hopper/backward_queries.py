"""Attention backward for long rows on sm_90, dQ and delta, in Gluon; same math as attention/backward.py.

Work items, producer warp and consumer warp groups are as in the forward pass. A step, for key tiles t, is

    start S(t + 1) = Q K(t + 1)^T      start dP(t + 1) = dO V(t + 1)^T      start dQ += dS(t) K(t)
    dS(t + 1) from S(t + 1) and dP(t + 1)      wait for dQ

so that the tensor cores compute dQ during the exponentials. A group computes three products of 64 x COLUMNS x D: for
D = 64, 12 cycles per score of a thread. Not run on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from fasttfm.kernels.attention import steps as plain
from fasttfm.kernels.attention.hopper import steps
from fasttfm.kernels.attention.hopper.forward import Sizes
from fasttfm.kernels.attention.hopper.rule import Heads, Persistent
from fasttfm.kernels.attention.hopper.steps import Origin
from fasttfm.kernels.attention.launch import Call
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.gluon import jit
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, TensorMap, Varying
from fasttfm.kernels.philox import with_seed
from fasttfm.kernels.tiles.table import Tile


class Origins(NamedTuple):
    q: Origin
    k: Origin
    v: Origin
    out: Origin
    dout: Origin


class Rings(NamedTuple):
    """q, out and dout share barriers, as do k and v. For wide heads (_is_wide()) out precedes q in its place."""

    q: Any
    out: Any
    dout: Any
    k: Any
    v: Any


@gluon.constexpr_function
def _is_wide(D):
    """Return whether shared memory has no place for out besides q and dout."""
    return D > 128


@gluon.jit
def _copy(
    given, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """Producer: copy q, out and dout of each work item, and its key and value tiles from the last to the first."""
    maps, rings, origins, problem, planes, section = given
    q, k, v, out, dout = maps
    WIDE: gl.constexpr = _is_wide(q.block_type.shape[2])
    BYTES: gl.constexpr = out.nbytes_per_cta + dout.nbytes_per_cta + (0 if WIDE else q.nbytes_per_cta)
    turn = 0
    tile = 0
    for number in range(gl.program_id(0), steps.turns(problem, planes, section, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, COLUMNS)
        if work.first_row < work.head.queries:
            shared = plain.keys_of(work.head, GROUP)
            steps.await_place(rings.q, turn, BYTES, 1)
            row = work.head.first_query.to(gl.int32) + work.first_row
            if not WIDE:
                steps.copy(rings.q, turn, q, origins.q, work.head, row, 1)
            steps.copy(rings.out, turn, out, origins.out, work.head, row, 1)
            steps.copy(rings.dout, turn, dout, origins.dout, work.head, row, 1)
            if WIDE:
                turn += 1
                steps.fill(rings.q, turn, q, origins.q, work.head, row, 1)
            first = work.head.first_key.to(gl.int32)
            for t in range(work.tiles - 1, work.begin - 1, -1):
                steps.await_place(rings.k, tile, k.nbytes_per_cta + v.nbytes_per_cta, STAGES)
                steps.copy(rings.k, tile, k, origins.k, shared, first + t * COLUMNS, STAGES)
                steps.copy(rings.v, tile, v, origins.v, shared, first + t * COLUMNS, STAGES)
                tile += 1
            turn += 1


@gluon.constexpr_function
def _row_layout(D):
    """Layout of a tile (64, D) for row sums: a thread has the same rows as in the accumulator, and of each row runs of
    eight columns."""
    parts = [[0, 1 << i] for i in range(5, (D - 1).bit_length())]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *parts], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, D],
    )  # fmt: skip


@gluon.jit
def _delta(out, dout, S_L: gl.constexpr):
    """Return the row sums of out * dout, parts of tiles (64, D) in shared memory."""
    L: gl.constexpr = _row_layout(out[0].shape[1])
    PARTS: gl.constexpr = len(out)
    products = out[0].load(L).to(gl.float32) * dout[0].load(L).to(gl.float32)
    for i in gl.static_range(1, PARTS):
        products += out[i].load(L).to(gl.float32) * dout[i].load(L).to(gl.float32)
    return gl.convert_layout(gl.sum(products, 1), gl.SliceLayout(1, S_L))


class Rows(NamedTuple):
    """The 64 queries of a warp group: device values."""

    queries: Any
    """(64, D) in shared memory, in parts."""
    douts: Any
    plane: Any
    first: Any
    lse: Any
    delta: Any
    whole: Any
    free: Any
    """Every row sees the keys [whole, free), whole tiles."""
    seen: Any
    """steps.Seen."""
    begin: Any
    """The first key of the first tile."""
    scale: Any
    dropout: Any


@gluon.jit
def _products(rings, rows, tile, T: gl.constexpr):
    """Start S = Q K^T and dP = dO V^T for the key tile of this turn."""
    s = steps.scores(rows.queries, steps.tile_of(rings.k, tile, T.STAGES, T.COLUMNS))
    return s, steps.scores(rows.douts, steps.tile_of(rings.v, tile, T.STAGES, T.COLUMNS))


@gluon.jit
def _slopes(s, dp, words, rows, column, DROP: gl.constexpr, T: gl.constexpr):
    """Return dS from S and dP (64, COLUMNS) for the keys from `column` on, as the left operand of dS K."""
    S_L: gl.constexpr = steps.layout(T.COLUMNS)
    O_L: gl.constexpr = steps.layout(rows.queries[0].shape[1])
    p = gl.exp2(s * rows.scale - rows.lse[:, None])
    if DROP:
        kept = steps.drop(dp, words, rows.dropout.threshold, T.COLUMNS) * rows.dropout.keep_scale
        dp = gl.convert_layout(kept, S_L, assert_trivial=True)
    ds = p * (dp - rows.delta[:, None])
    bordering = column >= rows.free
    if rows.seen.first is not None:
        bordering |= column < rows.whole
    if bordering:
        ds = steps.hide(ds, column, rows.seen, 0.0, T.COLUMNS, DROP)
    return gl.convert_layout(ds.to(rows.queries[0].dtype), gl.DotOperandLayout(0, O_L, 2))


@gluon.jit
def _first(rings, rows, tile, column, DROP: gl.constexpr, T: gl.constexpr):
    """Return dS of this turn, for the keys from `column` on."""
    s, dp = _products(rings, rows, tile, T)
    words = None
    if DROP:
        words = steps.draw(rows.dropout, rows.plane, rows.first, column, T.COLUMNS)
    s, dp = warpgroup_mma_wait(0, [s, dp])
    return _slopes(s, dp, words, rows, column, DROP, T)


@gluon.jit
def _step(rings, rows, acc, ds, tile, column, DROP: gl.constexpr, T: gl.constexpr):
    """Return dQ (64, D), in parts, after dS K of this turn, and dS of the next turn, for the keys from `column` on."""
    PARTS: gl.constexpr = len(acc)
    s, dp = _products(rings, rows, tile + 1, T)
    acc = steps.add(acc, ds, steps.tile_of(rings.k, tile, T.STAGES, T.COLUMNS))
    words = None
    if DROP:
        words = steps.draw(rows.dropout, rows.plane, rows.first, column, T.COLUMNS)
    s, dp = warpgroup_mma_wait(PARTS, [s, dp])
    following = _slopes(s, dp, words, rows, column, DROP, T)
    # This wait is a branch, across which ptxas moves nothing; without it the exponentials sink below the wait for dQ.
    steps.await_tile(rings.k, tile + 2, T.STAGES, column > rows.begin)
    done = warpgroup_mma_wait(0, acc + (ds, following))  # noqa: RUF005 Triton has no star
    steps.release(rings.k, tile, T.STAGES)
    return done[:PARTS], done[PARTS + 1]


@gluon.jit
def _scatter(given, WORKER: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr):
    """Consumer: compute and store dQ and delta for 64 queries of each work item."""
    rings, cleared, dq, lse, delta, out_strides, lse_strides, problem, planes, section = given
    S_L: gl.constexpr = steps.layout(T.COLUMNS)
    DROP: gl.constexpr = problem.dropout.seed is not None
    # With key lengths or packed sequences, a head's last tile may hold rows past its visible keys.
    FOLLOWED: gl.constexpr = problem.spans[0] is not None or problem.spans[1] is not None
    dropout = problem.dropout
    if DROP:
        dropout = with_seed(dropout)
    turn = 0
    tile = 0
    clearings = 0
    for number in range(gl.program_id(0), steps.turns(problem, planes, section, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, T.COLUMNS)
        head = work.head
        if work.first_row < head.queries:
            first_row = work.first_row + 64 * WORKER
            numbers = first_row + gl.arange(0, 64, gl.SliceLayout(1, S_L))
            seen = steps.seen_keys(numbers, head.visible, problem.masking, CAUSAL)
            line = plain.line_of(lse_strides, head, head.first_query) + numbers
            inside = numbers < head.queries
            lse_of_rows = gl.load(lse + line, mask=inside, other=0.0)
            queries = steps.half_of(steps.tile_of(rings.q, turn, 1, ROWS), WORKER)
            douts = steps.half_of(steps.tile_of(rings.dout, turn, 1, ROWS), WORKER)
            steps.await_tile(rings.q, turn, 1)
            sums = _delta(steps.half_of(steps.tile_of(rings.out, turn, 1, ROWS), WORKER), douts, S_L)
            gl.store(delta + line, sums, mask=inside)
            if _is_wide(T.D):
                gl.barrier()  # all threads have read out
                steps.release(rings.q, turn, 1)
                turn += 1
                steps.await_tile(rings.q, turn, 1)
            scale = problem.scale * plain.LOG2E
            rows = Rows(
                queries, douts, head.plane, first_row, lse_of_rows, sums, work.whole, work.free, seen,
                work.begin * T.COLUMNS, scale, dropout,
            )  # fmt: skip
            column = (work.tiles - 1) * T.COLUMNS
            steps.await_tile(rings.k, tile, T.STAGES)
            if FOLLOWED:  # noqa: SIM102 Triton does not short-circuit `and`
                if column + T.COLUMNS > head.visible:
                    keys = steps.tile_of(rings.k, tile, T.STAGES, T.COLUMNS)
                    steps.clear(keys, column, head.visible, WORKER, DROP)
                    mbarrier.arrive(cleared)
                    mbarrier.wait(cleared, clearings & 1)
                    clearings += 1
            ds = _first(rings, rows, tile, column, DROP, T)
            acc = steps.zeros_of(queries)
            steps.await_tile(rings.k, tile + 1, T.STAGES, work.tiles > work.begin + 1)
            for t in range(work.tiles - 2, work.begin - 1, -1):
                acc, ds = _step(rings, rows, acc, ds, tile, t * T.COLUMNS, DROP, T)
                tile += 1
            steps.release(rings.q, turn, 1)
            acc = steps.add(acc, ds, steps.tile_of(rings.k, tile, T.STAGES, T.COLUMNS))
            acc = warpgroup_mma_wait(0, acc + (ds,))[: len(acc)]  # noqa: RUF005 Triton has no star
            steps.release(rings.k, tile, T.STAGES)
            tile += 1
            turn += 1
            at = first_row + gl.arange(0, 64, gl.SliceLayout(1, acc[0].type.layout))
            acc = [x * problem.scale for x in acc]
            steps.store(dq, out_strides, acc, head, head.first_query, at, head.queries)


@jit
def _queries(
    q: TensorMap, k: TensorMap, v: TensorMap, out: TensorMap, dout: TensorMap, dq: Pointer, lse: Float32Pointer,
    delta: Float32Pointer, origins: Origins, strides: Strides, lse_strides: LineStrides, problem: Problem,
    planes: Varying, section: Varying,
    D: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write dq and delta."""
    q_ring, k_ring = steps.ring(q, D, 1), steps.ring(k, D, STAGES)
    out_ring = q_ring
    if not _is_wide(D):
        out_ring = steps.beside(q_ring, out, D, 1)
    rings = Rings(q_ring, out_ring, steps.beside(q_ring, dout, D, 1), k_ring, steps.beside(k_ring, v, D, STAGES))
    cleared = steps.barriers(1, steps.WORKERS).index(0)
    fence_async_shared()
    given = (rings, cleared, dq, lse, delta, strides[0], lse_strides, problem, planes, section)
    copied = ((q, k, v, out, dout), rings, origins, problem, planes, section)
    T: gl.constexpr = Sizes(D, COLUMNS, STAGES)
    gl.warp_specialize(
        [
            (_scatter, (given, 0, CAUSAL, ROWS, T)),
            (_scatter, (given, 1, CAUSAL, ROWS, T)),
            (_copy, (copied, CAUSAL, GROUP, ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers per thread: second consumer group, producer warp; the first group has the rest
    )


class BackwardQueries(Persistent):
    """dQ and delta for one signature that rule.takes() accepts.

    Called with query, key, value, out, grad, output d_query, lse, output delta, and the Problem.
    """

    def __init__(self, call: Call, tile: Tile, out: Tensor, grad: Tensor, lse: Tensor, d_query: Tensor) -> None:
        """All tensors only give the layouts of those in later calls."""
        query, *walked = call.inputs
        map_keys = Heads.mapped if call.problem.dropout.seed is None else Heads.spread
        keys = [(x, tile.columns, map_keys) for x in walked]
        rows = [(x, tile.rows, Heads.mapped) for x in (query, out, grad)]
        super().__init__(_queries, call, tile, [rows[0], *keys, *rows[1:]], [d_query], lse)
