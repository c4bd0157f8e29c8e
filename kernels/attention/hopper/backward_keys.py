"""Attention backward for long rows on sm_90, dK and dV, in Gluon; same math as attention/backward.py.

Persistent programs, one per SM, loop over work items: 128 keys of a head, 64 per warp group, against the queries of all
heads that read them, so that dK and dV accumulate in registers. A step, for ROWS queries, is

    start S^T = K Q^T      start dP^T = V dO^T      P^T from S^T      start dV += P^T dO      dS^T from dP^T
    start dK += dS^T Q     wait for all

P^T and dS^T are left operands straight from registers. Every product but S^T is issued before the wait for the previous
one. The exponentials overlap dP^T; the products of the other group fill the gaps. A group computes four products of
64 x ROWS x D: for D = 64, 16 cycles per score of a thread. FlashAttention-3 (Shah et al. 2024) uses the same order and
a fifth product for dQ, accumulated by atomics. Not run on a GPU.
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
from fasttfm.kernels.attention.hopper import schedule, steps, transposed_dropout
from fasttfm.kernels.attention.hopper.rule import Heads, Persistent
from fasttfm.kernels.attention.hopper.steps import Origin
from fasttfm.kernels.attention.launch import Call
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.gluon import jit
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, TensorMap, Varying
from fasttfm.kernels.philox import LEVELS, with_seed
from fasttfm.kernels.tiles.table import Tile

_LEVELS = gl.constexpr(LEVELS)


class Origins(NamedTuple):
    q: Origin
    k: Origin
    v: Origin
    dout: Origin


class Rings(NamedTuple):
    """q and dout share barriers, as do k and v."""

    q: Any
    dout: Any
    lines: Any
    """(2 * STAGES, ROWS) float32: log-sum-exp and delta of each query tile, alternating."""
    k: Any
    v: Any
    cleared: Any
    """mbarrier at which the workers wait for each other; None unless sequences are packed."""


class Work(NamedTuple):
    """A tile of keys and the queries that see some of them: device values."""

    head: Any
    """The key head."""
    first_key: Any
    """Negative if the number has no work."""
    first_row: Any
    end: Any
    """Queries [first_row, end) see some of the keys; none if end <= first_row."""


@gluon.jit
def _works(problem, planes, section, COLUMNS: gl.constexpr):
    """Return how many numbers _work_of() takes."""
    return schedule.turns((problem.sizes.S + COLUMNS - 1) // COLUMNS, planes, section, gl.num_programs(0))


@gluon.jit
def _work_of(
    number, planes, problem, section, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Return the Work of this number."""
    tiles = (problem.sizes.S + COLUMNS - 1) // COLUMNS
    # Anew, else their quotients stay in registers, which heads of 128 spill.
    section, programs = steps.anew(section), steps.anew(gl.num_programs(0))
    row, plane = schedule.place(number, tiles, planes, section, programs, COLUMNS)
    first_key = (tiles - 1) * COLUMNS - row  # the first keys have the most queries
    head = plain.locate(plane, plain.sizes_of_keys(problem.sizes, GROUP), problem.spans)
    border = first_key - problem.masking.causal_offset  # the first query that sees the first key, if causal
    first_row = 0
    if CAUSAL:
        first_row = gl.maximum(border, 0) // ROWS * ROWS
    end = gl.where(first_key < head.visible, head.queries, 0)
    if problem.masking.window is not None:
        end = gl.minimum(end, border + COLUMNS + problem.masking.window)
    if problem.spans[1] is not None:  # the sequence may be shorter than the longest
        first_key = gl.where(first_key < head.keys, first_key, -1)
    return Work(head, first_key, first_row, end)


@gluon.jit
def _copy(
    given, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """Producer: copy the keys and values of each work item, then the queries of every head that reads them."""
    maps, rings, lines, origins, lse_strides, problem, planes, section = given
    q, k, v, dout = maps
    # keep_scale multiplies the finished sums dK and dV, so delta is divided by it here.
    kept = 1.0 - problem.dropout.threshold * (1.0 / _LEVELS)
    L: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    turn = 0
    tile = 0
    for number in range(gl.program_id(0), _works(problem, planes, section, COLUMNS), gl.num_programs(0)):
        work = _work_of(number, planes, problem, section, CAUSAL, GROUP, ROWS, COLUMNS)
        if work.first_key >= 0:
            steps.await_place(rings.k, turn, k.nbytes_per_cta + v.nbytes_per_cta, 1)
            first_key = work.head.first_key.to(gl.int32) + work.first_key
            steps.copy(rings.k, turn, k, origins.k, work.head, first_key, 1)
            steps.copy(rings.v, turn, v, origins.v, work.head, first_key, 1)
            for member in range(GROUP):
                reader = plain.member_of(work.head, member, GROUP)
                line = plain.line_of(lse_strides, reader, reader.first_query)
                first_query = reader.first_query.to(gl.int32)
                for first in range(work.first_row, work.end, ROWS):
                    rows = first + gl.arange(0, ROWS, L)
                    inside = rows < reader.queries  # past the end q and dout are zeros and add nothing
                    lse = gl.load(lines[0] + line + rows, mask=inside, other=0.0)
                    delta = gl.load(lines[1] + line + rows, mask=inside, other=0.0) * kept
                    steps.await_place(rings.q, tile, q.nbytes_per_cta + dout.nbytes_per_cta, STAGES)
                    steps.copy(rings.q, tile, q, origins.q, reader, first_query + first, STAGES)
                    steps.copy(rings.dout, tile, dout, origins.dout, reader, first_query + first, STAGES)
                    slot = tile % STAGES
                    rings.lines.index(2 * slot).store(lse)
                    rings.lines.index(2 * slot + 1).store(delta)
                    mbarrier.arrive(rings.q.full.index(slot))
                    tile += 1
            turn += 1


class Keys(NamedTuple):
    """The 64 keys of a warp group: device values."""

    k: Any
    """(64, D) in shared memory, in parts."""
    v: Any
    first: Any
    border: Any
    """The first query that sees the first key; each further key is first seen one query later."""
    window: Any
    """Queries past the border that still see a key; None without a window."""
    dropout: Any
    scale: Any


@gluon.jit
def _step(
    rings, own, dk, dv, tile, first, plane, more, CAUSAL: gl.constexpr, DROP: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Return dk and dv (64, D), in parts, after adding this turn's queries, those from `first` on; more: another turn
    follows."""
    PARTS: gl.constexpr = len(dk)
    S_L: gl.constexpr = steps.layout(ROWS)
    A_L: gl.constexpr = gl.DotOperandLayout(0, steps.layout(own.k[0].shape[1]), 2)
    LINE: gl.constexpr = gl.SliceLayout(0, S_L)
    element: gl.constexpr = own.k[0].dtype
    queries = steps.tile_of(rings.q, tile, STAGES, ROWS)
    douts = steps.tile_of(rings.dout, tile, STAGES, ROWS)
    s = steps.scores(own.k, queries)
    dp = steps.scores(own.v, douts)
    lse = rings.lines.index(tile % STAGES * 2).load(LINE)
    if DROP:
        word = transposed_dropout.draw(own.dropout, plane, first, own.first)
    s = warpgroup_mma_wait(PARTS, [s])
    p = gl.exp2(s * own.scale - lse[None, :])
    if CAUSAL:  # noqa: SIM102 Triton does not short-circuit `and`
        if first < own.border + 63:
            rows = first + gl.arange(0, ROWS, LINE)
            last = own.border + gl.arange(0, 64, gl.SliceLayout(1, S_L))
            p = gl.where(rows[None, :] >= last[:, None], p, 0.0)
    if own.window is not None:
        last_row = own.border + own.window
        if first + ROWS - 1 > last_row:
            rows = first + gl.arange(0, ROWS, LINE)
            last = last_row + gl.arange(0, 64, gl.SliceLayout(1, S_L))
            p = gl.where(rows[None, :] <= last[:, None], p, 0.0)
    kept = p.to(element)
    if DROP:
        p = transposed_dropout.mark(p, word)
        kept = transposed_dropout.kept(p, element)
    weights = gl.convert_layout(kept, A_L)
    # This wait is a branch, across which ptxas moves nothing; without it the exponentials sink below the wait for dP.
    steps.await_tile(rings.q, tile + 1, STAGES, more)
    dv = steps.add(dv, weights, douts)
    delta = rings.lines.index(tile % STAGES * 2 + 1).load(LINE)
    dp = warpgroup_mma_wait(PARTS, [dp])
    ds = p * (dp - delta[None, :])
    if DROP:
        ds = gl.maximum(p, 0.0) * dp - gl.abs(p) * delta[None, :]
    ds = gl.convert_layout(ds.to(element), A_L)
    dk = steps.add(dk, ds, queries)
    done = warpgroup_mma_wait(0, dk + dv + (weights, ds))
    steps.release(rings.q, tile, STAGES)
    return done[:PARTS], done[PARTS : 2 * PARTS]


@gluon.jit
def _clear(
    rings, tile, clearings, first, end, WORKER: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Zero this turn's queries past `end`, as those of the next sequence may be NaN, half per worker; wait until both
    are done."""
    steps.clear(steps.tile_of(rings.q, tile, STAGES, ROWS), first, end, WORKER, False)
    steps.clear(steps.tile_of(rings.dout, tile, STAGES, ROWS), first, end, WORKER, False)
    mbarrier.arrive(rings.cleared)
    mbarrier.wait(rings.cleared, clearings & 1)


@gluon.jit
def _gather(
    given, WORKER: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: compute and store dK and dV for 64 keys of each work item."""
    rings, dk_out, dv_out, out_strides, problem, planes, section = given
    DROP: gl.constexpr = problem.dropout.seed is not None
    dropout = problem.dropout
    if DROP:
        dropout = with_seed(dropout)
    scale = problem.scale * plain.LOG2E
    turn = 0
    tile = 0
    clearings = 0
    for number in range(gl.program_id(0), _works(problem, planes, section, COLUMNS), gl.num_programs(0)):
        work = _work_of(number, planes, problem, section, CAUSAL, GROUP, ROWS, COLUMNS)
        if work.first_key >= 0:
            first_key = work.first_key + 64 * WORKER
            keys = steps.half_of(steps.tile_of(rings.k, turn, 1, COLUMNS), WORKER)
            values = steps.half_of(steps.tile_of(rings.v, turn, 1, COLUMNS), WORKER)
            masking = problem.masking
            own = Keys(keys, values, first_key, first_key - masking.causal_offset, masking.window, dropout, scale)
            steps.await_tile(rings.k, turn, 1)
            dk = steps.zeros_of(keys)
            dv = steps.zeros_of(keys)
            steps.await_tile(rings.q, tile, STAGES, work.first_row < work.end)
            for member in range(GROUP):
                plane = work.head.plane * GROUP + member
                for first in range(work.first_row, work.end, ROWS):
                    if rings.cleared is not None:  # noqa: SIM102 Triton does not short-circuit `and`
                        if first + ROWS > work.end:
                            _clear(rings, tile, clearings, first, work.end, WORKER, ROWS, STAGES)
                            clearings += 1
                    more = (first + ROWS < work.end) | (member + 1 < GROUP)
                    dk, dv = _step(rings, own, dk, dv, tile, first, plane, more, CAUSAL, DROP, ROWS, STAGES)
                    tile += 1
            steps.release(rings.k, turn, 1)
            turn += 1
            work = _work_of(steps.anew(number), planes, problem, section, CAUSAL, GROUP, ROWS, COLUMNS)
            at = work.first_key + 64 * WORKER + gl.arange(0, 64, gl.SliceLayout(1, dk[0].type.layout))
            seen = (at < work.head.visible)[:, None]
            dk = [gl.where(seen, x * (problem.scale * dropout.keep_scale), 0.0) for x in dk]
            dv = [gl.where(seen, x * dropout.keep_scale, 0.0) for x in dv]
            first = work.head.first_key
            steps.store(dk_out, out_strides[0], dk, work.head, first, at, work.head.keys)
            steps.store(dv_out, out_strides[1], dv, work.head, first, at, work.head.keys)


@jit
def _keys(
    q: TensorMap, k: TensorMap, v: TensorMap, dout: TensorMap, dk: Pointer, dv: Pointer, lse: Float32Pointer,
    delta: Float32Pointer, origins: Origins, strides: Strides, lse_strides: LineStrides, problem: Problem,
    planes: Varying, section: Varying,
    D: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write dk and dv."""
    lines = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ring, k_ring = steps.ring(q, D, STAGES, 2), steps.ring(k, D, 1)
    cleared = None
    if problem.spans[1] is not None:
        cleared = steps.barriers(1, steps.WORKERS).index(0)
    douts, values = steps.beside(q_ring, dout, D, STAGES), steps.beside(k_ring, v, D, 1)
    rings = Rings(q_ring, douts, lines, k_ring, values, cleared)
    fence_async_shared()
    given = (rings, dk, dv, strides, problem, planes, section)
    copied = ((q, k, v, dout), rings, (lse, delta), origins, lse_strides, problem, planes, section)
    gl.warp_specialize(
        [
            (_gather, (given, 0, CAUSAL, GROUP, ROWS, COLUMNS, STAGES)),
            (_gather, (given, 1, CAUSAL, GROUP, ROWS, COLUMNS, STAGES)),
            (_copy, (copied, CAUSAL, GROUP, ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers per thread: second consumer group, producer warp; the first group has the rest
    )


class BackwardKeys(Persistent):
    """dK and dV for one signature that rule.takes() accepts.

    Called with query, key, value, grad, outputs d_key and d_value, lse, delta from BackwardQueries, and the Problem.
    """

    def __init__(self, call: Call, tile: Tile, grad: Tensor, lse: Tensor, gradients: tuple[Tensor, Tensor]) -> None:
        """All tensors only give the layouts of those in later calls; gradients: d_key and d_value."""
        blocks = tile.rows, tile.columns, tile.columns, tile.rows
        read = [(x, count, Heads.mapped) for x, count in zip((*call.inputs, grad), blocks)]
        super().__init__(_keys, call, tile, read, gradients, lse, of_keys=True)
