"""Building blocks of the sm_90 kernels: work items, shared-memory rings with their barriers, dropout.

One warp copies, two warp groups compute. Programs take work items, each a tile of ROWS rows of one head, in the order
of schedule.py.

Dropout needs no exchange between threads: keys are copied in the order of key_order(), so that the product of a warp
group gives each thread the sixteen consecutive keys of one Philox block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.hopper import schedule
from fasttfm.kernels.parameter import Varying
from fasttfm.kernels.philox import ROUNDS, _two_bytes, select

_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.9
WORKERS = gl.constexpr(2)
"""Warp groups that multiply."""


class Origin(NamedTuple):
    """The place of a head's rows in a tensor map: in plane b * batch + h * head, from column h * column on."""

    batch: Varying
    head: Varying
    column: Varying


class Origins(NamedTuple):
    q: Origin
    k: Origin
    v: Origin


class Ring(NamedTuple):
    """Tiles in shared memory that one warp fills and the workers read, in turn."""

    tiles: Any
    full: Any
    """A barrier a tile: its bytes have arrived."""
    empty: Any
    """A barrier a tile: every worker has read it."""


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any


class Work(NamedTuple):
    """A program's next tile of rows: device values."""

    head: Any
    first_row: Any
    tiles: Any
    """Of keys, at least one."""
    free: Any
    """Keys from 0 on that every row sees, in whole tiles."""


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of so many arrivals."""
    each = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(each.index(i), count=ARRIVALS)
    return each


@gluon.jit
def ring(desc, STAGES: gl.constexpr, FILLS: gl.constexpr = 1):
    """An empty Ring of what a tensor map copies; FILLS: arrivals that fill a place."""
    return Ring(_tiles(desc, STAGES), barriers(STAGES, FILLS), barriers(STAGES, WORKERS))


@gluon.jit
def beside(other, desc, STAGES: gl.constexpr):
    """A Ring that is filled and read together with another one: the barriers are the other's."""
    return Ring(_tiles(desc, STAGES), other.full, other.empty)


@gluon.jit
def _tiles(desc, STAGES: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005 Triton reads no star


@gluon.jit
def copy(ring, turn, desc, origin, head, row, STAGES: gl.constexpr):
    """Copies the tile of a head's rows from `row` on to the ring's place of this turn."""
    slot = turn % STAGES
    plane = (head.b * origin.batch + head.h * origin.head).to(gl.int32)
    column = (head.h * origin.column).to(gl.int32)
    if len(desc.block_type.shape) == 5:
        where = [plane, 0, row // 16, 0, column]
    else:
        where = [plane, row, column]
    _load(desc, where, ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def await_place(ring, turn, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Waits until every worker has read what lies in the ring's place of this turn, which so many bytes then fill."""
    slot = turn % STAGES
    mbarrier.wait(ring.empty.index(slot), (turn // STAGES & 1) ^ 1)
    mbarrier.expect(ring.full.index(slot), BYTES)


@gluon.jit
def fill(ring, turn, desc, origin, head, row, STAGES: gl.constexpr):
    """Copies the tile of a head's rows from `row` on to the ring's place of this turn, when all have read it."""
    await_place(ring, turn, desc.nbytes_per_cta, STAGES)
    copy(ring, turn, desc, origin, head, row, STAGES)


@gluon.jit
def await_tile(ring, turn, STAGES: gl.constexpr, needed=True):
    """Waits until the tile of this turn has arrived, if it is needed."""
    mbarrier.wait(ring.full.index(turn % STAGES), turn // STAGES & 1, pred=needed)


@gluon.jit
def tile_of(ring, turn, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """The tile of this turn as a matrix."""
    return ring.tiles.index(turn % STAGES).reshape(SHAPE)


@gluon.jit
def release(ring, turn, STAGES: gl.constexpr):
    """Says that this worker has read the tile of this turn."""
    mbarrier.arrive(ring.empty.index(turn % STAGES))


@gluon.jit
def turns(problem, planes, section, ROWS: gl.constexpr):
    """The count of work_of()'s numbers."""
    return schedule.turns((problem.sizes.L + ROWS - 1) // ROWS, planes, section, gl.num_programs(0))


@gluon.jit
def work_of(number, planes, problem, section, CAUSAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The Work of this number: ROWS queries, which may not exist, over tiles of COLUMNS keys."""
    tiles = (problem.sizes.L + ROWS - 1) // ROWS
    first_row, plane = schedule.place(number, tiles, planes, section, gl.num_programs(0), ROWS)
    head = steps.locate(plane, problem.sizes, problem.spans)
    end, free = steps.key_range(head.visible, first_row, problem.masking.causal_offset, CAUSAL, ROWS, COLUMNS)
    return Work(head, first_row, gl.maximum((end + COLUMNS - 1) // COLUMNS, 1), free)


@gluon.jit
def key_order(at, COLUMNS: gl.constexpr, SPREAD: gl.constexpr):
    """The key of a tile that lies at these places of it: `at` itself, or, spread, as a map [8, COLUMNS / 16, 2] of a
    head's rows brings them."""
    if SPREAD:
        at = at % (COLUMNS // 8) // 2 * 16 + at // (COLUMNS // 8) * 2 + at % 2
    return at


@gluon.jit
def clear(tile, first_key, visible, SHAPE: gl.constexpr, WORKER: gl.constexpr, SPREAD: gl.constexpr):
    """Zeroes this worker's half of a tile of keys or values past the visible ones: 0 times NaN is NaN."""
    KEYS: gl.constexpr = SHAPE[0]
    D: gl.constexpr = SHAPE[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    half = tile.slice(WORKER * (KEYS // 2), KEYS // 2)
    at = WORKER * (KEYS // 2) + gl.arange(0, KEYS // 2, gl.SliceLayout(1, L))
    seen = first_key + key_order(at, KEYS, SPREAD) < visible
    half.store(gl.where(seen[:, None], half.load(L), 0.0))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def anew(x):
    """The number x, which the compiler takes for another: what follows of it is computed where it is used, and not kept
    in registers from before."""
    if x.dtype.primitive_bitwidth == 64:
        x = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@gluon.jit
def store(out, strides, values, head, first, at, end):
    """Writes values to the rows `at` of a head before `end`, counted from its row `first` in the tensor's own count."""
    columns = gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))
    start = out + steps.row_at(strides, head.b, head.h, first)
    gl.store(start + at.to(gl.int64)[:, None] * strides[2] + columns[None, :], values, mask=(at < end)[:, None])


@gluon.constexpr_function
def lane_layout(COLUMNS):
    """A warp group's sums (64, COLUMNS) of spread keys as (row, pair of a block, set of four blocks, block, half of the
    pair): a thread's registers in the order of the product's."""
    sets = [[0, 0, 1 << i, 0, 0] for i in range((COLUMNS // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], *sets, [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]], [], [64, 8, COLUMNS // 64, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def _of_words(COLUMNS):
    """Layout of a block's words, (row, set of four blocks, block)."""
    return gl.SliceLayout(1, gl.SliceLayout(4, lane_layout(COLUMNS)))


@gluon.jit
def draw(dropout, plane, first_row, first_key, COLUMNS: gl.constexpr):
    """The four words of every block of 64 rows and COLUMNS keys, each (64, COLUMNS / 64, 4)."""
    W: gl.constexpr = _of_words(COLUMNS)
    rows = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, W)))
    sets = gl.arange(0, COLUMNS // 64, gl.SliceLayout(0, gl.SliceLayout(2, W)))
    blocks = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    blocks = (first_key // 16 + sets * 4)[None, :, None] + blocks[None, None, :]
    return tl.philox(dropout.seed, blocks, (first_row + rows)[:, None, None], plane, dropout.site, ROUNDS)


@gluon.jit
def _as_pairs(word):
    """A block's word beside its pairs, of which it has two."""
    return gl.expand_dims(word.to(gl.int32, bitcast=True), 1)


@gluon.jit
def drop(weights, words, threshold, COLUMNS: gl.constexpr):
    """weights (64, COLUMNS) of 16 bits, of spread keys, where their lanes keep them, else zero; words from draw()."""
    L: gl.constexpr = lane_layout(COLUMNS)
    w0, w1, w2, w3 = words
    pairs = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L)))))
    pairs = pairs[None, :, None, None]
    lower = gl.where(pairs < 2, _as_pairs(w0), _as_pairs(w1))
    word = gl.where(pairs < 4, lower, gl.where(pairs < 6, _as_pairs(w2), _as_pairs(w3)))
    half = gl.arange(
        0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    )[None, None, None, None, :]  # fmt: skip
    lane = (gl.expand_dims(_two_bytes(word, pairs % 2), 4) >> (16 * half)).to(gl.int16)
    kept = gl.convert_layout(gl.reshape(weights, [64, 8, COLUMNS // 64, 4, 2]), L)
    return gl.reshape(select(kept, lane, threshold), [64, COLUMNS])
