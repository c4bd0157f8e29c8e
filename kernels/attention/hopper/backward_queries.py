"""Attention for long rows on sm_90, dQ and delta, in Gluon; what it computes is backward.py's, one folder up.

The works, the copying warp and the two warp groups are the forward pass'. A step is, for tiles t of keys,

    S(t + 1) = Q K(t + 1)^T begins      dP(t + 1) = dO V(t + 1)^T begins      dQ += dS(t) K(t) begins
    dS(t + 1) of S(t + 1) and dP(t + 1)      dQ has ended

so that the tensor cores compute dQ while the exponentials are taken. Three products of 64 x COLUMNS x D numbers a
group: for D = 64, 12 cycles a score of a thread. Not run on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fasttfm.kernels.attention import steps as plain
from fasttfm.kernels.attention.hopper import steps
from fasttfm.kernels.attention.hopper.rule import Heads, heads_of, section_of
from fasttfm.kernels.attention.hopper.steps import Origin
from fasttfm.kernels.attention.launch import Call, strides
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.gluon import jit
from fasttfm.kernels.jit import Launch
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, TensorMap, Varying
from fasttfm.kernels.philox import with_seed
from fasttfm.kernels.tensor_map import Mapped
from fasttfm.kernels.tiles.table import Tile


class Origins(NamedTuple):
    q: Origin
    k: Origin
    v: Origin
    out: Origin
    dout: Origin


class Rings(NamedTuple):
    """out and dout share the barriers of q, v those of k."""

    q: Any
    out: Any
    dout: Any
    k: Any
    v: Any


@gluon.jit
def _copy(
    given, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """Fills the rings: of each work the queries, and its tiles of keys and values from the last to the first."""
    maps, rings, origins, problem, planes, section = given
    q, k, v, out, dout = maps
    turn = 0
    tile = 0
    for number in range(gl.program_id(0), steps.turns(problem, planes, section, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, COLUMNS)
        if work.first_row < work.head.queries:
            shared = plain.keys_of(work.head, GROUP)
            steps.await_place(rings.q, turn, q.nbytes_per_cta + out.nbytes_per_cta + dout.nbytes_per_cta, 1)
            steps.copy(rings.q, turn, q, origins.q, work.head, work.first_row, 1)
            steps.copy(rings.out, turn, out, origins.out, work.head, work.first_row, 1)
            steps.copy(rings.dout, turn, dout, origins.dout, work.head, work.first_row, 1)
            for t in range(work.tiles - 1, -1, -1):
                steps.await_place(rings.k, tile, k.nbytes_per_cta + v.nbytes_per_cta, STAGES)
                steps.copy(rings.k, tile, k, origins.k, shared, t * COLUMNS, STAGES)
                steps.copy(rings.v, tile, v, origins.v, shared, t * COLUMNS, STAGES)
                tile += 1
            turn += 1


@gluon.constexpr_function
def _row_layout(D):
    """Of a tile (64, D) to be summed by rows: those of a warp group's product, eight neighbours at a time."""
    parts = [[0, 1 << i] for i in range(5, (D - 1).bit_length())]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *parts], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, D],
    )  # fmt: skip


@gluon.jit
def _delta(out, dout, S_L: gl.constexpr):
    """The sums of out * dout by rows, of tiles (64, D) in shared memory."""
    L: gl.constexpr = _row_layout(out.shape[1])
    products = out.load(L).to(gl.float32) * dout.load(L).to(gl.float32)
    return gl.convert_layout(gl.sum(products, 1), gl.SliceLayout(1, S_L))


class Rows(NamedTuple):
    """64 queries as a warp group sees them: device values."""

    plane: Any
    first: Any
    lse: Any
    delta: Any
    free: Any
    """Keys from 0 on that every row sees, in whole tiles."""
    limit: Any
    """Keys that a row sees, (64, 1), or one number for all."""
    scale: Any
    dropout: Any


@gluon.jit
def _draw(rows, column, COLUMNS: gl.constexpr, DROP: gl.constexpr):
    """What says which keys from `column` on are dropped, or None."""
    words = None
    if DROP:
        words = steps.draw(rows.dropout, rows.plane, rows.first, column, COLUMNS)
    return words


@gluon.jit
def _slopes(s, dp, words, rows, column, DROP: gl.constexpr, A_L: gl.constexpr, element: gl.constexpr):
    """dS of the scores s and the gradients dp of their weights (64, COLUMNS), of keys from `column` on, as the left
    operand of a product."""
    COLUMNS: gl.constexpr = s.shape[1]
    p = gl.exp2(s * rows.scale - rows.lse[:, None])
    if DROP:
        kept = steps.drop(dp, words, rows.dropout.threshold, COLUMNS) * rows.dropout.keep_scale
        dp = gl.convert_layout(kept, dp.type.layout, assert_trivial=True)
    ds = p * (dp - rows.delta[:, None])
    if column >= rows.free:
        at = column + steps.key_order(gl.arange(0, COLUMNS, gl.SliceLayout(0, s.type.layout)), COLUMNS, DROP)
        ds = gl.where(at[None, :] < rows.limit, ds, 0.0)
    return gl.convert_layout(ds.to(element), A_L)


@gluon.jit
def _scatter(
    given, WORKER: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Computes and stores the gradient, and delta, of 64 queries of each work."""
    rings, cleared, dq, lse, delta, out_strides, lse_strides, problem, planes, section = given
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    OWN: gl.constexpr = [ROWS, D]
    KEYS: gl.constexpr = [COLUMNS, D]
    element: gl.constexpr = dq.dtype.element_ty
    DROP: gl.constexpr = problem.dropout.seed is not None
    dropout = problem.dropout
    if DROP:
        dropout = with_seed(dropout)
    scale = problem.scale * plain.LOG2E
    zeros = gl.zeros([64, COLUMNS], gl.float32, S_L)
    turn = 0
    tile = 0
    clearings = 0
    for number in range(gl.program_id(0), steps.turns(problem, planes, section, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, COLUMNS)
        if work.first_row < work.head.queries:
            head = work.head
            first_row = work.first_row + 64 * WORKER
            numbers = first_row + gl.arange(0, 64, gl.SliceLayout(1, S_L))
            limit = head.visible
            if CAUSAL:
                limit = gl.minimum(numbers + (problem.masking.causal_offset + 1), limit)[:, None]
            line = plain.line_of(lse_strides, head, 0) + numbers
            inside = numbers < head.queries
            lse_of_rows = gl.load(lse + line, mask=inside, other=0.0)
            steps.await_tile(rings.q, turn, 1)
            queries = steps.tile_of(rings.q, turn, 1, OWN).slice(64 * WORKER, 64)
            outs = steps.tile_of(rings.out, turn, 1, OWN).slice(64 * WORKER, 64)
            douts = steps.tile_of(rings.dout, turn, 1, OWN).slice(64 * WORKER, 64)
            delta_of_rows = _delta(outs, douts, S_L)
            gl.store(delta + line, delta_of_rows, mask=inside)
            rows = Rows(head.plane, first_row, lse_of_rows, delta_of_rows, work.free, limit, scale, dropout)

            column = (work.tiles - 1) * COLUMNS
            steps.await_tile(rings.k, tile, STAGES)
            keys = steps.tile_of(rings.k, tile, STAGES, KEYS)
            values = steps.tile_of(rings.v, tile, STAGES, KEYS)
            # Where a head's keys end before its tensor's, others follow them.
            if problem.spans[0] is not None:  # noqa: SIM102 Triton reads both sides of `and`
                if column + COLUMNS > head.visible:
                    steps.clear(keys, column, head.visible, KEYS, WORKER, DROP)
                    mbarrier.arrive(cleared)
                    mbarrier.wait(cleared, clearings & 1)
                    clearings += 1
            s_token = warpgroup_mma(queries, keys.permute([1, 0]), zeros, use_acc=False, is_async=True)
            dp_token = warpgroup_mma(douts, values.permute([1, 0]), zeros, use_acc=False, is_async=True)
            words = _draw(rows, column, COLUMNS, DROP)
            s, dp = warpgroup_mma_wait(0, [s_token, dp_token])
            ds = _slopes(s, dp, words, rows, column, DROP, A_L, element)
            acc = gl.zeros([64, D], gl.float32, O_L)
            steps.await_tile(rings.k, tile + 1, STAGES, work.tiles > 1)
            for _ in range(1, work.tiles):
                column -= COLUMNS
                keys = steps.tile_of(rings.k, tile, STAGES, KEYS)
                next_keys = steps.tile_of(rings.k, tile + 1, STAGES, KEYS)
                values = steps.tile_of(rings.v, tile + 1, STAGES, KEYS)
                s_token = warpgroup_mma(queries, next_keys.permute([1, 0]), zeros, use_acc=False, is_async=True)
                dp_token = warpgroup_mma(douts, values.permute([1, 0]), zeros, use_acc=False, is_async=True)
                token = warpgroup_mma(ds, keys, acc, is_async=True)
                next_words = _draw(rows, column, COLUMNS, DROP)
                s, dp = warpgroup_mma_wait(1, [s_token, dp_token])
                following = _slopes(s, dp, next_words, rows, column, DROP, A_L, element)
                # A wait is a branch, across which ptxas moves nothing: else the exponentials sink behind that for dQ.
                steps.await_tile(rings.k, tile + 2, STAGES, column > 0)
                acc, ds, following = warpgroup_mma_wait(0, [token, ds, following])
                steps.release(rings.k, tile, STAGES)
                ds = following
                tile += 1
            steps.release(rings.q, turn, 1)
            acc = warpgroup_mma(ds, steps.tile_of(rings.k, tile, STAGES, KEYS), acc, is_async=True)
            acc, ds = warpgroup_mma_wait(0, [acc, ds])
            steps.release(rings.k, tile, STAGES)
            tile += 1
            turn += 1
            at = first_row + gl.arange(0, 64, gl.SliceLayout(1, O_L))
            steps.store(dq, out_strides, (acc * problem.scale).to(element), head, 0, at, head.queries)


@jit
def _backward_queries(
    q: TensorMap, k: TensorMap, v: TensorMap, out: TensorMap, dout: TensorMap, dq: Pointer, lse: Float32Pointer,
    delta: Float32Pointer, origins: Origins, strides: Strides, lse_strides: LineStrides, problem: Problem,
    planes: Varying, section: Varying,
    D: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Writes dq and delta."""
    q_ring, k_ring = steps.ring(q, 1), steps.ring(k, STAGES)
    rings = Rings(
        q_ring, steps.beside(q_ring, out, 1), steps.beside(q_ring, dout, 1), k_ring, steps.beside(k_ring, v, STAGES)
    )  # fmt: skip
    cleared = steps.barriers(1, steps.WORKERS).index(0)
    fence_async_shared()
    given = (rings, cleared, dq, lse, delta, strides[0], lse_strides, problem, planes, section)
    copied = ((q, k, v, out, dout), rings, origins, problem, planes, section)
    gl.warp_specialize(
        [
            (_scatter, (given, 0, D, CAUSAL, ROWS, COLUMNS, STAGES)),
            (_scatter, (given, 1, D, CAUSAL, ROWS, COLUMNS, STAGES)),
            (_copy, (copied, CAUSAL, GROUP, ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers of a thread of the second group and of the copying warp; the first has what is left
    )


class BackwardQueries:
    """dQ and delta for one signature that rule.takes()."""

    def __init__(self, call: Call, tile: Tile, out: Tensor, grad: Tensor, lse: Tensor, d_query: Tensor) -> None:
        """Tensors laid out as those to come."""
        width = call.constants["D"]
        heads = [heads_of(x) for x in (*call.inputs, out, grad)]
        self._origins = tuple(x.origin for x in heads)
        works = ceil_div(call.queries, tile.rows) * call.planes
        constants = {name: call.constants[name] for name in ("D", "CAUSAL", "GROUP")}
        constants |= tile.options() | {"STAGES": tile.stages}
        self._launch = Launch(_backward_queries, (min(works, call.chip.processors),), constants)
        self._strides = strides(d_query), LineStrides(*lse.stride()[:2])
        self._numbers = call.planes, section_of(call)
        of_rows = [x.mapped(tile.rows, width) for x in (heads[0], *heads[3:])]
        map_keys = Heads.mapped if call.problem.dropout.seed is None else Heads.spread
        self._maps = [of_rows[0], *(map_keys(x, tile.columns, width) for x in heads[1:3]), *of_rows[1:]]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad: Tensor, d_query: Tensor, lse: Tensor,
        delta: Tensor, problem: tuple,
    ) -> None:  # fmt: skip
        """Writes d_query and delta; out and lse as the forward pass wrote them."""
        maps = (Mapped(x, *known) for x, known in zip((query, key, value, out, grad), self._maps))
        self._launch(*maps, d_query, lse, delta, self._origins, *self._strides, problem, *self._numbers)
