"""Tiles of the kernels that walk over rows: as many elements a thread as registers allow, loads 16 bytes wide.

An AMD warp has 64 threads, so half as many warps do the same there.
"""

from __future__ import annotations

from dataclasses import dataclass

from fasttfm.kernels.tiles.table import Table, Tile

MAX_COLUMNS = 16384
"""Columns of the widest row that LayerNorm's kernels take."""

NARROWEST = 128
"""Columns of a tile of whole rows at least, so that few tiles need compiling."""


@dataclass(frozen=True, slots=True)
class ClassTile:
    """A part of one row of logits."""

    columns: int
    warps: int

    def options(self) -> dict[str, int]:
        return {"COLUMNS": self.columns, "num_warps": self.warps, "num_stages": 1}


# Whole rows: 2,048 elements or one row a program, 32 elements a thread, 16 on AMD's chips. With 16 everywhere the sums
# over a row, and whatever a thread does once, took a fifth more instructions an element.
LAYER_NORM_FORWARD = Table(
    Tile,
    """
    chips  columns | rows columns warps
    *      128     | 16   128     2
    *      256     | 8    256     2
    *      512     | 4    512     2
    *      1024    | 2    1024    2
    *      2048    | 1    2048    2
    *      4096    | 1    4096    4
    *      8192    | 1    8192    8
    amd    16384   | 1    16384   8
    *      16384   | 1    16384   16
    """,
)

# The sums of the parameters' gradients stay in registers too: 8 elements a thread.
LAYER_NORM_BACKWARD = Table(
    Tile,
    """
    chips  columns | rows columns warps
    amd    128     | 16   128     4
    amd    256     | 8    256     4
    amd    512     | 4    512     4
    amd    1024    | 2    1024    4
    amd    2048    | 1    2048    4
    *      128     | 16   128     8
    *      256     | 8    256     8
    sm_86,sm_89,sm_120  512  | 2  512  4      # four rows by eight warps spill, in float16 or float32
    *      512     | 4    512     8
    sm_80  1024    | 1    1024    4      # two rows by eight warps spill in float32 with Triton 3.6.0
    *      1024    | 2    1024    8
    *      2048    | 1    2048    8
    *      4096    | 1    4096    16     # 32: half as many instructions more an element
    """,
)

# Rows of more columns than stay in registers, 2,048 at a time.
LAYER_NORM_WIDE = Table(
    Tile,
    """
    chips | rows columns warps
    amd   | 1    2048    4
    *     | 1    2048    8
    """,
)

# A block of columns over many rows, for sums along them.
COLUMN_SUMS = Table(
    Tile,
    """
    chips | rows columns warps
    amd   | 16   128     2
    *     | 16   128     4
    """,
)

RESIDUAL_ADD = Table(
    Tile,
    """
    chips columns | rows columns warps
    *     128     | 16   128     2
    *     256     | 8    256     2
    *     512     | 4    512     2
    """,
)

# Pairs of a head: 1,024, which are 16 elements a thread.
ROTARY = Table(
    Tile,
    """
    chips  pairs   | rows columns warps
    amd    16      | 64   16      2
    amd    32      | 32   32      2
    amd    64      | 16   64      2
    amd    128     | 8    128     2
    *      16      | 64   16      4
    *      32      | 32   32      4
    *      64      | 16   64      4
    *      128     | 8    128     4
    """,
)

EMBEDDING = Table(
    Tile,
    """
    chips  columns | rows columns warps
    amd    64      | 32   64      2
    amd    128     | 16   128     2
    amd    256     | 8    256     2
    *      64      | 32   64      4
    *      128     | 16   128     4
    *      256     | 8    256     4
    """,
)

# With fewer elements than threads two warps would add up one column in two orders and both store their sum.
PARTIAL_SUMS = Table(
    Tile,
    """
    chips | rows columns warps
    amd   | 32   32      1
    *     | 32   32      2
    """,
)

# A whole row of logits up to 4,096 classes, else 4,096 at a time: several small programs share a multiprocessor, so
# that one reads while another computes.
CROSS_ENTROPY = Table(
    ClassTile,
    """
    chips  classes                      | columns warps
    *      512                          | 512     1
    *      1024                         | 1024    2
    *      2048                         | 2048    4
    *      4096                         | 4096    4      # 8 warps: a third more instructions an element
    *      8192,16384,32768             | 4096    8
    """,
)
