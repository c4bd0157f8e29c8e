"""Attention forward for long rows on sm_90, warp-specialized, in Gluon; same math as attention/forward.py.

Persistent programs, one per SM, loop over work items: 128 queries of a head, 64 per consumer warp group. The producer
warp runs a few tiles ahead. A step, over key tiles t from the last to the first, is

    start S(t - 1) = Q K(t - 1)^T      start O += P(t) V(t)      P(t - 1) from S(t - 1)      wait for both

so that the tensor cores accumulate O during the exponentials, and the groups drift apart until the exponentials of one
overlap the products of the other. A group multiplies 64 x COLUMNS x 2 D per step: for D = 64, 8 cycles per score of a
thread, as long as its exponential. FlashAttention-3 (Shah et al. 2024) uses this order. Not run on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon import jit as device
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from fasttfm.kernels.attention import steps as plain
from fasttfm.kernels.attention.hopper import steps
from fasttfm.kernels.attention.hopper.rule import Heads, Persistent
from fasttfm.kernels.attention.hopper.steps import Origins
from fasttfm.kernels.attention.launch import Call
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.gluon import jit
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, TensorMap, Varying
from fasttfm.kernels.philox import with_seed
from fasttfm.kernels.tiles.table import Tile

LOWEST = gl.constexpr(-3e38)
"""Initial running max of a row: below every score, but finite, so that it can be subtracted."""


@device
def _copy(
    given, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """Producer: copy the queries of each work item, and its key and value tiles from the last to the first."""
    q, k, v, rings, origins, problem, planes, section = given
    turn = 0
    tile = 0
    for number in range(gl.program_id(0), steps.turns(problem, planes, section, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, COLUMNS)
        if work.first_row < work.head.queries:
            shared = plain.keys_of(work.head, GROUP)
            row = work.head.first_query.to(gl.int32) + work.first_row
            steps.fill(rings.q, turn, q, origins.q, work.head, row, 1)
            first = work.head.first_key.to(gl.int32)
            for t in range(work.tiles - 1, work.begin - 1, -1):
                steps.fill(rings.k, tile, k, origins.k, shared, first + t * COLUMNS, STAGES)
                steps.fill(rings.v, tile, v, origins.v, shared, first + t * COLUMNS, STAGES)
                tile += 1
            turn += 1


class Sums(NamedTuple):
    """Online softmax state of a warp group's 64 queries: device values."""

    acc: Any
    """(64, D) in parts, sum of P V over earlier tiles, without `weights`."""
    weights: Any
    """(64, COLUMNS), P of the current tile, not yet multiplied by its values."""
    peak: Any
    """(64,), running max of the scores, scaled and in base 2."""
    total: Any
    """(64,), running sum of P before dropout, including `weights`."""


class Rows(NamedTuple):
    """The queries of a worker, half of a tile: device values."""

    queries: Any
    """(ROWS // 2, D) in shared memory, in parts."""
    first: Any
    plane: Any
    seen: Any
    """steps.Seen."""
    begin: Any
    """The first key of the first tile."""
    last: Any
    """The last tile."""
    dropout: Any
    scale: Any


class Sizes(NamedTuple):
    """Compile-time constants."""

    D: Any
    COLUMNS: Any
    STAGES: Any


@device
def words_of(rows, column, DROP: gl.constexpr, T: gl.constexpr):
    """Return the Philox words for the keys from `column` on; None without dropout."""
    words = None
    if DROP:
        words = steps.draw(rows.dropout, rows.plane, rows.first, column, T.COLUMNS, rows.queries[0].shape[0])
    return words


@device
def weights_of(s, rows, column, peak, CHECKED: gl.constexpr, DROP: gl.constexpr, T: gl.constexpr):
    """Return P in float32 for the scores s of the keys from `column` on, the factor that rescales earlier sums, the row
    sums of P, and the new running max. CHECKED: some row does not see all of the keys."""
    if CHECKED:
        s = steps.hide(s, column, rows.seen, float("-inf"), T.COLUMNS, DROP)
    highest = gl.maximum(peak, gl.max(s, 1) * rows.scale)
    p = gl.exp2(s * rows.scale - highest[:, None])
    return p, gl.exp2(peak - highest), gl.sum(p, 1), highest


@device
def _operand(p, rows, words, DROP: gl.constexpr, T: gl.constexpr):
    """Return p after dropout as the left operand of P V, in registers."""
    kept = p.to(rows.queries[0].dtype)
    if DROP:
        kept = steps.drop(kept, words, rows.dropout.threshold, T.COLUMNS)
    return gl.convert_layout(kept, gl.DotOperandLayout(0, steps.layout(rows.queries[0].shape[1]), 2))


@device
def _begin(rings, own, rows, tile, DROP: gl.constexpr, T: gl.constexpr):
    """Return the Sums after scoring a work item's first tile, which holds its last keys."""
    column = rows.last * T.COLUMNS
    steps.await_tile(rings.k, tile, T.STAGES)
    words = words_of(rows, column, DROP, T)
    s = steps.scores(rows.queries, steps.tile_of(rings.k, tile, T.STAGES, T.COLUMNS))
    s = warpgroup_mma_wait(0, [s])
    steps.release(rings.k, tile, T.STAGES)
    peak = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, steps.layout(T.COLUMNS)))
    p, _, total, peak = weights_of(s, rows, column, peak, True, DROP, T)
    return Sums(steps.zeros_of(rows.queries), _operand(p, rows, words, DROP, T), peak, total)


@device
def _step(rings, own, rows, sums, tile, t, CHECKED: gl.constexpr, DROP: gl.constexpr, T: gl.constexpr):
    """Return the Sums after P V of this turn and the weights of the next turn, for key tile t."""
    acc, weights, peak, total = sums
    column = t * T.COLUMNS
    PARTS: gl.constexpr = len(acc)
    s = steps.scores(rows.queries, steps.tile_of(rings.k, tile + 1, T.STAGES, T.COLUMNS))
    steps.await_tile(rings.v, tile, T.STAGES)
    acc = steps.add(acc, weights, steps.tile_of(rings.v, tile, T.STAGES, T.COLUMNS))
    words = words_of(rows, column, DROP, T)
    s = warpgroup_mma_wait(PARTS, [s])
    p, fade, added, peak = weights_of(s, rows, column, peak, CHECKED, DROP, T)
    total = total * fade + added
    if not DROP:
        p = _operand(p, rows, words, DROP, T)
    # This wait is a branch, across which ptxas moves nothing; without it the exponentials sink below the wait for P V.
    steps.await_tile(rings.k, tile + 2, T.STAGES, column > rows.begin)
    done = warpgroup_mma_wait(0, acc + (weights, p, fade))  # noqa: RUF005 Triton has no star
    p, fade = done[PARTS + 1], done[PARTS + 2]
    steps.release(rings.k, tile + 1, T.STAGES)
    steps.release(rings.v, tile, T.STAGES)
    acc = steps.times(done[:PARTS], fade)
    if DROP:  # here, to reuse the registers of the operand that the product has just read: 5% fewer instructions
        p = _operand(p, rows, words, DROP, T)
    return Sums(acc, p, peak, total)


@device
def _end(rings, own, sums, tile, T: gl.constexpr):
    """Return acc after P V of a work item's last tile, running max and sum."""
    steps.await_tile(rings.v, tile, T.STAGES)
    PARTS: gl.constexpr = len(sums.acc)
    acc = steps.add(sums.acc, sums.weights, steps.tile_of(rings.v, tile, T.STAGES, T.COLUMNS))
    acc = warpgroup_mma_wait(0, acc + (sums.weights,))[:PARTS]  # noqa: RUF005 Triton has no star
    steps.release(rings.v, tile, T.STAGES)
    return acc, sums.peak, sums.total


@device
def _clear(rings, cleared, tile, clearings, column, visible, WORKER: gl.constexpr, DROP: gl.constexpr, T: gl.constexpr):
    """Zero this turn's values past the visible keys, half per worker, and wait until both halves are done."""
    steps.await_tile(rings.v, tile, T.STAGES)
    steps.clear(steps.tile_of(rings.v, tile, T.STAGES, T.COLUMNS), column, visible, WORKER, DROP)
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, clearings & 1)


@device
def _borders(work, BEGUN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the borders of three runs of key tiles, from the last to the first, after BEGUN tiles; in the second run
    all rows see all keys."""
    last = work.tiles - 1
    free = last
    whole = 0
    if WINDOW:
        whole = gl.minimum(work.whole // COLUMNS, last)
    if CAUSAL:
        free = gl.minimum(work.free // COLUMNS, last)
        if WINDOW:
            free = gl.maximum(free, whole)
    return work.tiles - BEGUN, free, whole, work.begin


@device
def _store(outputs, acc, peak, total, head, first_row, keep_scale):
    """Normalize and store the output, and store the log-sum-exp, of a worker's queries."""
    out, lse, out_strides, lse_strides = outputs
    ROWS: gl.constexpr = acc[0].shape[0]
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    acc = steps.times(acc, keep_scale / total)
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, acc[0].type.layout))
    steps.store(out, out_strides, acc, head, head.first_query, rows, head.queries)
    rows = first_row + gl.arange(0, ROWS, total.type.layout)
    line = gl.where(empty, 0.0, peak + gl.log2(total))
    lines = lse + plain.line_of(lse_strides, head, head.first_query)
    gl.store(lines + rows, line, mask=rows < head.queries)


@device
def _attend(
    given, own, WORKER: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, LINE: gl.constexpr, T: gl.constexpr,
    begin: gl.constexpr, step: gl.constexpr, end: gl.constexpr, BEGUN: gl.constexpr,
):  # fmt: skip
    """Consumer: compute and store the Rows of each work item."""
    rings, cleared, outputs, problem, planes, section = given
    OWN: gl.constexpr = ROWS // 2
    DROP: gl.constexpr = problem.dropout.seed is not None
    WINDOW: gl.constexpr = problem.masking.window is not None
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
            first_row = work.first_row + OWN * WORKER
            seen = steps.seen_keys(first_row + gl.arange(0, OWN, LINE), head.visible, problem.masking, CAUSAL)
            queries = steps.half_of(steps.tile_of(rings.q, turn, 1, ROWS), WORKER)
            last = work.tiles - 1
            rows = Rows(queries, first_row, head.plane, seen, work.begin * T.COLUMNS, last, dropout, scale)
            steps.await_tile(rings.q, turn, 1)
            sums = begin(rings, own, rows, tile, DROP, T)
            if FOLLOWED:  # noqa: SIM102 Triton does not short-circuit `and`
                if last * T.COLUMNS + T.COLUMNS > head.visible:
                    _clear(rings, cleared, tile, clearings, last * T.COLUMNS, head.visible, WORKER, DROP, T)
                    clearings += 1
            if BEGUN:  # step() does not await its keys
                steps.await_tile(rings.k, tile + 1, T.STAGES, last > work.begin)
            borders = _borders(work, BEGUN, CAUSAL, WINDOW, T.COLUMNS)
            for run in gl.static_range(3):
                for t in range(borders[run] - 1, borders[run + 1] - 1, -1):
                    sums = step(rings, own, rows, sums, tile, t, run != 1, DROP, T)
                    tile += 1
            steps.release(rings.q, turn, 1)
            acc, peak, total = end(rings, own, sums, tile, T)
            _store(outputs, acc, peak, total, head, first_row, dropout.keep_scale)
            tile += BEGUN
            turn += 1


@device
def forward(
    given, owned, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, LINE: gl.constexpr, T: gl.constexpr,
    begin: gl.constexpr, step: gl.constexpr, end: gl.constexpr, BEGUN: gl.constexpr,
):  # fmt: skip
    """Write out and lse by one producer and two workers.

    owned: what each worker owns; LINE: layout of its rows. For each work item it calls begin(), which scores the first
    BEGUN of the key tiles, step() for each other one, and end().
    """
    q, k, v, origins, outputs, problem, planes, section = given
    rings = steps.Rings(steps.ring(q, T.D, 1), steps.ring(k, T.D, T.STAGES), steps.ring(v, T.D, T.STAGES))
    cleared = steps.barriers(1, steps.WORKERS).index(0)
    fence_async_shared()
    consumed = (rings, cleared, outputs, problem, planes, section)
    copied = (q, k, v, rings, origins, problem, planes, section)
    gl.warp_specialize(
        [
            (_attend, (consumed, owned[0], 0, CAUSAL, ROWS, LINE, T, begin, step, end, BEGUN)),
            (_attend, (consumed, owned[1], 1, CAUSAL, ROWS, LINE, T, begin, step, end, BEGUN)),
            (_copy, (copied, CAUSAL, GROUP, ROWS, T.COLUMNS, T.STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers per thread: second worker, producer warp; the first worker has the rest
    )


@jit
def _forward(
    q: TensorMap, k: TensorMap, v: TensorMap, out: Pointer, lse: Float32Pointer,
    origins: Origins, strides: Strides, lse_strides: LineStrides, problem: Problem, planes: Varying, section: Varying,
    D: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write out and lse."""
    given = (q, k, v, origins, (out, lse, strides[0], lse_strides), problem, planes, section)
    LINE: gl.constexpr = gl.SliceLayout(1, steps.layout(COLUMNS))
    T: gl.constexpr = Sizes(D, COLUMNS, STAGES)
    forward(given, (None, None), CAUSAL, GROUP, ROWS, LINE, T, _begin, _step, _end, 1)


def read_by(call: Call, tile: Tile) -> list[tuple[Tensor, int, Any]]:
    """Return what Persistent reads: queries, keys and values, with rows per copy and a method of Heads."""
    query, *walked = call.inputs
    map_keys = Heads.mapped if call.problem.dropout.seed is None else Heads.spread
    return [(query, tile.rows, Heads.mapped), *((x, tile.columns, map_keys) for x in walked)]


class Forward(Persistent):
    """The forward pass for one signature that rule.takes() accepts; called like attention.forward.Forward."""

    def __init__(self, call: Call, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """out (B, H, L, DV) and lse (B, H, L): tensors with the layout of the outputs."""
        super().__init__(_forward, call, tile, read_by(call, tile), [out], lse)
