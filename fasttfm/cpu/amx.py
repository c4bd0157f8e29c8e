"""Matrix products in tile registers (Intel AMX), of the weights that panels.py packs.

A tile register holds 16 lines of 64 bytes. One instruction multiplies 64 bytes of each of 16 rows, 32 inputs in
bfloat16 or 64 in int8, by a tile of a panel, and adds the products for 16 outputs to a tile of sums. Panels hold their
elements in this order already. A block of 32 rows and a panel keeps its sums in four of the eight registers. With fewer
rows the tiles are shorter, as the thread's configuration says: it is loaded when the rows change, and released at the
end of a part, because the system saves configured tiles at every switch of threads. Panels are not prefetched: the
hardware reads them ahead at 22 GB/s on a core, and every prefetch tried made the product slower.

Integer sums are exact. In bfloat16 an instruction sums even and odd inputs apart and adds both sums: the bits of a row
depend neither on the number of rows nor on threads, but differ from those of panel_tiles.py.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

import ctypes
import functools
import platform
import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from fasttfm.cpu.loop_parts import inlined, loop
from fasttfm.cpu.panel_tiles import (
    KINDS,
    PANEL,
    VECTOR,
    VECTORS,
    accumulate,
    blocks_of,
    has,
    load,
    scale_of,
    store,
    x86,
)
from fasttfm.cpu.thread_team import over_threads

LINES, LINE = 16, 64
"""Lines of a tile register, and bytes of a line."""
_GROUP = 4
"""Bytes of the inputs that lie side by side for one output of a panel."""
_PERMISSION, _TILE_DATA, _CALL = 0x1023, 18, 158
"""ARCH_REQ_XCOMP_PERM, its argument for tile registers, and arch_prctl's number on x86-64."""
_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = _BYTE.as_pointer()
_SUMS, _ROWS, _PANELS = (0, 1, 2, 3), (4, 5), (6, 7)
"""Tile registers: sums of (rows, outputs) (0, 0), (0, 1), (1, 0), (1, 1), then rows and outputs."""


@functools.cache
def usable() -> bool:
    """Return whether this processor multiplies bfloat16 and 8-bit integers in tiles, and the system permits it.

    Linux gives a process the tile registers when it asks for them; threads and forked processes have them too.
    """
    units = VECTOR == LINES and has("amx-tile", "amx-int8", "amx-bf16")
    if not (units and sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    call = ctypes.CDLL(None).syscall
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_long] * 3
    return bool(call(_CALL, _PERMISSION, _TILE_DATA) == 0)


def takes(row_bytes: int) -> bool:
    """Return whether rows of so many bytes are multiplied in tiles: whole lines, on a processor that has them."""
    return row_bytes % LINE == 0 and usable()


@intrinsic
def _configure(context, rows):
    """Give this thread tiles for `rows` rows, 1 to 32, in place of those it had."""

    def generate(context, builder, signature, values):
        first = builder.select(builder.icmp_signed("<", values[0], _WORD(LINES)), values[0], _WORD(LINES))
        lines = {each: builder.trunc(first, _BYTE) for each in (0, 1, 4)}
        lines |= {each: builder.trunc(builder.sub(values[0], first), _BYTE) for each in (2, 3, 5)}
        lines |= {each: _BYTE(LINES) for each in _PANELS}
        settings = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 64))
        builder.store(ir.Constant(ir.ArrayType(_BYTE, 64), None), settings)

        def put(place, byte):
            builder.store(byte, builder.gep(settings, [_INT(0), _INT(place)]))

        put(0, _BYTE(1))  # the palette of eight tiles
        for tile, count in lines.items():
            used = builder.icmp_unsigned("!=", count, _BYTE(0))
            put(16 + 2 * tile, builder.select(used, _BYTE(LINE), _BYTE(0)))
            put(48 + tile, count)
        _call(builder, "ldtilecfg", builder.bitcast(settings, _BYTES))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _release(context):
    """Give the tile registers of this thread back."""

    def generate(context, builder, signature, values):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _call(builder, name, *operands):
    x86(builder, name, ir.VoidType(), *operands)


@intrinsic
def _tile(context, rows, x, first, panels, place, of_outputs, relu, out, scales, output, columns):
    """Multiply `rows` rows of x (M, K), uint16 (bfloat16) or uint8, from `first` on, by the panel at `place`; the tiles
    are configured for them. Writes `columns` elements of each row from `output` on."""
    kind, multiply = KINDS[x.dtype], {types.uint16: "tdpbf16ps", types.uint8: "tdpbusd"}[x.dtype]

    def generate(context, builder, signature, values):
        rows, _, first, _, place, _, relu, _, _, output, columns = values

        def array(n):
            return make_array(signature.args[n])(context, builder, values[n])

        add, times = builder.add, builder.mul
        inputs = cgutils.unpack_tuple(builder, array(1).shape)[1]
        outputs, width = (cgutils.unpack_tuple(builder, array(n).shape)[1] for n in (7, 5))
        line = times(inputs, _WORD(kind.bytes))
        start = builder.bitcast(builder.gep(array(1).data, [times(first, inputs)]), _BYTES)
        panel = builder.bitcast(builder.gep(array(3).data, [place]), _BYTES)
        sums = cgutils.alloca_once(builder, ir.ArrayType(_INT, 2 * LINES * PANEL))
        kept = builder.bitcast(sums, _BYTES)

        def emit(halves):
            for tile in _SUMS[: 2 * halves]:
                _call(builder, "tilezero", _BYTE(tile))

            def turn(k, _):
                at = builder.gep(panel, [times(k, _WORD(PANEL))])
                for half in range(halves):
                    begin = builder.gep(start, [add(k, times(line, _WORD(half * LINES)))])
                    _call(builder, "tileloadd64", _BYTE(_ROWS[half]), begin, line)
                for n in range(VECTORS):
                    begin = builder.gep(at, [_WORD(n * LINE)])
                    _call(builder, "tileloadd64", _BYTE(_PANELS[n]), begin, _WORD(PANEL * _GROUP))
                    for half in range(halves):
                        tiles = _SUMS[VECTORS * half + n], _ROWS[half], _PANELS[n]
                        _call(builder, multiply, *map(_BYTE, tiles))

            accumulate(builder, [], LINE, turn, lambda k: builder.icmp_signed("<", k, line))
            for tile in _SUMS[: 2 * halves]:
                begin = (tile // VECTORS * LINES * PANEL + tile % VECTORS * VECTOR) * _GROUP
                _call(builder, "tilestored64", _BYTE(tile), builder.gep(kept, [_WORD(begin)]), _WORD(PANEL * _GROUP))

        with builder.if_else(builder.icmp_signed(">", rows, _WORD(LINES))) as (two, one):
            with two:
                emit(2)
            with one:
                emit(1)
        places = [add(output, _WORD(n * VECTOR)) for n in range(VECTORS)]
        begins = [kind.begin(builder, array(5).data, each, width) for each in places]
        total_of = builder.bitcast(sums, kind.sums.element.as_pointer())
        plus = builder.fadd if isinstance(kind.sums.element, ir.FloatType) else add

        def write(columns):
            with cgutils.for_range(builder, rows) as at:
                row = add(first, at.index)
                written = builder.gep(array(7).data, [add(times(row, outputs), output)])
                scale = scale_of(builder, signature.args[8], array, 8, row)
                for n in range(VECTORS):
                    total = load(builder, total_of, add(times(at.index, _WORD(PANEL)), _WORD(n * VECTOR)), kind.sums)
                    result = kind.end(builder, plus(total, begins[n]), array(5).data, places[n], relu, width, scale)
                    store(builder, written, n * VECTOR, result, columns)

        with builder.if_else(builder.icmp_signed("<", columns, _WORD(PANEL))) as (part, whole):
            with part:
                write(columns)
            with whole:
                write(_WORD(PANEL))
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, x, i, panels, i, of_outputs, types.boolean, out, scales, i, i), generate


@inlined()
def _parts(begin, end, x, panels, of_outputs, relu, out, scales, blocks, count):
    """Parts begin to end of the product, each a panel for a block of rows."""
    inputs, outputs = x.shape[1], out.shape[1]
    configured = 0
    for part in range(np.int64(begin), np.int64(end)):
        block, output = part // count, part % count * PANEL
        place, columns = output * inputs, min(PANEL, outputs - output)
        least, more = x.shape[0] // blocks, x.shape[0] % blocks
        row = block * least + min(block, more)
        last = row + least + (block < more)
        while row < last:
            size = min(2 * LINES, last - row)
            if size != configured:
                _configure(size)
                configured = size
            _tile(size, x, row, panels, place, of_outputs, relu, out, scales, output, columns)
            row += size
    _release()


@loop()
def multiply(team, x, panels, of_outputs, relu, out, scales):
    """panel_tiles.multiply() of bfloat16 or integers where takes()."""
    blocks, count = blocks_of(x), of_outputs.shape[1] // PANEL
    if blocks == 0 or count == 0:
        return
    parts = blocks * count
    together = min(8, max(1, parts // (2 * team[0])))
    args = (x, panels, of_outputs, relu, out, scales, blocks, count)
    over_threads(_parts, team, np.uintp(parts), np.uintp(together), args)
