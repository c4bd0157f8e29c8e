"""Building blocks of the sm_90 and sm_100 kernels: work items, shared-memory rings with their mbarriers, dropout.

A producer warp copies, two consumer warp groups (workers) compute. Programs take work items, each a tile of ROWS rows
of one head, in the order of schedule.py. A turn is the running number of a tile in its ring.

Dropout needs no exchange between threads: keys are copied in the order of key_order(), so that the accumulator gives
each thread the sixteen consecutive keys of one Philox block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.hopper import schedule
from fasttfm.kernels.parameter import Varying
from fasttfm.kernels.philox import ROUNDS, _two_bytes, select

_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.9
WORKERS = gl.constexpr(2)
"""Consumer warp groups."""


class Origin(NamedTuple):
    """Position of a head's rows in a tensor map: plane b * batch + h * head, from column h * column on."""

    batch: Varying
    head: Varying
    column: Varying


class Origins(NamedTuple):
    q: Origin
    k: Origin
    v: Origin


class Ring(NamedTuple):
    """Circular buffer of tiles in shared memory, filled by the producer and read by the workers."""

    tiles: Any
    """The buffers of each part of the columns (rule.part_of())."""
    full: Any
    """One mbarrier per slot: the tile has arrived."""
    empty: Any
    """One mbarrier per slot: every worker has read the tile."""


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any


class Work(NamedTuple):
    """A work item, a tile of rows of one head: device values."""

    head: Any
    first_row: Any
    begin: Any
    """First key tile: 0 without a window."""
    tiles: Any
    """End of the key tiles, at least begin + 1."""
    whole: Any
    free: Any
    """Every row sees the keys [whole, free), whole tiles; whole is 0 without a window."""


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT mbarriers that take ARRIVALS arrivals each."""
    each = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(each.index(i), count=ARRIVALS)
    return each


@gluon.jit
def ring(desc, D: gl.constexpr, STAGES: gl.constexpr, FILLS: gl.constexpr = 1):
    """Allocate an empty Ring for tiles of D columns, copied by a tensor map; FILLS: arrivals that fill a slot."""
    return Ring(_tiles(desc, D, STAGES), barriers(STAGES, FILLS), barriers(STAGES, WORKERS))


@gluon.jit
def beside(other, desc, D: gl.constexpr, STAGES: gl.constexpr):
    """Allocate a Ring that is filled and read together with another one, and shares its barriers."""
    return Ring(_tiles(desc, D, STAGES), other.full, other.empty)


@gluon.jit
def _tiles(desc, D: gl.constexpr, STAGES: gl.constexpr):
    tiles = ()
    for _ in gl.static_range(D // desc.block_type.shape[-1]):
        part = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005 Triton has no star
        tiles += (part,)  # type: ignore[assignment]
    return tiles


@gluon.jit
def copy(ring, turn, desc, origin, head, row, STAGES: gl.constexpr):
    """Start the copy of a head's rows from `row` on to the slot of this turn."""
    slot = turn % STAGES
    plane = (head.b * origin.batch + head.h * origin.head).to(gl.int32)
    column = (head.h * origin.column).to(gl.int32)
    WIDTH: gl.constexpr = desc.block_type.shape[-1]
    PARTS: gl.constexpr = len(ring.tiles)
    for i in gl.static_range(PARTS):
        if len(desc.block_type.shape) == 5:
            where = [plane, 0, row // 16, 0, column + i * WIDTH]
        else:
            where = [plane, row, column + i * WIDTH]
        _load(desc, where, ring.full.index(slot), ring.tiles[i].index(slot))


@gluon.jit
def await_place(ring, turn, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Wait until every worker has read the slot of this turn, then let it expect BYTES bytes of each part."""
    slot = turn % STAGES
    mbarrier.wait(ring.empty.index(slot), (turn // STAGES & 1) ^ 1)
    mbarrier.expect(ring.full.index(slot), BYTES * len(ring.tiles))


@gluon.jit
def fill(ring, turn, desc, origin, head, row, STAGES: gl.constexpr):
    """Copy a head's rows from `row` on to the slot of this turn, once every worker has read it."""
    await_place(ring, turn, desc.nbytes_per_cta, STAGES)
    copy(ring, turn, desc, origin, head, row, STAGES)


@gluon.jit
def await_tile(ring, turn, STAGES: gl.constexpr, needed=True):
    """Wait until the tile of this turn has arrived, if it is needed."""
    mbarrier.wait(ring.full.index(turn % STAGES), turn // STAGES & 1, pred=needed)


@gluon.jit
def tile_of(ring, turn, STAGES: gl.constexpr, ROWS: gl.constexpr):
    """Return the parts of this turn's tile, each a matrix of ROWS rows."""
    slot = turn % STAGES
    return [part.index(slot).reshape([ROWS, part.shape[-1]]) for part in ring.tiles]


@gluon.jit
def half_of(parts, WORKER: gl.constexpr):
    """Return the rows of a worker from the parts of a tile."""
    return [part.slice(part.shape[0] // 2 * WORKER, part.shape[0] // 2) for part in parts]


@gluon.constexpr_function
def layout(COLUMNS):
    """Layout of a warp group's accumulator (64, COLUMNS)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])


@gluon.jit
def zeros_of(parts):
    """Return accumulators (64, D) of zeros, with the parts of a tile."""
    WIDTH: gl.constexpr = parts[0].shape[1]
    return [gl.zeros([64, WIDTH], gl.float32, layout(WIDTH)) for _ in parts]


@gluon.jit
def scores(rows, keys):
    """Start rows keys^T, (64, COLUMNS), from the parts of both."""
    COLUMNS: gl.constexpr = keys[0].shape[0]
    PARTS: gl.constexpr = len(keys)
    s = gl.zeros([64, COLUMNS], gl.float32, layout(COLUMNS))
    for i in gl.static_range(PARTS):
        s = warpgroup_mma(rows[i], keys[i].permute([1, 0]), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def add(acc, weights, values):
    """Start acc += weights values; acc and values in parts."""
    PARTS: gl.constexpr = len(values)
    sums = ()
    for i in gl.static_range(PARTS):
        sums += (warpgroup_mma(weights, values[i], acc[i], is_async=True),)
    return sums


@gluon.jit
def times(acc, factor):
    """Return acc, in parts, with its rows multiplied by factor (64,)."""
    return [x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None] for x in acc]


@gluon.jit
def release(ring, turn, STAGES: gl.constexpr):
    """Signal that this worker has read the tile of this turn."""
    mbarrier.arrive(ring.empty.index(turn % STAGES))


@gluon.jit
def turns(problem, planes, section, ROWS: gl.constexpr):
    """Return how many numbers work_of() takes."""
    return schedule.turns((problem.sizes.L + ROWS - 1) // ROWS, planes, section, gl.num_programs(0))


@gluon.jit
def work_of(number, planes, problem, section, CAUSAL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the Work of this number: ROWS queries, which may lie past the head's last, and tiles of COLUMNS keys."""
    tiles = (problem.sizes.L + ROWS - 1) // ROWS
    first_row, plane = schedule.place(number, tiles, planes, section, gl.num_programs(0), ROWS)
    head = steps.locate(plane, problem.sizes, problem.spans)
    end, free = steps.key_range(head.visible, first_row, problem.masking.causal_offset, CAUSAL, ROWS, COLUMNS)
    tiles = gl.maximum((end + COLUMNS - 1) // COLUMNS, 1)
    begin = 0
    whole = 0
    if problem.masking.window is not None:
        start, whole = steps.window_range(first_row, problem.masking, free, ROWS, COLUMNS)
        begin = gl.minimum(start // COLUMNS, tiles - 1)
    return Work(head, first_row, begin, tiles, whole, free)


class Seen(NamedTuple):
    """The keys that each row of a tile sees: device values."""

    first: Any
    """(R, 1); None without a window."""
    end: Any
    """(R, 1), or one number for all rows."""


@gluon.jit
def seen_keys(rows, visible, masking, CAUSAL: gl.constexpr):
    """Return the Seen of the rows (R,)."""
    first = None
    end = visible
    if CAUSAL:
        end = gl.minimum(rows + (masking.causal_offset + 1), visible)[:, None]
    if masking.window is not None:
        first = (rows + (masking.causal_offset - masking.window))[:, None]
    return Seen(first, end)


@gluon.jit
def hide(x, column, seen, hidden: gl.constexpr, COLUMNS: gl.constexpr, SPREAD: gl.constexpr):
    """Return x (R, COLUMNS), for the keys from `column` on, with `hidden` where a row does not see the key."""
    at = gl.arange(0, COLUMNS, gl.SliceLayout(0, x.type.layout))
    keys = (column + key_order(at, COLUMNS, SPREAD))[None, :]
    is_seen = keys < seen.end
    if seen.first is not None:
        is_seen &= keys >= seen.first
    return gl.where(is_seen, x, hidden)


@gluon.jit
def key_order(at, COLUMNS: gl.constexpr, SPREAD: gl.constexpr):
    """Return which key of a tile is in its row `at`: `at` itself, or with SPREAD the order in which a tensor map
    [8, COLUMNS / 16, 2] copies a head's rows."""
    if SPREAD:
        at = at % (COLUMNS // 8) // 2 * 16 + at // (COLUMNS // 8) * 2 + at % 2
    return at


@gluon.jit
def clear(parts, first_key, visible, WORKER: gl.constexpr, SPREAD: gl.constexpr):
    """Zero the rows past the visible keys in this worker's half of a key or value tile, as 0 * NaN is NaN."""
    KEYS: gl.constexpr = parts[0].shape[0]
    WIDTH: gl.constexpr = parts[0].shape[1]
    PARTS: gl.constexpr = len(parts)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    at = WORKER * (KEYS // 2) + gl.arange(0, KEYS // 2, gl.SliceLayout(1, L))
    seen = first_key + key_order(at, KEYS, SPREAD) < visible
    halves = half_of(parts, WORKER)
    for i in gl.static_range(PARTS):
        halves[i].store(gl.where(seen[:, None], halves[i].load(L), 0.0))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def anew(x):
    """Return x through an opaque move: the compiler recomputes what depends on it at the point of use, instead of
    keeping it in registers."""
    if x.dtype.primitive_bitwidth == 64:
        x = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@gluon.jit
def store(out, strides, parts, head, first, at, end):
    """Store a tile to the rows `at` < `end` of a head, counted from the tensor's row `first`."""
    WIDTH: gl.constexpr = parts[0].shape[1]
    PARTS: gl.constexpr = len(parts)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, parts[0].type.layout))
    start = out + steps.row_at(strides, head.b, head.h, first)
    places = start + at.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    for i in gl.static_range(PARTS):
        gl.store(places + i * WIDTH, parts[i].to(out.dtype.element_ty), mask=(at < end)[:, None])


@gluon.constexpr_function
def lane_layout(COLUMNS, ROWS=64):
    """Layout of a warp group's accumulator (ROWS, COLUMNS) of spread keys as (row, pair of a block, set of four blocks,
    block, half of the pair), with the accumulator's register order. ROWS: 64, or in tensor memory 128, one a thread."""
    sets = [[0, 0, 1 << i, 0, 0] for i in range((COLUMNS // 64).bit_length() - 1)]
    if ROWS == 128:
        rows = [[1 << i, 0, 0, 0, 0] for i in range(7)]
        blocks, pairs = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0]], [[0, 1 << i, 0, 0, 0] for i in range(3)]
        of_thread = [[0, 0, 0, 0, 1], *blocks, *sets, *pairs]
        return gl.DistributedLinearLayout(of_thread, rows[:5], rows[5:], [], [ROWS, 8, COLUMNS // 64, 4, 2])
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], *sets, [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]], [], [64, 8, COLUMNS // 64, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def _of_words(COLUMNS, ROWS):
    """Layout of one word per block: (row, set of four blocks, block)."""
    return gl.SliceLayout(1, gl.SliceLayout(4, lane_layout(COLUMNS, ROWS)))


@gluon.jit
def draw(dropout, plane, first_row, first_key, COLUMNS: gl.constexpr, ROWS: gl.constexpr = 64):
    """Return the four Philox words of every block of ROWS rows and COLUMNS keys, each (ROWS, COLUMNS / 64, 4)."""
    W: gl.constexpr = _of_words(COLUMNS, ROWS)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, W)))
    sets = gl.arange(0, COLUMNS // 64, gl.SliceLayout(0, gl.SliceLayout(2, W)))
    blocks = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    blocks = (first_key // 16 + sets * 4)[None, :, None] + blocks[None, None, :]
    return tl.philox(dropout.seed, blocks, (first_row + rows)[:, None, None], plane, dropout.site, ROUNDS)


@gluon.jit
def _as_pairs(word):
    """Add an axis for the pairs of the block to one of its words, as int32."""
    return gl.expand_dims(word.to(gl.int32, bitcast=True), 1)


@gluon.jit
def drop(weights, words, threshold, COLUMNS: gl.constexpr):
    """Zero the weights (ROWS, COLUMNS) of spread keys, 16 or 32 bits, that are dropped; words from draw()."""
    ROWS: gl.constexpr = weights.shape[0]
    L: gl.constexpr = lane_layout(COLUMNS, ROWS)
    w0, w1, w2, w3 = words
    pairs = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L)))))
    pairs = pairs[None, :, None, None]
    lower = gl.where(pairs < 2, _as_pairs(w0), _as_pairs(w1))
    word = gl.where(pairs < 4, lower, gl.where(pairs < 6, _as_pairs(w2), _as_pairs(w3)))
    half = gl.arange(
        0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    )[None, None, None, None, :]  # fmt: skip
    lane = (gl.expand_dims(_two_bytes(word, pairs % 2), 4) >> (16 * half)).to(gl.int16)
    kept = gl.convert_layout(gl.reshape(weights, [ROWS, 8, COLUMNS // 64, 4, 2]), L)
    return gl.reshape(select(kept, lane, threshold), [ROWS, COLUMNS])
