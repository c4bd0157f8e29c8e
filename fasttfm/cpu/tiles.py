"""Float32 products inside a numba loop, of operands packed into the cache; arguments are not checked.

A tile of six rows and sixteen columns accumulates in registers, like those of panels.py, whose operand is a weight
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
from fasttfm.cpu.panels import UNROLLED, broadcast, fma, load

VECTOR, VECTORS, TILE = 8, 2, 6
"""As in panels.py, for AVX2."""
PANEL = VECTOR * VECTORS
_WORD, _VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), VECTOR)
_SHORTS, _INTS = (ir.VectorType(ir.IntType(bits), VECTOR) for bits in (16, 32))


def _fma_pairs(builder, x, y, total):
    """total plus the products of bfloat16 pairs in the words of x and y (AVX512_BF16)."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _INTS, _INTS])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.256")
    return builder.call(multiply, [total, builder.bitcast(x, _INTS), builder.bitcast(y, _INTS)])


def _tile(rows, adds, times_add):
    """Make tile(x, first, row, step, panel, place, width, count, out, output, line).

    It writes, or with `adds` adds, to `rows` rows of PANEL elements, row m from out[output + m * line] on, the sum over
    k < count of x[first + m * row + k * step] * panel[place + k * width :][:PANEL], multiplied by times_add.
    """

    @intrinsic
    def tile(context, x, first, row, step, panel, place, width, count, out, output, line):
        def generate(context, builder, signature, values):
            _, first, row, step, _, place, width, count, _, output, line = values
            data = [make_array(signature.args[n])(context, builder, values[n]).data for n in (0, 4, 8)]
            add, times = builder.add, builder.mul
            lines = [builder.gep(data[0], [add(first, times(_WORD(m), row))]) for m in range(rows)]
            begin = builder.gep(data[1], [place])
            written = [builder.gep(data[2], [add(output, times(_WORD(m), line))]) for m in range(rows)]
            entry, head, done = builder.block, *(builder.append_basic_block() for _ in range(2))
            zero = ir.Constant(_VECTOR, None)
            start = [
                [load(builder, written[m], _WORD(v * VECTOR), _VECTOR) if adds else zero for v in range(VECTORS)]
                for m in range(rows)
            ]
            builder.branch(head)
            builder.position_at_end(head)
            k = builder.phi(_WORD)
            sums = [[builder.phi(_VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
            last = [list(each) for each in sums]
            for unrolled in range(UNROLLED):
                now = add(k, _WORD(unrolled))
                offset, place_of_x = times(now, width), times(now, step)
                numbers = [load(builder, begin, add(offset, _WORD(v * VECTOR)), _VECTOR) for v in range(VECTORS)]
                for m in range(rows):
                    factor = broadcast(builder, builder.load(builder.gep(lines[m], [place_of_x])), VECTOR)
                    last[m] = [times_add(builder, factor, number, each) for number, each in zip(numbers, last[m])]
            after = add(k, _WORD(UNROLLED))
            for phi, at_first, at_end in [(k, _WORD(0), after)] + [
                (sums[m][v], start[m][v], last[m][v]) for m in range(rows) for v in range(VECTORS)
            ]:
                phi.add_incoming(at_first, entry)
                phi.add_incoming(at_end, head)
            builder.cbranch(builder.icmp_signed("<", after, count), head, done)
            builder.position_at_end(done)
            for m in range(rows):
                for v in range(VECTORS):
                    address = builder.gep(written[m], [_WORD(v * VECTOR)])
                    builder.store(last[m][v], builder.bitcast(address, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        i = types.int64
        return types.void(x, i, i, i, panel, i, i, i, out, i, i), generate

    return tile


def _product_of(adds, times_add=fma):
    """Make multiply(x, first, row, step, panels, place, panel, width, count, out, output, line, rows, columns).

    It writes, or with `adds` adds, x (rows, count) times panels to out (rows, columns); panels are `panel` elements
    apart; count is a multiple of UNROLLED and columns of PANEL.
    """
    one, two, three, four, five, six = (_tile(rows, adds, times_add) for rows in range(1, TILE + 1))

    @njit(nogil=True)
    def multiply(x, first, row, step, panels, place, panel, width, count, out, output, line, rows, columns):
        tiles = (rows + TILE - 1) // TILE
        for column in range(0, columns, PANEL):
            at, m = place + column // PANEL * panel, 0
            for tile in range(tiles):
                size = rows // tiles + (tile < rows % tiles)
                a, c = first + m * row, output + m * line + column
                if size == 6:
                    six(x, a, row, step, panels, at, width, count, out, c, line)
                elif size == 5:
                    five(x, a, row, step, panels, at, width, count, out, c, line)
                elif size == 4:
                    four(x, a, row, step, panels, at, width, count, out, c, line)
                elif size == 3:
                    three(x, a, row, step, panels, at, width, count, out, c, line)
                elif size == 2:
                    two(x, a, row, step, panels, at, width, count, out, c, line)
                else:
                    one(x, a, row, step, panels, at, width, count, out, c, line)
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
