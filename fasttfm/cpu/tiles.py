"""Float32 products inside a numba loop, of operands packed into the cache; arguments are not checked.

A tile of six rows and sixteen columns accumulates in registers, like those of panel_tiles.py, whose operand is a weight
packed once. Here both operands are packed on use: one as contiguous rows, the other as panels, sixteen columns wide,
which tiles read sequentially. Arrays are flat; indices and strides count elements.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from fasttfm.cpu.loop_parts import fetch_run, inlined, read
from fasttfm.cpu.panel_tiles import TILE, UNROLLED, accumulate, broadcast, fma, for_rows, load

VECTOR, VECTORS = 8, 2
"""As in panel_tiles.py, for AVX2."""
PANEL = VECTOR * VECTORS
_WORD, _VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), VECTOR)
_SHORTS, _INTS = (ir.VectorType(ir.IntType(bits), VECTOR) for bits in (16, 32))


def _fma_pairs(builder, x, y, total):
    """total plus the products of bfloat16 pairs in the words of x and y (AVX512_BF16)."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _INTS, _INTS])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.256")
    return builder.call(multiply, [total, builder.bitcast(x, _INTS), builder.bitcast(y, _INTS)])


def _product_of(adds, times_add=fma):
    """Make multiply(x, first, row, step, panels, place, panel, width, count, out, output, line, rows, columns).

    It writes, or with `adds` adds, x (rows, count) times panels to out (rows, columns); panels are `panel` elements
    apart; count is a multiple of UNROLLED and columns of PANEL. Element (m, k) of x is x[first + m * row + k * step];
    times_add(builder, x, y, total) emits the multiply-add.
    """

    @intrinsic
    def tile(context, rows, x, first, row, step, panel, place, width, count, out, output, line):
        """`rows` rows of PANEL elements, row m from out[output + m * line] on: the sum over k < count of
        x[first + m * row + k * step] * panel[place + k * width :][:PANEL]."""

        def generate(context, builder, signature, values):
            rows, _, first, row, step, _, place, width, count, _, output, line = values
            data = [make_array(signature.args[n])(context, builder, values[n]).data for n in (1, 5, 9)]
            add, times = builder.add, builder.mul
            begin = builder.gep(data[1], [place])

            def emit(rows):
                lines = [builder.gep(data[0], [add(first, times(_WORD(m), row))]) for m in range(rows)]
                written = [builder.gep(data[2], [add(output, times(_WORD(m), line))]) for m in range(rows)]
                vectors, zero = [_WORD(v * VECTOR) for v in range(VECTORS)], ir.Constant(_VECTOR, None)
                start = [[load(builder, to, v, _VECTOR) if adds else zero for v in vectors] for to in written]

                def turn(k, sums):
                    for unrolled in range(UNROLLED):
                        now = add(k, _WORD(unrolled))
                        offset, x_at = times(now, width), times(now, step)
                        numbers = [load(builder, begin, add(offset, v), _VECTOR) for v in vectors]
                        for m in range(rows):
                            factor = broadcast(builder, builder.load(builder.gep(lines[m], [x_at])), VECTOR)
                            sums[m] = [times_add(builder, factor, y, each) for y, each in zip(numbers, sums[m])]

                sums = accumulate(builder, start, UNROLLED, turn, lambda k: builder.icmp_signed("<", k, count))
                for to, row_sums in zip(written, sums):
                    for v, total in zip(vectors, row_sums):
                        address = builder.bitcast(builder.gep(to, [v]), _VECTOR.as_pointer())
                        builder.store(total, address, align=4)

            for_rows(builder, rows, emit)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, x, i, i, i, panel, i, i, i, out, i, i), generate

    @njit(nogil=True)
    def multiply(x, first, row, step, panels, place, panel, width, count, out, output, line, rows, columns):
        tiles = (rows + TILE - 1) // TILE
        for column in range(0, columns, PANEL):
            at, m = place + column // PANEL * panel, 0
            for n in range(tiles):
                size, to = rows // tiles + (n < rows % tiles), output + m * line + column
                tile(size, x, first + m * row, row, step, panels, at, width, count, out, to, line)
                m += size

    return multiply


product, add_product = _product_of(False), _product_of(True)
product_of_pairs = _product_of(False, _fma_pairs)
"""product() of words that hold a pair of bfloat16 each."""


@intrinsic
def _copy_panel(context, x, place, out, at):
    """Copy x[place : place + PANEL] to out[at : at + PANEL]."""

    def generate(context, builder, signature, values):
        source, written = (
            builder.gep(make_array(signature.args[n])(context, builder, values[n]).data, [values[n + 1]])
            for n in (0, 2)
        )
        for v in range(VECTORS):
            address = builder.bitcast(builder.gep(written, [_WORD(v * VECTOR)]), _VECTOR.as_pointer())
            builder.store(load(builder, source, _WORD(v * VECTOR), _VECTOR), address, align=4)
        return context.get_dummy_value()

    return types.void(x, types.uintp, out, types.uintp), generate


@inlined()
def round_up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@inlined()
def fetch_rows(x, first, stride, rows, size):
    """Prefetch rows of x, all at once: copies would wait for each."""
    for m in range(np.uintp(rows)):
        fetch_run(x, np.uintp(first) + m * np.uintp(stride), np.uintp(size), np.uintp(16))


@inlined()
def copy_rows(x, first, stride, rows, size, factor, out):
    """Copy rows of x, of any element type, times factor to out (rows, size), zero-padded to a multiple of UNROLLED
    rows."""
    for m in range(np.uintp(rows)):
        place, at = np.uintp(first) + m * np.uintp(stride), m * np.uintp(size)
        for d in range(np.uintp(size)):
            out[at + d] = read(x[place + d]) * factor
    out[rows * size : round_up(rows, UNROLLED) * size] = np.float32(0.0)


@inlined()
def copy_words(x, first, stride, rows, size, out):
    """copy_rows() of pairs of bfloat16, unscaled."""
    for m in range(np.uintp(rows)):
        place, at = np.uintp(first) + m * np.uintp(stride), m * np.uintp(size)
        for d in range(np.uintp(size)):
            out[at + d] = read(x[place + d])
    out[rows * size : round_up(rows, UNROLLED) * size] = np.float32(0.0)


_ORDER = ir.VectorType(ir.IntType(32), VECTOR)
_PAIRS = ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15))
_QUADS = ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
_HALVES = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


_VECTORS_OF = {
    types.float32: (_VECTOR, lambda llvm, x: x),
    types.uint16: (_SHORTS, lambda llvm, x: llvm.bitcast(llvm.shl(llvm.zext(x, _INTS), _INTS([16] * VECTOR)), _VECTOR)),
    types.uint32: (_INTS, lambda llvm, x: llvm.bitcast(x, _VECTOR)),
    types.int16: (ir.VectorType(ir.HalfType(), VECTOR), lambda llvm, x: llvm.fpext(x, _VECTOR)),
}
"""Element type of loop_parts.py -> its vector type, and the conversion to a vector of float32."""


@intrinsic
def _transpose(context, x, place, stride, rows, out, at):
    """Write x[place + stride * m + d] to out[at + PANEL * d + m] for m, d < VECTOR, and 0 for m >= rows."""

    def generate(context, builder, signature, values):
        source, written = (make_array(signature.args[n])(context, builder, values[n]).data for n in (0, 4))
        _, place, stride, rows, _, at = values
        kind, (vector, widened) = signature.args[0].dtype, _VECTORS_OF[signature.args[0].dtype]
        zeros, lines = cgutils.alloca_once(builder, vector, zfill=True), []
        for m in range(VECTOR):
            line = builder.gep(source, [builder.add(place, builder.mul(stride, _WORD(m)))])
            line = builder.bitcast(line, vector.as_pointer())
            line = builder.select(builder.icmp_unsigned("<", _WORD(m), rows), line, zeros)
            lines.append(widened(builder, builder.load(line, align=kind.bitwidth // 8)))
        for apart, masks in ((1, _PAIRS), (2, _QUADS), (4, _HALVES)):
            for n in range(VECTOR):
                if n & apart == 0:
                    pair = lines[n], lines[n + apart]
                    lines[n], lines[n + apart] = (builder.shuffle_vector(*pair, _ORDER(mask)) for mask in masks)
        for d, line in zip((0, 2, 1, 3, 4, 6, 5, 7), lines):
            address = builder.gep(written, [builder.add(at, _WORD(d * PANEL))])
            builder.store(line, builder.bitcast(address, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    i = types.uintp
    return types.void(x, i, i, i, out, i), generate


@inlined()
def panels_across(x, first, stride, rows, size, out):
    """Pack rows of x, of any element type, transposed: panels (size, PANEL) of PANEL rows each, zero-padded; size is a
    multiple of VECTOR."""
    for begin in range(np.uintp(0), np.uintp(round_up(rows, PANEL)), np.uintp(VECTOR)):
        valid = max(begin, np.uintp(rows)) - begin
        place = np.uintp(first) + begin * np.uintp(stride)
        at = begin // np.uintp(PANEL) * np.uintp(PANEL * size) + begin % np.uintp(PANEL)
        for d in range(np.uintp(0), np.uintp(size), np.uintp(VECTOR)):
            _transpose(x, place + d, np.uintp(stride), valid, out, at + d * np.uintp(PANEL))


@inlined()
def panels_along(x, first, stride, rows, size, out):
    """Pack rows of x as panels (rows, PANEL) of PANEL columns each, zero-padded to a multiple of PANEL rows."""
    height = np.uintp(round_up(rows, PANEL))
    for column in range(np.uintp(0), np.uintp(size), np.uintp(PANEL)):
        at, end = column * height, (column + np.uintp(PANEL)) * height
        for m in range(np.uintp(rows)):
            place = np.uintp(first) + m * np.uintp(stride) + column
            _copy_panel(x, place, out, at)
            at += np.uintp(PANEL)
        out[at:end] = np.float32(0.0)
