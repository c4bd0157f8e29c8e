"""Steps of the kernels for sm_90: which work is a program's, which numbers drop what, who has filled what.

A warp copies, two warp groups multiply. A program takes works in turn: a tile of ROWS rows of one head, a section of
heads at a time, whose keys and values the second-level cache holds, and of it the longest rows first.

Dropout costs no exchange between threads: keys are copied in the order of key_order(), in which a warp group's product
gives a thread the sixteen neighbours that one block of Philox serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fasttfm.kernels.attention import steps
from fasttfm.kernels.parameter import Varying
from fasttfm.kernels.philox import ROUNDS, _two_bytes, byte_bits, select

WORKERS = gl.constexpr(2)
"""Warp groups that multiply."""


class Origin(NamedTuple):
    """Where a head's rows begin in a tensor map: in plane b * batch + h * head, from column h * column on."""

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
    """What a program does next: device values."""

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
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)


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
    tma.async_copy_global_to_shared(desc, where, ring.full.index(slot), ring.tiles.index(slot))


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
def place(number, tiles, planes, section, ROWS: gl.constexpr):
    """(first row, plane) of a work: sections of so many planes, the last one of what is left, longest rows first."""
    before = number // (section * tiles)
    rest = number - before * (section * tiles)
    width = gl.minimum(section, planes - before * section)
    return (tiles - 1 - rest // width) * ROWS, before * section + rest % width


@gluon.jit
def works(problem, planes, ROWS: gl.constexpr):
    """How many works there are."""
    return (problem.sizes.L + ROWS - 1) // ROWS * planes


@gluon.jit
def work_of(number, planes, problem, section, CAUSAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The Work of this number: ROWS queries over tiles of COLUMNS keys."""
    first_row, plane = place(number, (problem.sizes.L + ROWS - 1) // ROWS, planes, section, ROWS)
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
def clear(
    ring, cleared, turn, clearings, first_key, visible, WORKER: gl.constexpr, SPREAD: gl.constexpr,
    SHAPE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Zeroes what is not visible of the tile of this turn, keys or values from first_key on, each worker a half: 0 times
    what lies there may be NaN."""
    ROWS: gl.constexpr = SHAPE[0] // 2
    D: gl.constexpr = SHAPE[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    await_tile(ring, turn, STAGES)
    half = tile_of(ring, turn, STAGES, SHAPE).slice(WORKER * ROWS, ROWS)
    at = WORKER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    seen = first_key + key_order(at, SHAPE[0], SPREAD) < visible
    half.store(gl.where(seen[:, None], half.load(L), 0.0))
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, clearings & 1)


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


@gluon.constexpr_function
def _transposed_layout():
    """A warp group's sums (64 keys, 64 queries) as (block, half of the block, key of the half, eight queries, pair, half
    of the pair): a thread's registers in the order of the product's."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 0, 4, 0, 0]],
        [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 4, 0, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]], [], [4, 2, 8, 8, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def _slice(layout, *dims):
    """The layout without these dimensions, the last one first."""
    for dim in dims:
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def _kept_of(dropout, plane, row, block):
    """Sixteen bits, of lane l of the block bit 8 (l % 4) + 7 - l // 4: whether it is kept."""
    w0, w1, w2, w3 = tl.philox(dropout.seed, block, row, plane, dropout.site, ROUNDS)
    return byte_bits(w0, w1, w2, w3, dropout.threshold)


@gluon.jit
def draw_transposed(dropout, plane, first_row, first_key):
    """Whether dropout keeps the scores of 64 keys and 64 queries that a warp group's product gives transposed: of each
    thread 32 bits, (block, key, pair), in the order that drop_transposed() reads.

    A thread has two keys of each block, and eight threads draw what they need together: a thread draws the blocks of
    two queries, and three exchanges transpose eight threads' words. No bit goes through shared memory.
    """
    L: gl.constexpr = _slice(_transposed_layout(), 5, 3, 1)
    blocks = first_key // 16 + gl.arange(0, 4, _slice(L, 2, 1))[:, None, None]
    key = gl.arange(0, 8, _slice(L, 2, 0))[None, :, None]
    row = first_row + 8 * key + 2 * gl.arange(0, 4, _slice(L, 1, 0))[None, None, :]
    word = _kept_of(dropout, plane, row, blocks) | (_kept_of(dropout, plane, row + 1, blocks) >> 4)
    # Threads whose keys differ in one bit exchange what the other needs: odd bits and even ones, halves, bytes.
    odd = key < 4
    return gl.inline_asm_elementwise(
        "{ .reg .b32 own, other; shfl.sync.bfly.b32 other, $1, 16, 0x1f, -1; shf.l.wrap.b32 other, other, other, $2; "
        "lop3.b32 own, $1, other, $3, 0xe4; shfl.sync.bfly.b32 other, own, 8, 0x1f, -1; prmt.b32 own, own, other, $4; "
        "shfl.sync.bfly.b32 other, own, 4, 0x1f, -1; prmt.b32 $0, own, other, $5; }", "=r,r,r,r,r,r",
        [
            word.to(gl.int32, bitcast=True), gl.where(odd, 31, 1), gl.where(odd, -0x55555556, 0x55555555),
            gl.where(key % 4 < 2, 0x5410, 0x3276), gl.where(key % 2 == 0, 0x6240, 0x3715),
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def mark_transposed(weights, word):
    """weights (64 keys, 64 queries), none of which is negative, with a minus sign where they are dropped; word from
    draw_transposed()."""
    L: gl.constexpr = _transposed_layout()
    half = gl.arange(0, 2, _slice(L, 5, 4, 3, 2, 0))[None, :, None, None, None, None]
    eight = gl.arange(0, 8, _slice(L, 5, 4, 2, 1, 0))[None, None, None, :, None, None]
    of_pair = gl.arange(0, 2, _slice(L, 4, 3, 2, 1, 0))[None, None, None, None, None, :]
    to_sign = 24 - 8 * (eight % 4) + eight // 4 + 2 * half + 4 * of_pair
    dropped = gl.expand_dims(gl.expand_dims(gl.expand_dims(~word, 1), 3), 5)
    split = gl.convert_layout(gl.reshape(weights, [4, 2, 8, 8, 4, 2]), L, assert_trivial=True).to(gl.int32, bitcast=True)
    marked = (split ^ ((dropped << to_sign) & -0x80000000)).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(marked, [64, 64]), weights.type.layout, assert_trivial=True)


@gluon.jit
def kept_transposed(marked, element: gl.constexpr):
    """mark_transposed()'s weights in the element's dtype, zero where they are dropped."""
    # In one instruction a pair. gl.maximum() would be computed once for all that ask, and take a register each.
    if element == gl.bfloat16:
        kept = gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [marked], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        kept = gl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [marked], dtype=gl.float16, is_pure=True, pack=2
        )
    return kept
