"""Tiles of the row kernels: as many elements per thread as registers allow, with 16-byte loads.

An AMD warp has 64 threads, so tiles have half as many warps there.
"""

from __future__ import annotations

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.tiles.table import Tile, tiles

MAX_COLUMNS = 8192
"""Widest row of the LayerNorm kernels; with twice as many columns, backward spills in float32."""

NARROWEST = 128
"""Fewest columns of a tile of whole rows, to limit the number of compiled kernels."""


def _layer_norm_alternatives(chip: Chip, columns: int, direction: str) -> list[Tile]:
    """Return tiles with half and twice the rows, and half and twice the elements per thread."""
    shipped = LAYER_NORM.shipped(chip, columns, direction)
    tiles = [Tile(shipped.rows, columns, shipped.warps * 2), Tile(shipped.rows, columns, shipped.warps // 2)]
    if shipped.rows > 1:
        tiles.append(Tile(shipped.rows // 2, columns, max(1, shipped.warps // 2)))
    if columns <= 1024:
        tiles.append(Tile(2 * shipped.rows, columns, shipped.warps * 2))
    return [tile for tile in tiles if 1 <= tile.warps <= 16]


# Whole rows: 2,048 elements or one row per program. Forward: 32 elements per thread, 16 on AMD; elsewhere 16 took a
# fifth more instructions per element, for row sums and per-thread overhead. Backward: 8 elements per thread, because
# the partial sums of parameter gradients stay in registers too.
LAYER_NORM: Choice[Tile] = Choice(
    "layer_norm.tile",
    tiles("""
    columns direction | sm_80     sm_86,sm_89,sm_120  amd         *
    128     forward   | -         -                   -           16x128w2
    256     forward   | -         -                   -           8x256w2
    512     forward   | -         -                   -           4x512w2
    1024    forward   | -         -                   -           2x1024w2
    2048    forward   | -         -                   -           1x2048w2
    4096    forward   | -         -                   -           1x4096w4
    8192    forward   | -         -                   -           1x8192w8
    128     backward  | -         -                   16x128w4    16x128w8
    256     backward  | -         -                   8x256w4     8x256w8
    512     backward  | -         2x512w4             4x512w4     4x512w8   # 4x512w8 spills, float16 or float32
    1024    backward  | 1x1024w4  -                   2x1024w4    2x1024w8  # 2x1024w8 spills, float32, Triton 3.6.0
    2048    backward  | -         -                   1x2048w4    1x2048w8
    4096    backward  | -         -                   -           1x4096w16  # w32: half as many instructions more
    8192    backward  | -         -                   -           1x8192w16  # without the sums
    """),
    _layer_norm_alternatives,
)

# A block of columns, for sums over rows.
COLUMN_SUMS = tiles("| amd *\n | 16x128w2 16x128w4")

# Elementwise passes: 2,048 elements, 32 per thread, 16 on AMD.
PASS = tiles("""
columns | *
128     | 16x128w2
256     | 8x256w2
512     | 4x512w2
""")

# Embedding: 2,048 elements, 32 per thread: half the per-row overhead of 16. 512 columns: half as many rows per thread.
EMBEDDING = tiles("""
columns | amd       *
64      | 32x64w1   32x64w2
128     | 16x128w1  16x128w2
256     | 8x256w1   8x256w2
512     | 4x512w1   2x512w1
""")

# 1,024 pairs: 32 elements per thread.
ROTARY = tiles("""
pairs | amd      *
16    | 64x16w1  64x16w2
32    | 32x32w1  32x32w2
64    | 16x64w1  16x64w2
128   | 8x128w1  8x128w2
""")

# At least one element per thread: with fewer, two warps would sum the same column in different orders and both store
# it.
PARTIAL_SUMS = tiles("| amd *\n | 32x32w1 32x32w2")


def _row_alternatives(chip: Chip, classes: int) -> list[Tile]:
    """Return alternatives for rows of thousands of classes, which take the time."""
    tiles = [Tile.parse(text) for text in ("2048w4", "4096w4", "4096w8", "8192w16")]
    return [tile for tile in tiles if tile.columns <= classes] if classes > 2048 else []


# A whole row of logits up to 4,096 classes, else 4,096 at a time: several small programs per multiprocessor overlap
# loads with computation.
CROSS_ENTROPY = Choice(
    "cross_entropy.row",
    tiles("""
    classes           | amd     *
    512               | -       512w1
    1024              | -       1024w1
    2048              | 2048w1  2048w2
    4096              | 4096w2  4096w4  # 32 elements a thread: with 16 a third more instructions an element
    8192,16384,32768  | 4096w4  4096w8  # HELD elements a thread
    """),
    _row_alternatives,
)

# A beam search step, bound by memory and barrier latency; not run on a GPU. Slots: all in one program. Shares of a
# vocabulary: 32 or 8 logits per thread; a round over 32 takes only twice as long, as it waits equally often. Candidates
# of a slot, rows x candidates per row: 8 to 64 per thread; 64 spill with 16 rows.
SEARCH_SLOTS = tiles("""
slots | amd     *
128   | 128w1   128w2
1024  | 1024w4  1024w8
""")
SEARCH_SHARES = tiles("""
columns | amd     *
1024    | 1024w2  1024w4
4096    | 4096w4  4096w4
""")
SEARCH_CANDIDATES = tiles("""
rows candidates | sm_120   amd        *
8    128        | 8x128w2  -          -         @ 3.9+  # 4 warps spill 8 bytes, as in the next such row
8    128        | -        8x128w2    8x128w4
8    512        | 8x512w8  -          -         @ 3.5
8    512        | -        8x512w4    8x512w4
8    2048       | -        8x2048w8   8x2048w8
16   512        | -        16x512w8   16x512w8
""")
