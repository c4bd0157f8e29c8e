"""Dropout of transposed attention weights, (64 keys, 64 queries) per warp group: the mask of philox.py, in registers.

A thread holds two of the sixteen keys of a Philox block, so eight threads cooperate: each draws the blocks of two
queries, one bit per lane, and three shuffles bring each thread the bits of its own keys. Shared memory is not used.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fasttfm.kernels.attention.hopper import steps
from fasttfm.kernels.philox import ROUNDS, byte_bits


@gluon.constexpr_function
def _layout():
    """Layout of a warp group's accumulator (64 keys, 64 queries) as (block, half of the block, key of the half, set of
    eight queries, pair, half of the pair), with the accumulator's register order."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 0, 4, 0, 0]],
        [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 4, 0, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]], [], [4, 2, 8, 8, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def _slice(layout, *dims):
    """Return the layout without these dimensions, which are given from last to first."""
    for dim in dims:
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def _kept_of(seed, dropout, plane, row, block):
    """Return the keep-bits of a block: bit 8 (l % 4) + 7 - l // 4 is set if lane l is kept."""
    w0, w1, w2, w3 = tl.philox(seed, block, row, plane, dropout.site, ROUNDS)
    return byte_bits(w0, w1, w2, w3, dropout.threshold)


@gluon.jit
def draw(dropout, plane, first_row, first_key):
    """Return the keep-bits of the weights from first_row and first_key on for mark(): 32 per thread, int32 (block, key
    of the half, pair)."""
    L: gl.constexpr = _slice(_layout(), 5, 3, 1)
    seed = steps.anew(dropout.seed)  # else the compiler keeps the keys of all rounds in registers from tile to tile
    blocks = first_key // 16 + gl.arange(0, 4, _slice(L, 2, 1))[:, None, None]
    key = gl.arange(0, 8, _slice(L, 2, 0))[None, :, None]
    row = first_row + 8 * key + 2 * gl.arange(0, 4, _slice(L, 1, 0))[None, None, :]
    word = _kept_of(seed, dropout, plane, row, blocks) | (_kept_of(seed, dropout, plane, row + 1, blocks) >> 4)
    # Butterfly: threads whose keys differ in one bit exchange odd and even bits, then halfwords, then bytes.
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
def mark(weights, word):
    """Set the sign bit of the nonnegative weights (64 keys, 64 queries) that are dropped; word from draw()."""
    L: gl.constexpr = _layout()
    half = gl.arange(0, 2, _slice(L, 5, 4, 3, 2, 0))[None, :, None, None, None, None]
    eight = gl.arange(0, 8, _slice(L, 5, 4, 2, 1, 0))[None, None, None, :, None, None]
    of_pair = gl.arange(0, 2, _slice(L, 4, 3, 2, 1, 0))[None, None, None, None, None, :]
    to_sign = 24 - 8 * (eight % 4) + eight // 4 + 2 * half + 4 * of_pair
    dropped = gl.expand_dims(gl.expand_dims(gl.expand_dims(~word, 1), 3), 5)
    split = gl.convert_layout(gl.reshape(weights, [4, 2, 8, 8, 4, 2]), L, assert_trivial=True).to(
        gl.int32, bitcast=True
    )
    marked = (split ^ ((dropped << to_sign) & -0x80000000)).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(marked, [64, 64]), weights.type.layout, assert_trivial=True)


@gluon.jit
def kept(marked, element: gl.constexpr):
    """Return mark()'s weights in dtype `element`, zero where they are dropped."""
    # One instruction per pair. gl.maximum() would be shared with its other uses, at a register per weight.
    if element == gl.bfloat16:
        kept = gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [marked], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        kept = gl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [marked], dtype=gl.float16, is_pure=True, pack=2
        )
    return kept
