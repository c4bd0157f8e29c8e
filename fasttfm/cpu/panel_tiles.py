"""Products of panels.py in vector registers; compiled by numba.

The weight is packed into panels, whose width is two vector registers of outputs. A tile of six rows and a panel keeps
its sums in twelve of AVX2's sixteen registers, or of AVX-512's 32, which are twice as wide (van Zee and van de Geijn,
"BLIS: A Framework for Rapidly Instantiating BLAS Functionality", 2015). Rows are not packed. With few rows the panels
come from memory, in huge pages if the system has them. A tile of one or two rows takes several panels at once: with two
sums a row each addition would wait for the one before, and hardware prefetchers follow several streams. Larger tiles
prefetch explicitly, and each of the first four a quarter of the next panel.

In float32 a sum starts with the bias and adds the inputs in order, whatever the number of rows or threads: a row has
the same bits in any batch. 8-bit integer sums are exact (int8.py): an AVX2 instruction multiplies unsigned by signed
integers and adds two products in 16 bits, another adds two of these sums in 32 bits. That is three instructions for 32
products, where float32 takes four, on twice as many execution units, and a quarter of the memory. VNNI does all three
in one. In bfloat16 one instruction adds two products in float32 (AVX512_BF16).

Cost: 2 * M * N * K operations; reads N * K elements per 96 rows, and M * K per panel, from a cache.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from fasttfm.cpu.loop_parts import inlined, loop
from fasttfm.cpu.thread_team import over_threads


def has(*features: str) -> bool:
    """Return whether numba compiles for this processor and it has these features, by LLVM's names."""
    native = not (config.CPU_NAME or config.CPU_FEATURES)  # type: ignore[attr-defined]
    return native and all(map(binding.get_host_cpu_features().get, features))


VECTOR, VECTORS, TILE = 16 if has("avx512f", "avx512bw") else 8, 2, 6
"""Elements of a register, registers per row of a tile, and rows of a tile. They follow numba's target, which is also
part of its disk cache's key."""
PANEL = VECTOR * VECTORS
"""Outputs of a panel."""
UNROLLED = 4
"""Inputs per iteration of the inner loop; the number of inputs is a multiple of it."""
_BLOCK = 384
"""Rows that share one pass over a panel, in bytes of a column: 96 in float32. With 512 inputs they take 192 KiB, which
fits in an L2 cache."""
ABREAST = 64 // PANEL
"""Panels of a tile of one or two rows."""
_TOGETHER = 8
"""Panels that a thread takes at once, so that most of its prefetches are for itself."""
_AHEAD = 2048
"""Prefetch distance in bytes of tiles of more than two rows."""
LINE = 64
"""Bytes of a cache line."""
_MANY = 8
"""Tiles that share the prefetch of the next panel where a block has many; UNROLLED of them where it has few."""

_FLOAT, _WORD, _INT, _BYTES = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_VECTOR, _INTS = ir.VectorType(_FLOAT, VECTOR), ir.VectorType(_INT, VECTOR)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat(), VECTOR)


@functools.cache
def adds_four_products() -> bool:
    """Return whether one instruction adds four products of 8-bit integers (VNNI)."""
    return has("avx512vnni", "avx512vl") or (VECTOR == 8 and has("avxvnni"))


class _Floats:
    """Load, multiply-add and store of float32 in a tile."""

    number, sums, together, bytes = _FLOAT, _VECTOR, 1, 4

    @staticmethod
    def begin(builder, of_outputs, place, width):
        return load(builder, of_outputs, place)

    @staticmethod
    def weight(builder, panel, place):
        return load(builder, panel, place)

    @staticmethod
    def add(builder, number, weight, total):
        return fma(builder, number, weight, total)

    @staticmethod
    def end(builder, total, of_outputs, place, relu, width, scale):
        return _positive(builder, total, relu)


def x86(builder, name, result, *operands):
    """A call of an x86 instruction by LLVM's name."""
    kind = ir.FunctionType(result, [each.type for each in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)


class _Pairs(_Floats):
    """Load, multiply-add and store of bfloat16 in a tile, two inputs at once."""

    number, together, bytes = _INT, 2, 2

    @staticmethod
    def weight(builder, panel, place):
        return load(builder, panel, place, _INTS)

    @staticmethod
    def add(builder, number, weight, total):
        return x86(builder, f"avx512bf16.dpbf16ps.{32 * VECTOR}", _VECTOR, total, number, weight)

    @staticmethod
    def end(builder, total, of_outputs, place, relu, width, scale):
        rounded = x86(builder, f"avx512bf16.cvtneps2bf16.{32 * VECTOR}", _BFLOATS, _positive(builder, total, relu))
        return builder.bitcast(rounded, ir.VectorType(ir.IntType(16), VECTOR))


_BY_TWO_WIDE = "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512"


class _Integers:
    """Load, multiply-add and store of 8-bit integers in a tile, four inputs at once."""

    number, sums, together, bytes = _INT, _INTS, 4, 1
    _inputs, _pairs = ir.VectorType(ir.IntType(8), 4 * VECTOR), ir.VectorType(ir.IntType(16), 2 * VECTOR)

    @staticmethod
    def begin(builder, of_outputs, place, width):
        return builder.bitcast(load(builder, of_outputs, builder.add(place, width)), _Integers.sums)

    @staticmethod
    def weight(builder, panel, place):
        address = builder.bitcast(builder.gep(panel, [place]), _Integers._inputs.as_pointer())
        return builder.load(address, align=1)

    @staticmethod
    def add(builder, number, weight, total):
        if adds_four_products():
            return x86(builder, f"avx512.vpdpbusd.{32 * VECTOR}", _INTS, total, number, builder.bitcast(weight, _INTS))
        inputs, pairs = _Integers._inputs, _Integers._pairs
        by_two, widened = ("avx2.pmadd.ub.sw", "avx2.pmadd.wd") if VECTOR == 8 else _BY_TWO_WIDE
        twos = x86(builder, by_two, pairs, builder.bitcast(number, inputs), weight)
        return builder.add(total, x86(builder, widened, _INTS, twos, pairs([1] * (2 * VECTOR))))

    @staticmethod
    def end(builder, total, of_outputs, place, relu, width, scale):
        scaled = builder.fmul(builder.sitofp(total, _VECTOR), load(builder, of_outputs, place))
        if scale is None:
            return scaled
        bias = load(builder, of_outputs, builder.add(place, builder.add(width, width)))
        return _positive(builder, builder.fadd(builder.fmul(scaled, broadcast(builder, scale)), bias), relu)


KINDS: dict[Any, Any] = {types.float32: _Floats, types.uint16: _Pairs, types.uint8: _Integers}


@intrinsic
def _tile(context, rows, x, first, panels, place, following, many, of_outputs, relu, out, scales, output, columns):
    """Multiply `rows` rows of x (M, K), float32, uint16 (bfloat16) or uint8, from `first` on, by panels at `place`.

    One panel, or ABREAST panels with one or two rows. Writes `columns` elements of each row from `output` on, and
    prefetches a quarter of a panel that lies `following` elements behind, with `many` an eighth.
    """
    kind = KINDS[x.dtype]
    together, shares = kind.together, UNROLLED if many is types.none else _MANY

    def generate(context, builder, signature, values):
        rows, _, first, _, place, following, _, _, relu, _, _, output, columns = values

        def array(n):
            return make_array(signature.args[n])(context, builder, values[n])

        inputs = cgutils.unpack_tuple(builder, array(1).shape)[1]
        outputs, width = (cgutils.unpack_tuple(builder, array(n).shape)[1] for n in (9, 7))
        add, times = builder.add, builder.mul

        def emit(rows):
            abreast = ABREAST if rows <= 2 else 1
            vectors = range(abreast * VECTORS)
            starts = [builder.gep(array(1).data, [times(add(first, _WORD(m)), inputs)]) for m in range(rows)]
            lines = [builder.bitcast(each, kind.number.as_pointer()) for each in starts]
            nearest = builder.gep(array(3).data, [place])
            panel = [builder.gep(nearest, [times(_WORD(each * PANEL), inputs)]) for each in range(abreast)]
            places = [add(output, _WORD(n * VECTOR)) for n in vectors]
            start = [kind.begin(builder, array(7).data, each, width) for each in places]

            def turn(k, sums):
                if abreast == 1:
                    asked = add(following, times(k, _WORD(PANEL // shares * together)))
                    fetch(builder, nearest, asked, PANEL * kind.bytes * UNROLLED // shares, 2)
                for step in range(UNROLLED // together):
                    now = add(k, _WORD(step))
                    offset = times(now, _WORD(PANEL * together))
                    inside = [add(offset, _WORD(v * VECTOR * together)) for v in range(VECTORS)]
                    weights = [kind.weight(builder, each, at) for each in panel for at in inside]
                    if abreast == 1:
                        ahead = add(offset, _WORD(_AHEAD // kind.bytes))
                        fetch(builder, nearest, ahead, PANEL * together * kind.bytes, 3)
                    for m, line in enumerate(lines):
                        number = broadcast(builder, builder.load(builder.gep(line, [now]), align=4 // together))
                        sums[m] = [kind.add(builder, number, weight, each) for weight, each in zip(weights, sums[m])]

            def more(k):
                return builder.icmp_signed("<", times(k, _WORD(together)), inputs)

            sums = accumulate(builder, [start] * rows, UNROLLED // together, turn, more)
            for m in range(rows):
                line = builder.gep(array(9).data, [add(times(add(first, _WORD(m)), outputs), output)])
                scale = scale_of(builder, signature.args[10], array, 10, add(first, _WORD(m)))
                for n in vectors:
                    result = kind.end(builder, sums[m][n], array(7).data, places[n], relu, width, scale)
                    store(builder, line, n * VECTOR, result, columns)

        for_rows(builder, rows, emit)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, x, i, panels, i, i, many, of_outputs, types.boolean, out, scales, i, i), generate


def scale_of(builder, kind, array, n, row):
    """The row's element of argument n, an array of this numba type, or None without an array."""
    return None if kind is types.none else builder.load(builder.gep(array(n).data, [row]))


def for_rows(builder, rows, emit):
    """Emit the code of emit(n) for n = 1 to TILE, of which the value `rows` selects one at run time."""
    done = builder.append_basic_block()
    switch = builder.switch(rows, done)
    for n in range(1, TILE + 1):
        switch.add_case(_WORD(n), block := builder.append_basic_block())
        builder.position_at_end(block)
        emit(n)
        builder.branch(done)
    builder.position_at_end(done)


def accumulate(builder, start, step, turn, more):
    """Emit a loop over k = 0, step, 2 * step, ... that carries rows of sums, from `start` on; returns the last ones.

    turn(k, sums) emits an iteration and replaces the sums; the loop ends unless more(next k).
    """
    entry, head, done = builder.block, *(builder.append_basic_block() for _ in range(2))
    builder.branch(head)
    builder.position_at_end(head)
    k, phis = builder.phi(_WORD), [[builder.phi(value.type) for value in row] for row in start]
    sums = [list(row) for row in phis]
    turn(k, sums)
    after = builder.add(k, _WORD(step))
    carried = [each for rows in zip(phis, start, sums) for each in zip(*rows)]
    for phi, at_first, at_end in [(k, _WORD(0), after), *carried]:
        phi.add_incoming(at_first, entry)
        phi.add_incoming(at_end, head)
    builder.cbranch(more(after), head, done)
    builder.position_at_end(done)
    return sums


def load(builder, data, place, vector=_VECTOR):
    return builder.load(builder.bitcast(builder.gep(data, [place]), vector.as_pointer()), align=4)


def fetch(builder, data, place, size, level):
    """Prefetch `size` bytes from data[place] on; level: 3 for L1, 2 for L2."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    address = builder.bitcast(builder.gep(data, [place]), _BYTES)
    for line in range(0, size, LINE):
        builder.call(prefetch, [builder.gep(address, [_WORD(line)]), _INT(0), _INT(level), _INT(1)])


def broadcast(builder, number, count=VECTOR):
    undefined = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(undefined, number, _INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, count), None))


def fma(builder, a, b, c):
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32"), [a, b, c])


def _positive(builder, x, relu):
    """max(0, x) with relu, else x; NaN propagates."""
    zero = ir.Constant(_VECTOR, None)
    return builder.select(relu, builder.select(builder.fcmp_ordered("<", x, zero), zero, x), x)


def store(builder, line, place, x, columns):
    """Store the elements of x at `place` that lie within `columns`."""
    address = builder.bitcast(builder.gep(line, [_WORD(place)]), x.type.as_pointer())
    with builder.if_else(builder.icmp_signed(">=", columns, _WORD(place + VECTOR))) as (whole, part):
        with whole:
            builder.store(x, address, align=2)
        with part:
            for n in range(VECTOR):
                with builder.if_then(builder.icmp_signed("<", _WORD(place + n), columns)):
                    builder.store(builder.extract_element(x, _INT(n)), builder.gep(line, [_WORD(place + n)]))


@inlined()
def _parts(begin, end, x, panels, many, of_outputs, relu, out, scales, blocks, count, abreast):
    """Parts begin to end of the product, each `abreast` panels for a block of rows, in tiles of even size."""
    inputs, outputs = x.shape[1], out.shape[1]
    for part in range(np.int64(begin), np.int64(end)):
        block, output = part // count, part % count * abreast * PANEL
        place, columns = output * inputs, min(abreast * PANEL, outputs - output)
        least, more = x.shape[0] // blocks, x.shape[0] % blocks
        row, rows = block * least + min(block, more), least + (block < more)
        tiles = (rows + TILE - 1) // TILE
        following, shares = PANEL * inputs, UNROLLED if many is None else _MANY
        for tile in range(tiles):
            size = rows // tiles + (tile < rows % tiles)
            _tile(size, x, row, panels, place, following, many, of_outputs, relu, out, scales, output, columns)
            row += size
            following += PANEL * inputs // shares if tile < shares - 1 else 0


@inlined()
def blocks_of(x):
    """The number of blocks of the rows x."""
    block = _BLOCK // x.itemsize
    return (x.shape[0] + block - 1) // block


@loop()
def multiply(team, x, panels, of_outputs, relu, out, scales, many):
    """Multiply rows x (M, K) by panels, to out (M, N), max(0, .) with relu.

    of_outputs: operands per output, padded to whole panels: the bias; of integers the scales, the initial values of the
    sums and the bias, which with relu applies only where scales (M,) of the rows are given. many: True where the rows
    make many tiles, else None.
    """
    rows = x.shape[0]
    abreast = ABREAST if rows <= 2 else 1  # from three rows on no tile has one or two
    count = of_outputs.shape[1] // (PANEL * abreast)
    blocks = blocks_of(x)
    if blocks == 0 or count == 0:
        return
    parts = blocks * count
    together = min(_TOGETHER // abreast, max(1, parts // (2 * team[0])))
    args = (x, panels, many, of_outputs, relu, out, scales, blocks, count, abreast)
    over_threads(_parts, team, np.uintp(parts), np.uintp(together), args)
