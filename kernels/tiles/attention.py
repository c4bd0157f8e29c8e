"""The tiles of attention and of its softmax between two cuBLAS products: rows are queries, columns keys.

kind is how products are computed (launch.product_kind), width the larger head size in classes of 64, 128 and 256,
extras 1 with dropout or shared keys, 2 with a mask, 3 with a window, a soft cap or slopes, keys the power of two from
16 to 128 that holds a row.

They were chosen so that nothing spills from sm_80 on under Triton 3.7.1 (docs/compile-matrix.md says what others
compiled), that a program of an older chip fits 48 KiB of shared memory, and in half precision on sm_80 and sm_90 so
that no unit of the chip is asked for more than the tensor cores where that can be. Dropout takes registers, and a
mask's tile as many as the scores: hence the extras. Where two rows differ by the chip alone, the
larger tile spills on the other chip. None of them has been timed.
"""

from __future__ import annotations

from fasttfm.kernels.tiles.table import Table, Tile

# Most keys of a row that the kernels for short rows take: a program holds all keys and values of a head, their
# gradients and its scores.
SHORT_KEYS = Table(
    int,
    """
    chips               kind  width | keys
    sm_120              fp32  64    | 16
    *                   fp32  64    | 32
    sm_120              tf32  64    | 32
    *                   tf32  64    | 64
    *                   fp32  *     | 0
    *                   tf32  *     | 0
    sm_60,sm_70,sm_75   *     64    | 32
    simt,amd,sm_120     *     64    | 64
    *                   *     64    | 128
    sm_60,sm_70,sm_75   *     128   | 16
    simt,amd,sm_120     *     128   | 32
    *                   *     128   | 64
    *                   *     *     | 0
    """,
)

# The widest heads that the kernels for long rows take. float32 proper has no matrix unit on NVIDIA's chips, and
# Triton then keeps whole rows of both operands in registers: wider heads spill, or exceed the shared memory, whatever
# the tile.
LONG_WIDTH = Table(
    int,
    """
    chips               kind | width
    sm_80+              fp32 | 64
    sm_60,sm_70,sm_75   fp32 | 128
    *                   *    | 256
    """,
)

# attention/forward.py. A warp group's matrix instructions (sm_90, sm_100) read operands from shared memory; there is
# enough of it for three stages on sm_80, sm_90 and sm_100. fp32: of 32x32 by eight warps the compiler spills a little,
# on purpose, so that more programs run at a time.
FORWARD = Table(
    Tile,
    """
    chips                     kind       width  extras | rows  columns  warps  stages
    sm_80                     fp32       64     3      | 16    32       8      1    # 16x64w8 spills 8 bytes
    sm_100                    tf32       64     3      | 64    32       8      1    # 4 warps spill 24 bytes
    simt,amd                  fp32       64     *      | 32    32       8      1
    sm_80                     fp32       64     *      | 16    64       8      1    # 32x32w8 spills 8 bytes
    sm_90                     fp32       64     *      | 32    32       4      1
    sm_100                    fp32       64     *      | 16    32       4      1
    sm_86,sm_89               fp32       64     *      | 32    16       4      1    # 32x16w8 spills 16 bytes
    sm_120                    fp32       64     *      | 32    16       8      1
    simt,amd                  fp32       128    *      | 16    32       8      1
    amd,simt                  fp32       256    *      | 16    16       8      1
    sm_120                    tf32       64     2,3    | 64    32       8      1
    sm_80+                    tf32       64     *      | 64    32       4      1
    sm_80+                    tf32       128    *      | 32    32       4      1
    sm_80+                    tf32       256    *      | 32    32       8      1
    simt                      fp16,bf16  64     *      | 32    32       8      1
    sm_80,sm_90,sm_100        fp16,bf16  64     0      | 128   64       4      3
    sm_86,sm_89               fp16,bf16  64     0      | 128   64       4      2
    sm_120                    fp16,bf16  64     0,1    | 64    32       4      2
    amd                       fp16,bf16  64     *      | 64    32       4      1
    sm_86,sm_89               fp16,bf16  64     1      | 64    32       4      2
    sm_90                     fp16,bf16  64     1      | 128   64       4      3
    sm_80                     fp16,bf16  64     1      | 128   64       8      3
    sm_80                     fp16,bf16  64     2,3    | 64    32       4      3
    sm_100                    fp16,bf16  64     1      | 64    64       4      3
    sm_100                    fp16,bf16  64     2,3    | 64    64       8      3
    sm_86,sm_89,sm_120        fp16,bf16  64     2,3    | 64    32       8      2
    sm_90                     fp16,bf16  64     2,3    | 64    32       4      3
    simt                      fp16,bf16  128    *      | 16    32       8      1
    sm_80                     fp16,bf16  128    0,1    | 128   64       8      2
    sm_86,sm_89,sm_120        fp16,bf16  128    0      | 64    64       8      2
    sm_90,sm_100              fp16,bf16  128    0      | 128   64       8      3
    amd                       fp16,bf16  128    *      | 64    32       4      1
    sm_86,sm_89               fp16,bf16  128    1      | 64    32       4      2
    sm_90                     fp16,bf16  128    1      | 128   64       8      2
    sm_100                    fp16,bf16  128    2,3    | 64    64       8      3    # 64x32w4 spills 8 bytes
    sm_80,sm_90,sm_100        fp16,bf16  128    1,2,3  | 64    32       4      3
    sm_120                    fp16,bf16  128    1,2,3  | 64    32       8      2
    sm_86,sm_89               fp16,bf16  128    2,3    | 64    32       8      2
    simt                      fp16,bf16  256    *      | 16    16       8      1
    sm_80+                    fp16,bf16  256    0      | 64    32       8      2
    amd                       fp16,bf16  256    *      | 32    32       4      1
    sm_80+                    fp16,bf16  256    1,2,3  | 32    32       8      2
    """,
)

# attention/backward.py, dQ.
BACKWARD_QUERIES = Table(
    Tile,
    """
    chips                            kind       width  extras | rows  columns  warps  stages
    sm_100                           fp16,bf16  64     3      | 64    32       4      1    # two stages spill 40 bytes
    *                                fp32       64     *      | 32    32       8      1
    simt,amd                         fp32       128    *      | 16    16       8      1
    amd                              fp32       256    *      | 32    16       4      1    # 16x16w8 spills 48 bytes
    simt                             fp32       256    *      | 16    16       8      1
    sm_80+                           tf32       64     *      | 32    32       8      1
    sm_80                            tf32       128    0,1    | 16    64       4      1    # 32x32 spills 48 bytes
    sm_90,sm_100                     tf32       128    0,1    | 32    32       4      1
    sm_80,sm_86,sm_89,sm_90,sm_100   tf32       128    *      | 16    32       4      1
    sm_120                           tf32       128    *      | 16    32       8      1
    sm_80+                           tf32       256    *      | 16    32       8      1
    simt                             fp16,bf16  64     *      | 32    32       8      1
    sm_80,sm_90                      fp16,bf16  64     0,1    | 128   64       8      2
    sm_86,sm_89,sm_120               fp16,bf16  64     0      | 128   64       8      2
    sm_100                           fp16,bf16  64     0      | 64    64       8      2
    amd                              fp16,bf16  64     *      | 32    32       4      1
    sm_86,sm_89                      fp16,bf16  64     2,3    | 32    64       4      2    # 64x32 spills 8 bytes
    sm_100                           fp16,bf16  64     1      | 128   32       4      2    # 64x32: 21 cycles for 14
    sm_80,sm_86,sm_89,sm_90,sm_100   fp16,bf16  64     1,2,3  | 64    32       4      2
    sm_120                           fp16,bf16  64     1,2,3  | 64    32       8      2
    simt                             fp16,bf16  128    *      | 16    16       8      1
    sm_80,sm_90                      fp16,bf16  128    0,1    | 128   32       8      2
    sm_80+                           fp16,bf16  128    0      | 64    32       4      2
    amd                              fp16,bf16  128    *      | 32    32       4      1
    sm_100                           fp16,bf16  128    1      | 64    32       8      2
    sm_80,sm_100                     fp16,bf16  128    2,3    | 32    32       8      2
    sm_120                           fp16,bf16  128    2,3    | 32    64       8      2    # 64x32 spills 88 bytes
    sm_80,sm_86,sm_89,sm_90,sm_120   fp16,bf16  128    1,2,3  | 64    32       8      2
    simt                             fp16,bf16  256    *      | 16    16       8      1
    sm_80,sm_86,sm_89,sm_100,sm_120  fp16,bf16  256    0      | 64    32       8      1
    sm_90                            fp16,bf16  256    0      | 32    32       8      2
    amd                              fp16,bf16  256    *      | 32    16       8      1
    sm_80+                           fp16,bf16  256    1,2,3  | 32    32       8      1
    """,
)

# attention/backward.py, dK and dV, whose products have a tile's keys for rows: a warp takes 16, a warp group 64. Eight
# warps share 128 keys, or of 32 keys 128 queries; of 64 keys they would compute every score twice.
BACKWARD_KEYS = Table(
    Tile,
    """
    chips                           kind       width  extras | rows  columns  warps  stages
    sm_80,sm_86,sm_89               tf32       64     3      | 32    32       8      1    # 4 warps spill 16 bytes
    sm_100                          tf32       64     3      | 16    32       4      1    # 32x32w4 spills 32 bytes
    sm_90,sm_100,sm_120             fp32       64     *      | 16    16       8      1
    sm_80,sm_86,sm_89               fp32       64     2,3    | 16    16       8      1      # shared keys spill 8 bytes
    *                               fp32       64     *      | 16    32       8      1
    simt,amd                        fp32       128    *      | 16    16       8      1
    amd                             fp32       256    *      | 16    32       4      1    # 16x16w8 spills 448 bytes
    simt                            fp32       256    *      | 16    16       8      1
    sm_90                           tf32       64     2,3    | 16    16       4      1      # 32x32 spills 16 bytes
    sm_80+                          tf32       64     *      | 32    32       4      1
    sm_80+                          tf32       128    *      | 32    32       8      1
    sm_80+                          tf32       256    *      | 16    16       8      1
    simt                            fp16,bf16  64     *      | 16    32       8      1
    sm_80                           fp16,bf16  64     0      | 32    128      8      2
    sm_80                           fp16,bf16  64     1      | 32    128      8      1
    sm_90                           fp16,bf16  64     0      | 64    128      8      1
    sm_90                           fp16,bf16  64     1      | 32    128      8      2
    sm_100                          fp16,bf16  64     0      | 64    64       8      2
    sm_86,sm_89,sm_120              fp16,bf16  64     0,1    | 128   32       8      2
    amd                             fp16,bf16  64     *      | 32    32       4      1
    sm_100                          fp16,bf16  64     1      | 32    128      8      2    # 32x64: 47 cycles for 32
    sm_80+                          fp16,bf16  64     2,3    | 32    64       8      1
    simt                            fp16,bf16  128    *      | 16    16       8      1
    sm_100                          fp16,bf16  128    0      | 32    64       8      2
    sm_80                           fp16,bf16  128    0,1    | 16    128      8      1
    sm_90                           fp16,bf16  128    0      | 32    128      8      2
    sm_90                           fp16,bf16  128    1      | 16    128      8      1      # 32x128: shared keys spill
    sm_86,sm_89,sm_120              fp16,bf16  128    0,1    | 32    64       8      2
    amd                             fp16,bf16  128    *      | 16    64       8      1    # 32x32w8 spills 108 bytes
    sm_100                          fp16,bf16  128    1,2,3  | 32    32       8      1
    sm_80,sm_86,sm_89,sm_90,sm_120  fp16,bf16  128    2,3    | 32    32       8      1
    simt,amd                        fp16,bf16  256    *      | 16    16       8      1
    sm_80+                          fp16,bf16  256    0      | 32    32       8      1
    sm_80+                          fp16,bf16  256    1,2,3  | 16    32       8      1
    """,
)

# attention/mask_gradient.py.
MASK_GRADIENT = Table(
    Tile,
    """
    chips                                    kind       width | rows  columns  warps  stages
    *                                        fp32       64    | 16    16       4      1
    simt,amd                                 fp32       128   | 16    16       8      1
    amd,simt                                 fp32       256   | 16    16       8      1
    sm_80+                                   tf32       64    | 32    32       8      1
    sm_80+                                   tf32       128   | 16    64       8      1
    sm_80+                                   tf32       256   | 16    32       8      1
    simt                                     fp16,bf16  64    | 16    16       4      1
    *                                        fp16,bf16  64    | 32    32       4      1
    simt                                     fp16,bf16  128   | 16    16       8      1       # 32x32w4 spills 5 KB
    *                                        fp16,bf16  128   | 16    32       4      1
    simt,sm_100                              fp16,bf16  256   | 16    16       8      1
    sm_90                                    fp16,bf16  256   | 64    32       8      1       # 16x32w4 spills 8 bytes
    *                                        fp16,bf16  256   | 16    32       4      1
    """,
)

# attention/decode.py; rows: those that read a head of keys, 16 at most, or more.
DECODE = Table(
    Tile,
    """
    chips        kind  width  rows | rows  columns  warps  stages
    simt,amd     *     64     16   | 16    32       4      1
    simt,amd     *     64     32   | 32    32       8      1
    simt,amd     *     128    *    | 16    32       8      1
    simt,amd     *     256    *    | 16    16       8      1
    sm_90        fp32  64     *    | 16    32       8      1    # 4 warps spill 8 bytes
    *            fp32  64     *    | 16    32       4      1
    *            fp32  128    *    | 16    32       8      1
    sm_86,sm_89  fp32  256    *    | 16    16       4      1    # 8 warps spill 16 bytes
    *            fp32  256    *    | 16    16       8      1
    *            *     64     16   | 16    64       4      2
    *            *     64     32   | 32    32       4      2    # 32x64 spills 8 bytes
    *            *     128    16   | 16    64       4      2
    *            *     128    32   | 32    32       4      2
    *            *     256    *    | 16    32       4      2    # 32x32w8 spills 8 bytes
    """,
)

# attention/short.py, forward. With matrix units a warp multiplies 16 rows at a time, or two warps do where mask and
# dropout would spill; without, threads share the work evenly. 32 keys are one warp's: two divide them, and reduce each
# row in shared memory, 2,126 instructions a head with dropout on sm_80 where one takes 1,346.
SHORT_FORWARD = Table(
    Tile,
    """
    chips                                    kind       width  keys  extras | rows  columns  warps  stages
    *                                        fp32       64     16    *      | 16    16       2      1
    simt,sm_80,sm_86,sm_89,sm_90,sm_100,amd  fp32       64     32    *      | 32    32       4      1
    sm_80+                                   tf32       64     16    *      | 16    16       1      1
    sm_80                                    tf32       64     32    1      | 32    32       4      1
    sm_80+                                   tf32       64     32    0,1    | 32    32       2      1
    sm_80+                                   tf32       64     32    2,3    | 32    32       4      1
    sm_80,sm_86,sm_89,sm_90,sm_100           tf32       64     64    *      | 32    64       2      1
    simt                                     fp16,bf16  64     16    *      | 16    16       2      1
    sm_80+,amd                               fp16,bf16  64     16    *      | 16    16       1      1
    simt                                     fp16,bf16  64     32    *      | 32    32       4      1
    sm_80+,amd                               fp16,bf16  64     32    0,1    | 32    32       1      1
    sm_80+,amd                               fp16,bf16  64     32    2,3    | 32    32       4      1
    simt                                     fp16,bf16  64     64    *      | 16    64       4      1
    sm_86,sm_89                              fp16,bf16  64     64    0,1    | 32    64       2      1
    sm_80,sm_90,sm_100,sm_120,amd            fp16,bf16  64     64    *      | 32    64       2      1
    sm_86,sm_89                              fp16,bf16  64     64    2,3    | 32    64       4      1
    sm_80,sm_86,sm_89,sm_90,sm_100           fp16,bf16  64     128   0,1    | 64    128      4      1
    sm_80,sm_86,sm_89,sm_90,sm_100           fp16,bf16  64     128   2,3    | 64    128      8      1
    simt                                     fp16,bf16  128    16    *      | 16    16       2      1
    sm_80+,amd                               fp16,bf16  128    16    *      | 16    16       1      1
    simt                                     fp16,bf16  128    32    *      | 16    32       4      1
    sm_80+,amd                               fp16,bf16  128    32    0,1    | 32    32       2      1
    sm_80+,amd                               fp16,bf16  128    32    2,3    | 32    32       4      1
    sm_80,sm_86,sm_89,sm_90,sm_100           fp16,bf16  128    64    *      | 32    64       2      1
    """,
)

# attention/short.py, backward. Warps share keys and head size, and with them dK and dV.
SHORT_BACKWARD = Table(
    Tile,
    """
    chips                                    kind       width  keys  extras | rows  columns  warps  stages
    sm_86,sm_89                              fp32       64     32    3      | 16    32       8      1  # 16 spill 8
    sm_90                                    tf32       64     32    3      | 16    32       4      1  # 8 spill 16
    *                                        fp32       64     16    *      | 16    16       4      1
    sm_86,sm_89,sm_90                        fp32       64     32    *      | 16    32       16     1  # 8 spill 8 bytes
    simt,sm_80,sm_100,amd                    fp32       64     32    *      | 16    32       8      1
    sm_80+                                   tf32       64     16    *      | 16    16       2      1
    sm_80,sm_86,sm_89,sm_90,sm_100           tf32       64     32    0,1    | 32    32       8      1
    sm_120                                   tf32       64     32    0,1    | 32    32       4      1
    sm_100,sm_120                            tf32       64     32    2,3    | 16    32       4      1
    sm_80+                                   tf32       64     32    2,3    | 16    32       8      1
    sm_80,sm_86,sm_89,sm_100                 tf32       64     64    0,1    | 32    64       8      1
    sm_90                                    tf32       64     64    *      | 16    64       8      1
    sm_80,sm_86,sm_89,sm_100                 tf32       64     64    2,3    | 16    64       8      1
    simt                                     fp16,bf16  64     16    *      | 16    16       4      1
    sm_80+,amd                               fp16,bf16  64     16    *      | 16    16       2      1
    simt                                     fp16,bf16  64     32    *      | 16    32       8      1
    sm_80+,amd                               fp16,bf16  64     32    0,1    | 32    32       4      1
    sm_80+,amd                               fp16,bf16  64     32    2,3    | 16    32       4      1
    simt                                     fp16,bf16  64     64    *      | 16    64       8      1
    sm_100                                   fp16,bf16  64     64    0,1    | 32    64       8      1   # 4 spill 8
    sm_80+,amd                               fp16,bf16  64     64    0,1    | 32    64       4      1
    sm_80+,amd                               fp16,bf16  64     64    2,3    | 16    64       4      1
    sm_80,sm_86,sm_89,sm_90                  fp16,bf16  64     128   2,3    | 16    128      8      1
    sm_80,sm_86,sm_89,sm_90,sm_100           fp16,bf16  64     128   *      | 32    128      8      1
    simt                                     fp16,bf16  128    16    *      | 16    16       8      1
    sm_80+,amd                               fp16,bf16  128    16    *      | 16    16       2      1
    simt                                     fp16,bf16  128    32    *      | 16    32       8      1
    sm_80+,amd                               fp16,bf16  128    32    *      | 16    32       4      1
    sm_80,sm_86,sm_89,sm_90,sm_100           fp16,bf16  128    64    *      | 16    64       8      1
    """,
)

# masked_softmax.py; keys: the power of two that holds a row, or a step of the walk over a longer one. 16 elements a
# thread, 8 from 2,048 keys on, at most 512 threads. Where float16 spilled 8 bytes with these, twice the warps. A thread
# has elements of its own, no copies of another's, so that it overwrites in place nothing but what it has read itself.
MASKED_SOFTMAX = Table(
    Tile,
    """
    chips       keys | rows  columns  warps  stages
    sm_86,sm_89 2048 | 1     2048     16     1
    sm_90       128  | 8     128      2      1
    sm_90       512  | 2     512      2      1
    sm_90       2048 | 1     2048     4      1
    sm_90       4096 | 1     4096     8      1
    sm_120      1024 | 1     1024     4      1
    sm_120      8192 | 1     8192     32     1
    nvidia 16   | 128   16       4      1
    nvidia 32   | 64    32       4      1
    nvidia 64   | 32    64       4      1
    nvidia 128  | 16    128      4      1
    nvidia 256  | 8     256      4      1
    nvidia 512  | 4     512      4      1
    nvidia 1024 | 2     1024     4      1
    nvidia 2048 | 1     2048     8      1
    nvidia 4096 | 1     4096     16     1
    nvidia 8192 | 1     8192     16     1
    *      16   | 128   16       2      1
    *      32   | 64    32       2      1
    *      64   | 32    64       2      1
    *      128  | 16    128      2      1
    *      256  | 8     256      2      1
    *      512  | 4     512      2      1
    *      1024 | 2     1024     2      1
    *      2048 | 1     2048     4      1
    *      4096 | 1     4096     8      1
    *      8192 | 1     8192     8      1
    """,
)
