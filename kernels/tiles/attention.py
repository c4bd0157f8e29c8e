"""Tiles of the attention kernels and of masked_softmax.py: rows are queries, columns are keys.

kind: launch.product_kind(); width: the larger head size, in classes 64, 128 and 256; extras: 1 dropout, 2 a mask,
3 a window, soft cap or slopes, 4 shared keys (extras() in attention/launch.py); keys: key_class() of a row.

Selection: no spills from sm_80 on with Triton 3.7.1, and with 3.9 in rows of its own (other versions:
docs/compile-matrix.md); 48 KiB of shared memory on older chips; in half precision on sm_80 and sm_90, tensor cores as
the busiest unit where possible. Extras are size classes because dropout takes registers, and a mask tile as many as the
scores. Where cells of a row differ only by chip, the larger tile spills on the other chip.

Timed on an H100, in half precision and without mask, window, soft cap and slopes: the sm_90 forward tiles for heads of
64 and 128, and both passes for rows of 17 to 32 keys, are the fastest whose results were checked; some spill up to 48
bytes. Backward tiles of long rows without shared keys were timed without checking results; executing their PTX does.
No other tile has been timed (docs/gpu-predictions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.tiles.table import Table, Tile, tiles


def _each(tiles: str, stages: Iterable[int]) -> list[Tile]:
    return [Tile.parse(f"{tile}s{number}") for tile in tiles.split() for number in stages]


def _in_gluon(name: str, alternatives: Callable[..., list[Tile]]) -> Choice[Tile | str]:
    """Return a choice, for calls that hopper/rule.py accepts: a tile of a kernel in Gluon, or triton, the kernel for
    every chip. Not run on a GPU."""
    table = Table(
        """
        kind  width  extras  keys | sm_90  *
        *     *      *       *    | -      triton
        """,
        lambda cell: cell if cell == "triton" else Tile.parse(cell),
    )
    return Choice(f"attention.{name}", table, alternatives)


def _hopper_alternatives(chip: Chip, kind: str, width: int, extras: int, keys: int) -> list[Tile]:
    if width == 256:  # a window spills in the loop
        return _each("128x64w4", (2,) * (extras != 3))
    if width == 128 and extras == 3:  # a window: with dropout the others spill more than 40 bytes
        return _each("128x64w4", (3,))
    return [*_each("128x128w4", (2, 3) if width == 64 else (2,) * (extras != 3)), *_each("128x64w4", (2, 3))]


def _blackwell_alternatives(chip: Chip, kind: str, width: int, extras: int, keys: int) -> list[Tile]:
    if width == 64:
        return _each("256x128w4", (2,))
    return _each("256x64w4", (2,) * (width == 128 and extras != 3))  # a window with dropout spills in the loop


def _backward_alternatives(chip: Chip, *size: Any) -> list[Tile]:
    stages = (1,) if 100 <= chip.capability < 120 else (1, 2, 3)
    return _each("128x64w8 64x128w8 64x64w8 64x64w4 64x32w4 32x64w4 32x128w8 32x32w4", stages)


def _launches_alternatives(chip: Chip, kind: str, width: int, extras: int, *size: Any) -> list[int]:
    try:
        BACKWARD_HEADS.shipped(chip, kind, width, extras)
    except ValueError:
        return [2]
    return [1, 2]


def _short_alternatives(chip: Chip, kind: str, width: int, extras: int, keys: int) -> list[Tile]:
    tiles = [Tile(rows, keys, warps) for rows in (16, 32, 64) for warps in (1, 2, 4, 8) if rows <= 2 * keys]
    # most spill above 64 scores per thread
    return [tile for tile in tiles if tile.rows * tile.columns <= 64 * 32 * tile.warps]


def _short_backward_alternatives(chip: Chip, kind: str, width: int, extras: int, keys: int) -> list[Tile]:
    """Exclude 16 x 128 tiles below 8 warps: ptxas 12.8.93 miscompiles them on sm_90 with four (docs/assemblers.md)."""
    tiles = _short_alternatives(chip, kind, width, extras, keys)
    return [tile for tile in tiles if not (tile.rows == 16 and keys == 128 and tile.warps < 8)]


def _softmax_alternatives(chip: Chip, keys: int) -> list[Tile]:
    rows = [rows for rows in (1, 2, 4, 8, 16, 32) if 1024 <= rows * keys <= 8192]
    return [Tile(r, keys, warps) for r in rows for warps in (1, 2, 4, 8)]


# Most keys of a row in attention/short.py, where a program holds all keys and values of a head, their gradients and its
# scores.
SHORT_KEYS = Table(
    """
    kind  width | sm_60,sm_70,sm_75  simt,amd  sm_120  sm_80+
    fp32  64    | 32                 32        16      32
    tf32  64    | -                  -         32      64
    half  64    | 32                 64        64      128
    half  128   | 16                 32        32      64
    *     *     | 0                  0         0       0
    """,
    int,
)

# Largest head size of the kernels for long rows. IEEE float32 has no matrix units on NVIDIA chips, so Triton keeps
# whole rows of both operands in registers: wider heads spill or exceed shared memory with every tile.
LONG_WIDTH = Table(
    """
    kind | sm_60,sm_70,sm_75  sm_80+  *
    fp32 | 128                64      256
    *    | 256                256     256
    """,
    int,
)

# attention/forward.py. Warp group matrix instructions (sm_90, sm_100) read operands from shared memory; sm_80, sm_90
# and sm_100 have enough of it for three stages. fp32: with 32x32 on eight warps the compiler spills a little to raise
# occupancy.
FORWARD = Choice(
    "attention.forward",
    tiles("""
    kind  width  extras | simt     amd      sm_80       sm_86,sm_89  sm_90       sm_100      sm_120
    # sm_80: 32x32w8 spills 8 bytes, and with extras 3 16x64w8; sm_86, sm_89: 32x16w8 spills 16 bytes
    fp32  64     3      | -        -        16x32w8     -            -           -           -
    fp32  64     *      | 32x32w8  32x32w8  16x64w8     32x16w4      32x32w4     16x32w4     32x16w8
    fp32  128    *      | 16x32w8  16x32w8  -           -            -           -           -
    fp32  256    *      | 16x16w8  16x16w8  -           -            -           -           -
    tf32  64     3      | -        -        -           -            -           64x32w8     -  # w4 spills 24 bytes
    tf32  64     2,3    | -        -        -           -            -           -           64x32w8
    tf32  64     *      | -        -        64x32w4     64x32w4      64x32w4     64x32w4     64x32w4
    tf32  128    *      | -        -        32x32w4     32x32w4      32x32w4     32x32w4     32x32w4
    tf32  256    *      | -        -        32x32w8     32x32w8      32x32w8     32x32w8     32x32w8
    half  64     0      | -        -        128x64w8s3  -            -           -           -  @ 3.9+  # w4: 8 bytes
    half  64     0      | 32x32w8  64x32w4  128x64w4s3  128x64w4s2   128x64w8s3  128x64w4s3  64x32w4s2
    half  64     1,4    | 32x32w8  64x32w4  128x64w8s3  64x32w4s2    128x64w4s3  64x64w4s3   64x32w4s2
    # sm_80: 8 bytes with a soft cap and a mask; sm_100: 128x32w4 spills 48 bytes so
    half  64     3      | -        -        128x64w8s3  -            -           128x32w8s3  -
    half  64     2,3    | 32x32w8  64x32w4  128x64w8s2  64x32w4s2    128x64w8s3  128x32w4s3  64x32w4s2
    half  128    0      | 16x32w8  64x32w4  128x64w8s2  64x64w8s2    64x64w4s3   128x64w8s3  64x64w8s2
    half  128    1,4    | 16x32w8  64x32w4  128x64w8s2  64x32w4s2    128x64w8s3  64x32w4s3   64x32w8s2
    half  128    3      | -        -        -           -            -           -           64x32w8s2
    half  128    2,3    | 16x32w8  64x32w4  128x32w8s3  64x64w8s2    128x64w8s3  128x32w8s3  32x64w4s2
    half  256    0      | 16x16w8  32x32w4  64x32w8s2   64x32w8s2    64x32w8s2   64x32w8s2   64x32w8s2
    half  256    *      | 16x16w8  32x32w4  32x32w8s2   32x32w8s2    32x32w8s2   32x32w8s2   32x32w8s2
    """),
    lambda *size: _each("128x64w4 128x64w8 128x32w4 64x64w4 64x32w4 32x32w4", (2, 3)),
)

# cudnn or kernels, forward and backward, for calls that both support (functional/attention/library.py). On an H100,
# both passes of 1,024 causal rows took cuDNN 506 us with 16 x 16 heads of 64 and 418 us with 16 x 8 heads of 128, and
# those of 4,096 rows 1,275 and 1,036 us; our kernels were recorded at 800, 739, 2,190 and 1,820 us and are predicted at
# 563, 606, 1,474 and 1,386 us. 2,048 rows are interpolated. Not run on a GPU as shipped.
LIBRARY = Choice(
    "attention.library",
    Table(
        """
        kind  width   masking  keys            | sm_90  *
        half  64,128  causal   1024,2048,4096  | cudnn  kernels
        *     *       *        *               | -      kernels
        """,
        str,
    ),
    lambda *size: ("cudnn", "kernels"),
)

# attention/hopper/forward.py. Each of the two consumer warp groups has half of the rows.
HOPPER_FORWARD = _in_gluon("forward.hopper", _hopper_alternatives)

# attention/blackwell.py. Each of the two workers has half of the rows, the lanes of tensor memory.
BLACKWELL_FORWARD = _in_gluon("forward.blackwell", _blackwell_alternatives)

# attention/backward.py, dQ. sm_100 takes one stage in both backward kernels: with more, Triton 3.7.1 hoists the
# fence.proxy.async of both products out of the loop, so that matrix units read data that no fence made visible.
BACKWARD_QUERIES = Choice(
    "attention.backward_queries",
    tiles("""
    kind  width  extras | simt     amd      sm_80       sm_86,sm_89  sm_90       sm_100     sm_120
    fp32  64     *      | 32x32w8  32x32w8  32x32w8     32x32w8      32x32w8     32x32w8    32x32w8
    fp32  128    *      | 16x16w8  16x16w8  -           -            -           -          -
    fp32  256    *      | -        32x16w4  -           -            -           -          -  # gfx11 too: w8 spills
    fp32  256    *      | 16x16w8  -        -           -            -           -          -
    tf32  64     *      | -        -        32x32w8     32x32w8      32x32w8     32x32w8    32x32w8
    # sm_80: 32x32 spills 48 bytes
    tf32  128    0,1,4  | -        -        16x64w4     16x32w4      32x32w4     32x32w4    16x32w8
    tf32  128    2,3    | -        -        16x32w4     16x32w4      16x32w4     16x32w4    16x32w8
    tf32  256    *      | -        -        16x32w8     16x32w8      16x32w8     16x32w8    16x32w8
    half  64     0      | 32x32w8  32x32w4  128x64w8s2  128x64w8s2   64x64w4s3   128x32w4   128x64w8s2
    # sm_100: 128x32w4 spills 8 bytes
    half  64     1,4    | 32x32w8  32x32w4  128x64w8s2  64x32w4s2    64x64w4s3   128x64w8   64x32w8s2
    # sm_100: with a window and a mask 128x32w4 spills 80 bytes (184 at 128)
    half  64     3      | -        -        -           -            128x32w8s2  64x32w4    -
    half  64     2,3    | 32x32w8  32x32w4  64x32w4s2   128x32w8s2   128x64w8s2  128x32w4   64x32w4s2
    half  128    0      | 16x16w8  32x32w4  128x32w8s2  64x32w4s2    128x64w8s3  64x64w4    64x32w4s2
    half  128    1,4    | 16x16w8  32x32w4  128x32w8s2  64x32w8s2    128x64w8s3  128x32w4   64x32w8s2
    # sm_120: 64x32 spills 88 bytes
    half  128    3      | -        -        128x32w8s2  -            -           128x32w8   -
    half  128    2,3    | 16x16w8  32x32w4  32x64w4s2   32x64w8s2    128x32w8s2  128x32w4   32x64w8s2
    half  256    0      | 16x16w8  32x16w8  64x32w8     64x32w8      32x32w8s2   64x32w8    64x32w8
    half  256    *      | 16x16w8  32x16w8  32x32w8     32x32w8      32x32w8     32x32w8    32x32w8
    """),
    _backward_alternatives,
)

# attention/backward.py, dK and dV. The rows of their products are a tile's keys: 16 per warp, 64 per warp group. Eight
# warps share 128 keys, or 32 keys and 128 queries; with 64 keys they would compute every score twice.
BACKWARD_KEYS = Choice(
    "attention.backward_keys",
    tiles("""
    kind  width  extras | simt     amd      sm_80       sm_86,sm_89  sm_90       sm_100     sm_120
    fp32  64     0,1,4  | 16x32w8  16x32w8  16x32w8     16x32w8      16x16w8     16x16w8    16x16w8
    # sm_80, sm_86, sm_89: with shared keys 16x32 spills 8 bytes
    fp32  64     2,3    | 16x32w8  16x32w8  16x16w8     16x16w8      16x16w8     16x16w8    16x16w8
    fp32  128    *      | 16x16w8  16x16w8  -           -            -           -          -
    fp32  256    *      | -        16x32w4  -           -            -           -          -  # gfx11 too: w8 spills
    fp32  256    *      | 16x16w8  -        -           -            -           -          -
    # sm_90: 32x32 spills 16 bytes; with extras 3 it does on sm_80, sm_86 and sm_89, and 32 bytes on sm_100
    tf32  64     0,1,4  | -        -        32x32w4     32x32w4      32x32w4     32x32w4    32x32w4
    tf32  64     2      | -        -        32x32w4     32x32w4      16x16w4     32x32w4    32x32w4
    tf32  64     3      | -        -        32x32w8     32x32w8      16x16w4     16x32w4    32x32w4
    tf32  128    *      | -        -        32x32w8     32x32w8      32x32w8     32x32w8    32x32w8
    tf32  256    *      | -        -        16x16w8     16x16w8      16x16w8     16x16w8    16x16w8
    half  64     0      | 16x32w8  32x32w4  32x128w8s2  128x32w8s2   64x64w4s3   128x32w4   128x32w8s2
    # sm_90 with shared keys: 32x64w4s3 spills 40 bytes
    half  64     1      | -        -        -           -            32x64w4s3   -          -
    half  64     1,4    | 16x32w8  32x32w4  32x128w8    128x32w8s2   32x128w8s2  64x32w4    128x32w8s2
    half  64     2,3    | 16x32w8  32x32w4  32x128w8    32x32w4      32x64w4     64x32w4    32x32w4
    # amd: 32x32w8 spills 108 bytes; sm_90: 32x128w8s3 spills 8 bytes with dropout (16 under 3.9), 96 with shared keys
    half  128    0      | 16x16w8  16x64w8  16x128w8    32x64w8s2    32x128w8s3  32x128w8   32x64w8s2
    half  128    1      | -        -        -           -            16x128w8    -          -  @ 3.9+
    half  128    1      | -        -        -           -            32x128w8s3  32x128w8   -  # shared keys spill 16
    half  128    1,4    | 16x16w8  16x64w8  16x128w8    32x64w8s2    16x128w8    32x32w4    32x64w8s2
    half  128    2,3    | 16x16w8  16x64w8  128x32w8    32x32w4      128x32w8    32x64w4    32x32w4
    half  256    0      | 16x16w8  16x16w8  32x32w8     32x32w8      32x32w8     32x32w8    32x32w8
    half  256    *      | 16x16w8  16x16w8  16x32w8     16x32w8      16x32w8     16x32w8    16x32w8
    """),
    _backward_alternatives,
)

# attention/hopper/backward_queries.py and backward_keys.py, with 64 queries or 64 keys per warp group. The first needs
# three stages: a step waits for key tile t + 2 before it releases t. The second spills in its loop for heads of 128
# with dropout (rule.keys_fit(), which takes heads of 96) and with a window.
HOPPER_BACKWARD_QUERIES = _in_gluon(
    "backward_queries.hopper",
    lambda chip, kind, width, *size: _each("128x32w4" if width == 256 else "128x64w4", (3,)),
)
HOPPER_BACKWARD_KEYS = _in_gluon(
    "backward_keys.hopper",
    lambda chip, kind, width, extras, keys: _each("64x128w4", (2, 3) if width == 64 else (2,) * (extras != 3)),
)

# attention/backward.py: 1 launch with a program per key head, five products and dQ accumulated in memory, or 2 launches
# with seven products. rows: key_class() of the keys, or of all queries of a key head, which bounds the accumulator: 4 D
# bytes per query of each running program; rounds: whole or broken (whole_rounds()). On sm_80 and sm_89 both variants
# are bound by the tensor cores, and the single launch uses half of the L2 bandwidth (docs/ledger.md). Not timed on any
# device; `fasttfm tune` tries it on sm_90 and sm_120.
LAUNCHES = Choice(
    "attention.backward.launches",
    Table(
        """
        kind  width  extras  rows                  rounds | sm_80,sm_89  *
        half  64     0,1,4   16,32,64,128,256,512  whole  | 1            2
        *     *      *       *                     *      | 2            2
        """,
        int,
    ),
    _launches_alternatives,
)

# sm_90: 64 keys per warp group. Spills are outside the loops over queries, once per key tile.
BACKWARD_HEADS = Choice(
    "attention.backward.heads",
    tiles("""
    kind  width  extras | sm_80      sm_89    sm_90     sm_120
    half  64     0,1,4  | -          -        32x128w8  -        @ 3.9+  # 64x128w8 spills in a loop
    half  64     0,1,4  | 32x64w4s3  32x64w4  64x128w8  32x32w4
    """),
    _backward_alternatives,
)

# attention/mask_gradient.py.
MASK_GRADIENT = tiles("""
kind  width | simt     amd      sm_90    sm_100   sm_80+
fp32  64    | 16x16w4  16x16w4  16x16w4  16x16w4  16x16w4
fp32  *     | 16x16w8  16x16w8  -        -        -
tf32  64    | -        -        32x32w8  32x32w8  32x32w8
tf32  128   | -        -        16x64w8  16x64w8  16x64w8
tf32  256   | -        -        16x32w8  16x32w8  16x32w8
half  64    | 16x16w4  32x32w4  32x32w4  32x32w4  32x32w4
half  128   | 16x16w8  16x32w4  16x32w4  16x32w4  16x32w4  # simt: 32x32w4 spills 5 KB
half  256   | 16x16w8  16x32w4  64x32w8  16x16w8  16x32w4  # sm_90: 16x32w4 spills 8 bytes
""")

# attention/decode.py; rows: 16 if at most 16 rows read a key head, else 32.
DECODE = tiles("""
kind  width  rows | simt,amd  sm_86,sm_89  sm_90      sm_80+
fp32  64     *    | -         16x32w4      16x32w8    16x32w4    # sm_90: 4 warps spill 8 bytes
fp32  128    *    | -         16x32w8      16x32w8    16x32w8
fp32  256    *    | -         16x32w8      16x16w8    16x16w8    # sm_86, sm_89: 16x16 spills 16 bytes with a soft cap
*     64     16   | 16x32w4   16x64w4s2    16x64w4s2  16x64w4s2
*     64     32   | 32x32w8   32x32w4s2    32x32w4s2  32x32w4s2  # 32x64 spills 8 bytes
*     128    16   | 16x32w8   16x64w4s2    16x64w4s2  16x64w4s2
*     128    32   | 16x32w8   32x32w4s2    32x32w4s2  32x32w4s2
*     256    *    | 16x16w8   16x32w4s2    16x32w4s2  16x32w4s2  # 32x32w8 spills 8 bytes
""")

# attention/ancestors.py; columns: keys per iteration, most of a sentence. A thread holds 32 elements of the sum and has
# as many of keys and of values in flight: 16 KiB per program in half precision. Not run on a GPU.
ANCESTORS = tiles("""
kind  width | *
*     64    | 64w4
fp32  128   | 32w8  # sm_100: 4 warps spill 8 bytes
*     128   | 32w4
fp32  256   | 16w8  # sm_80: 4 warps spill 8 bytes
*     256   | 16w4
""")

# attention/short.py, forward. With matrix units a warp multiplies 16 rows at a time, or two warps do if mask and
# dropout would spill; without, threads share the work evenly. For 32 keys one warp is best: two split the keys and
# reduce each row in shared memory, 2,126 instructions per head with dropout on sm_80 instead of 1,346. For 64 keys four
# warps hold 64 rows, which read keys and values once, where neither count nor occupancy is worse for it.
SHORT_FORWARD = Choice(
    "attention.short.forward",
    tiles("""
    kind  width  extras  keys | simt     amd      sm_80     sm_86,sm_89  sm_90     sm_100    sm_120
    fp32  64     *       16   | 16x16w2  16x16w2  16x16w2   16x16w2      16x16w2   16x16w2   16x16w2
    fp32  64     *       32   | 32x32w4  32x32w4  32x32w4   32x32w4      32x32w4   32x32w4   -
    tf32  64     *       16   | -        -        16x16w1   16x16w1      16x16w1   16x16w1   16x16w1
    tf32  64     1,4     32   | -        -        32x32w4   -            -         -         -
    tf32  64     0,1,4   32   | -        -        32x32w2   32x32w2      32x32w2   32x32w2   32x32w2
    tf32  64     2,3     32   | -        -        32x32w2   32x32w2      32x32w2   32x32w2   32x32w2
    tf32  64     *       64   | -        -        32x64w2   32x64w2      64x64w4   64x64w4   -
    half  *      *       16   | 16x16w2  16x16w1  16x16w1   16x16w1      16x16w1   16x16w1   16x16w1
    half  64     2,3     32   | -        32x32w4  -         -            -         -         -
    half  64     *       32   | 32x32w4  32x32w1  32x32w1   32x32w1      32x32w1   32x32w1   32x32w1
    half  64     2,3     64   | -        -        64x64w2   -            -         -         -
    half  64     *       64   | 16x64w4  32x64w2  32x64w2   64x64w4      64x64w4   64x64w4   64x64w4
    half  64     *       128  | -        -        64x128w4  64x128w4     64x128w4  64x128w4  -
    half  128    0,1,4   32   | 16x32w4  32x32w2  32x32w2   32x32w2      32x32w2   32x32w2   32x32w2
    half  128    2,3     32   | 16x32w4  32x32w4  32x32w1   32x32w1      32x32w1   32x32w1   32x32w1
    half  128    2,3     64   | -        -        64x64w2   -            -         -         -
    half  128    *       64   | -        -        32x64w2   32x64w2      64x64w4   64x64w4   -
    """),
    _short_alternatives,
)

# attention/short.py, backward. Warps split the keys and the head size, and with them dK and dV.
SHORT_BACKWARD = Choice(
    "attention.short.backward",
    tiles("""
    kind  width  extras  keys | simt     amd      sm_80     sm_86,sm_89  sm_90     sm_100    sm_120
    fp32  64     *       16   | 16x16w4  16x16w4  16x16w4   16x16w4      16x16w4   16x16w4   16x16w4
    # sm_86, sm_89, sm_90: 8 warps spill 8 bytes, with extras 2 and 3 on sm_86 and sm_89 16 warps do
    fp32  64     2,3     32   | -        -        -         16x32w8      -         -         -
    fp32  64     *       32   | 16x32w8  16x32w8  16x32w8   16x32w16     16x32w16  16x32w8   -
    tf32  64     *       16   | -        -        16x16w2   16x16w2      16x16w2   16x16w2   16x16w2
    tf32  64     0,1,4   32   | -        -        32x32w8   32x32w8      32x32w8   32x32w8   32x32w4
    tf32  64     3       32   | -        -        -         -            16x32w4   -         -  # w8 spills 16 bytes
    tf32  64     2,3     32   | -        -        16x32w8   16x32w8      16x32w8   16x32w4   16x32w4
    tf32  64     0,1,4   64   | -        -        32x64w8   32x64w8      16x64w8   32x64w8   -
    tf32  64     2,3     64   | -        -        16x64w8   16x64w8      16x64w8   16x64w8   -
    half  64     *       16   | 16x16w4  16x16w2  16x16w2   16x16w2      16x16w2   16x16w2   16x16w2
    half  64     0,1,4   32   | -        -        -         -            32x32w4   -         -  @ 3.9+  # w1: 192 bytes
    half  64     0,1,4   32   | 16x32w8  32x32w4  32x32w4   32x32w4      16x32w1   32x32w4   32x32w4
    # sm_90: timed; spills 16 bytes with a mask
    half  64     2,3     32   | 16x32w8  16x32w4  16x32w2   16x32w2      32x32w2   16x32w2   16x32w2
    # sm_100: 4 warps spill 8 bytes
    half  64     0,1,4   64   | 16x64w8  32x64w4  32x64w4   32x64w4      32x64w4   32x64w8   32x64w4
    half  64     2,3     64   | 16x64w8  16x64w4  32x64w4   32x64w4      32x64w4   32x64w4   32x64w4
    half  64     2,3     128  | -        -        16x128w8  16x128w8     -         -         -
    half  64     *       128  | -        -        32x128w8  32x128w8     32x128w8  32x128w8  -
    half  128    *       16   | 16x16w8  16x16w2  16x16w2   16x16w2      16x16w2   16x16w2   16x16w2
    half  128    *       32   | 16x32w8  16x32w4  32x32w4   32x32w4      32x32w4   32x32w4   32x32w4
    half  128    0       64   | -        -        -         -            -         16x64w8   -  # 32x64 spills 8 bytes
    half  128    4       64   | -        -        -         -            32x64w8   -         -  # 16x64 spills 8 bytes
    half  128    *       64   | -        -        32x64w8   32x64w8      16x64w4   32x64w8   -
    """),
    _short_backward_alternatives,
)

# attention/short.py, backward, for padded rows without bias sums: short, or a tile for the two kernels of backward.py.
# queries, keys: key_class() of both. On an H100 with 100 queries and keys: 186 us instead of 230 us.
SHORT_BY_LONG: Choice[Tile | str] = Choice(
    "attention.short.backward.long",
    Table(
        """
        kind  width  extras  queries  keys | sm_90      *
        half  64     1       128      128  | 64x64w4s3  -
        *     *      *       *        *    | -          short
        """,
        lambda cell: cell if cell == "short" else Tile.parse(cell),
    ),
    lambda *size: ["short", *_each("64x64w4 32x64w4", (1, 3))],
)

# masked_softmax.py; keys: the power of two that holds a row, or one iteration over a longer row. 16 elements per
# thread, 8 from 2,048 keys on, at most 512 threads; twice the warps where half precision would spill 8 bytes. Every
# element belongs to one thread only, so that in-place writes overwrite only what that thread has read.
MASKED_SOFTMAX = Choice(
    "masked_softmax",
    tiles("""
    keys | sm_80    sm_86,sm_89  sm_90     sm_120     nvidia     *
    16   | -        -            -         -          128x16w4   128x16w2
    32   | -        -            -         -          64x32w4    64x32w2
    64   | -        -            -         -          32x64w4    32x64w2
    128  | -        -            8x128w2   -          16x128w4   16x128w2
    256  | 8x256w8  -            -         -          8x256w4    8x256w2
    512  | -        -            2x512w2   -          4x512w4    4x512w2
    1024 | -        -            -         1x1024w4   2x1024w4   2x1024w2
    2048 | -        1x2048w16    1x2048w4  -          1x2048w8   1x2048w4
    4096 | -        -            1x4096w8  -          1x4096w16  1x4096w8
    8192 | -        -            -         1x8192w32  1x8192w16  1x8192w8
    """),
    _softmax_alternatives,
)
