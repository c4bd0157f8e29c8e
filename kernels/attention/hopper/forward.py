"""Attention for long rows on sm_90, forward, in Gluon; what it computes is forward.py's, one folder up.

One program a processor goes through the works. Its copying warp is a few tiles ahead; each of its two warp groups has
64 of a work's 128 queries, and a step is, for tiles t of keys,

    S(t - 1) = Q K(t - 1)^T begins      O += P(t) V(t) begins      P(t - 1) of S(t - 1)      both have ended

so that the tensor cores compute O while the exponentials are taken, and the groups drift apart until one's exponentials
meet the other's products. A step multiplies 64 x COLUMNS x 2 D numbers a group: for D = 64, 8 cycles a score of a
thread, as many as its exponential. FlashAttention-3 (Shah et al. 2024) has this order. Not run on a GPU.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import jit as device
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
from fasttfm.kernels.attention.hopper.steps import Origins
from fasttfm.kernels.attention.launch import Call, strides
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.gluon import jit
from fasttfm.kernels.jit import Launch
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides, TensorMap, Varying
from fasttfm.kernels.philox import with_seed
from fasttfm.kernels.tensor_map import Mapped
from fasttfm.kernels.tiles.table import Tile

LOWEST = gl.constexpr(-3e38)
"""Below every score: the maximum of a row that has seen no key, from which infinity can be subtracted."""


@device
def _copy(
    given, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """Fills the rings: of each work the queries, and its tiles of keys and values from the last to the first."""
    q, k, v, rings, origins, problem, planes, section = given
    turn = 0
    tile = 0
    for number in range(gl.program_id(0), steps.works(problem, planes, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, COLUMNS)
        if work.first_row < work.head.queries:
            shared = plain.keys_of(work.head, GROUP)
            row = work.head.first_query.to(gl.int32) + work.first_row
            steps.fill(rings.q, turn, q, origins.q, work.head, row, 1)
            first = work.head.first_key.to(gl.int32)
            for t in range(work.tiles - 1, -1, -1):
                steps.fill(rings.k, tile, k, origins.k, shared, first + t * COLUMNS, STAGES)
                steps.fill(rings.v, tile, v, origins.v, shared, first + t * COLUMNS, STAGES)
                tile += 1
            turn += 1


@device
def _weights(s, peak, scale, element: gl.constexpr):
    """exp2 of the scores in the element's dtype, what the sums before fade by, their sum, and the running maximum."""
    highest = gl.maximum(peak, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - highest[:, None])
    return p.to(element), gl.exp2(peak - highest), gl.sum(p, 1), highest


@device
def _attend(
    given, WORKER: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Computes and stores 64 queries of each work."""
    rings, cleared, out, lse, out_strides, lse_strides, problem, planes, section = given
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    KEYS: gl.constexpr = [COLUMNS, D]
    element: gl.constexpr = out.dtype.element_ty
    DROP: gl.constexpr = problem.dropout.seed is not None
    # Where a head's keys end before its tensor's, others follow them.
    FOLLOWED: gl.constexpr = problem.spans[0] is not None or problem.spans[1] is not None
    dropout = problem.dropout
    if DROP:
        dropout = with_seed(dropout)
    scale = gl.maximum(problem.scale * plain.LOG2E, 1e-37)  # of 0 times -inf there would be no number
    order = steps.key_order(gl.arange(0, COLUMNS, gl.SliceLayout(0, S_L)), COLUMNS, DROP)
    turn = 0
    tile = 0
    clearings = 0
    for number in range(gl.program_id(0), steps.works(problem, planes, ROWS), gl.num_programs(0)):
        work = steps.work_of(number, planes, problem, section, CAUSAL, ROWS, COLUMNS)
        head = work.head
        if work.first_row < head.queries:
            first_row = work.first_row + 64 * WORKER
            rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, S_L))
            limit = head.visible
            if CAUSAL:
                limit = gl.minimum(rows + (problem.masking.causal_offset + 1), limit)[:, None]
            column = (work.tiles - 1) * COLUMNS
            steps.await_tile(rings.q, turn, 1)
            queries = steps.tile_of(rings.q, turn, 1, [ROWS, D]).slice(64 * WORKER, 64)
            steps.await_tile(rings.k, tile, STAGES)
            keys = steps.tile_of(rings.k, tile, STAGES, KEYS).permute([1, 0])
            zeros = gl.zeros([64, COLUMNS], gl.float32, S_L)
            s = warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            steps.release(rings.k, tile, STAGES)
            s = steps.hide(s, column + order, limit)
            peak = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, S_L))
            p, _, total, peak = _weights(s, peak, scale, element)
            if DROP:
                words = steps.draw(dropout, head.plane, first_row, column, COLUMNS)
                p = steps.drop(p, words, dropout.threshold, COLUMNS)
            p = gl.convert_layout(p, P_L)
            if FOLLOWED:
                if column + COLUMNS > head.visible:
                    steps.await_tile(rings.v, tile, STAGES)
                    values = steps.tile_of(rings.v, tile, STAGES, KEYS)
                    steps.clear(values, column, head.visible, KEYS, WORKER, DROP)
                    mbarrier.arrive(cleared)
                    mbarrier.wait(cleared, clearings & 1)
                    clearings += 1
            acc = gl.zeros([64, D], gl.float32, O_L)
            steps.await_tile(rings.k, tile + 1, STAGES, work.tiles > 1)
            for _ in range(1, work.tiles):
                column -= COLUMNS
                keys = steps.tile_of(rings.k, tile + 1, STAGES, KEYS).permute([1, 0])
                s_token = warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)
                steps.await_tile(rings.v, tile, STAGES)
                values = steps.tile_of(rings.v, tile, STAGES, KEYS)
                o_token = warpgroup_mma(p, values, acc, is_async=True)
                if DROP:
                    words = steps.draw(dropout, head.plane, first_row, column, COLUMNS)
                s = warpgroup_mma_wait(1, [s_token])
                if CAUSAL:
                    if column >= work.free:
                        s = steps.hide(s, column + order, limit)
                following, fade, sum_of_tile, peak = _weights(s, peak, scale, element)
                total = total * fade + sum_of_tile
                if DROP:
                    following = steps.drop(following, words, dropout.threshold, COLUMNS)
                following = gl.convert_layout(following, P_L)
                # A wait is a branch, across which ptxas moves nothing: else the softmax sinks behind the wait for P V.
                steps.await_tile(rings.k, tile + 2, STAGES, column > 0)
                acc, p, following, fade = warpgroup_mma_wait(0, [o_token, p, following, fade])
                steps.release(rings.k, tile + 1, STAGES)
                steps.release(rings.v, tile, STAGES)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O_L))[:, None]
                p = following
                tile += 1
            steps.release(rings.q, turn, 1)
            steps.await_tile(rings.v, tile, STAGES)
            values = steps.tile_of(rings.v, tile, STAGES, KEYS)
            acc = warpgroup_mma(p, values, acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, [acc, p])
            steps.release(rings.v, tile, STAGES)
            tile += 1
            turn += 1
            empty = total == 0.0
            total = gl.where(empty, 1.0, total)
            acc = acc * gl.convert_layout(dropout.keep_scale / total, gl.SliceLayout(1, O_L))[:, None]
            at = first_row + gl.arange(0, 64, gl.SliceLayout(1, O_L))
            steps.store(out, out_strides, acc.to(element), head, head.first_query, at, head.queries)
            line = gl.where(empty, 0.0, peak + gl.log2(total))
            gl.store(lse + plain.line_of(lse_strides, head, head.first_query) + rows, line, mask=rows < head.queries)


@jit
def _forward(
    q: TensorMap, k: TensorMap, v: TensorMap, out: Pointer, lse: Float32Pointer,
    origins: Origins, strides: Strides, lse_strides: LineStrides, problem: Problem, planes: Varying, section: Varying,
    D: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes out and lse."""
    rings = steps.Rings(steps.ring(q, 1), steps.ring(k, STAGES), steps.ring(v, STAGES))
    cleared = steps.barriers(1, steps.WORKERS).index(0)
    fence_async_shared()
    given = (rings, cleared, out, lse, strides[0], lse_strides, problem, planes, section)
    copied = (q, k, v, rings, origins, problem, planes, section)
    gl.warp_specialize(
        [
            (_attend, (given, 0, D, CAUSAL, ROWS, COLUMNS, STAGES)),
            (_attend, (given, 1, D, CAUSAL, ROWS, COLUMNS, STAGES)),
            (_copy, (copied, CAUSAL, GROUP, ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )


class Forward:
    """The forward pass for one signature that rule.takes()."""

    def __init__(self, call: Call, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """out (B, H, L, DV) and lse (B, H, L): memory laid out as that to come."""
        width, drops = call.constants["D"], call.problem.dropout.seed is not None
        heads = queries, keys, values = [heads_of(x) for x in call.inputs]
        self._origins = tuple(x.origin for x in heads)
        works = ceil_div(call.queries, tile.rows) * call.planes
        constants = {name: call.constants[name] for name in ("D", "CAUSAL", "GROUP")}
        constants |= {**tile.sizes, "STAGES": tile.stages, "REGISTERS": 240, "COPY_REGISTERS": 24}
        constants |= {"num_warps": tile.warps // 2, "num_stages": tile.stages}
        self._launch = Launch(_forward, (min(works, call.chip.processors),), constants)
        self._strides = strides(out), LineStrides(*lse.stride()[:2])
        self._numbers = call.planes, section_of(call)
        map_keys = Heads.spread if drops else Heads.mapped
        self._maps = (
            queries.mapped(tile.rows, width), map_keys(keys, tile.columns, width), map_keys(values, tile.columns, width)
        )  # fmt: skip

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, problem: tuple) -> None:
        """Writes the output to out, and to lse the log-sum-exp in base 2."""
        maps = (Mapped(x, *known) for x, known in zip((query, key, value), self._maps))
        self._launch(*maps, out, lse, self._origins, *self._strides, problem, *self._numbers)
