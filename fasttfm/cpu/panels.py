"""A product whose matrix is read once, in panels of two registers' outputs, for a search on a CPU; compiled by numba.

A tile of six rows and a panel has its sums in twelve registers, of AVX2's sixteen or of AVX-512's 32, which are twice
as wide; each number that is read of either side is used by all of them (van Zee and van de Geijn, "BLIS: A Framework
for Rapidly Instantiating BLAS Functionality", 2015). Rows are read where they lie. The panels of a few rows come from
memory, in huge pages where the system has them. A tile of one row or two takes several panels at once: with two sums a
row each addition would wait for the one before, and a processor reads ahead in several places. Tiles of more rows ask
for what they need soon, and the first four for a quarter each of the panel that comes after this one.

In float32 a sum begins with the bias and goes through the inputs in their order, whatever the number of rows or
threads: a row has the same bits beside any others. Of 8-bit integers sums are exact, as int8.py says: AVX2 multiplies
unsigned by signed ones and adds two products in 16 bits, another instruction adds two of these sums in 32 bits. That is
three instructions for 32 products, where float32 takes four, on twice as many of the processor's units, and a quarter
of the memory. VNNI does all three in one. Of bfloat16 an instruction adds two products in float32 (AVX512_BF16).

Cost: 2 * M * N * K operations; N * K numbers are read for each 96 rows, and M * K once for every panel, from a cache.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from torch import Tensor

from fasttfm.cpu import step_passes
from fasttfm.cpu.loop_parts import inlined, loop
from fasttfm.cpu.thread_team import over_threads, team


def _has(*features: str) -> bool:
    """Return whether numba compiles for this very processor, which has these features, as LLVM calls them."""
    native = not (config.CPU_NAME or config.CPU_FEATURES)  # type: ignore[attr-defined]
    return native and all(map(binding.get_host_cpu_features().get, features))


VECTOR, VECTORS, TILE = 16 if _has("avx512f", "avx512bw") else 8, 2, 6
"""Numbers of a register, registers a row of a tile, and its rows. What numba compiles for decides, as it does of loops
that it has kept on disk."""
PANEL = VECTOR * VECTORS
"""Outputs of a panel."""
UNROLLED = 4
"""Inputs that one turn of the loop adds; a product has a multiple of them."""
_BLOCK = 384
"""Bytes of a column of the rows that a panel is read for at a time, 96 in float32: with 512 inputs they take 192 KiB,
which a second-level cache holds."""
ABREAST = 64 // PANEL
"""Panels of a tile of one row or two."""
_TOGETHER = 8
"""Panels that a thread takes at a time, so that what it asks for is mostly its own."""
_AHEAD = 2048
"""Bytes between what a tile of more rows multiplies and what it asks for."""
_CHUNK = 1 << 25
"""Bytes of the memory that panels of many weights share: 32 MiB. NumPy asks for huge pages from 4 MiB on."""
_LINE = 64
"""Bytes of a line of a cache."""

_FLOAT, _WORD, _INT, _BYTES = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_VECTOR, _INTS = ir.VectorType(_FLOAT, VECTOR), ir.VectorType(_INT, VECTOR)


class PanelProduct:
    """rows (M, K) -> rows weight^T + bias (M, N), then max(0, .) with relu; all float32, or bfloat16 where
    multiplies_pairs(); K a multiple of UNROLLED."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool) -> None:
        outputs, inputs = weight.shape
        count = -(-outputs // (PANEL * ABREAST)) * ABREAST
        filled = weight.new_zeros(count * PANEL, inputs)
        filled[:outputs] = weight.detach()
        numbers = self._array(filled)
        self._panels = _chunks.take(filled.nbytes).view(numbers.dtype)
        side_by_side = numbers.reshape(count, PANEL, -1, 4 // filled.itemsize).swapaxes(1, 2)
        self._panels.reshape(side_by_side.shape)[:] = side_by_side
        self._outputs, self._relu, self._of_outputs = outputs, relu, self._vectors(filled, bias)

    def _vectors(self, filled: Tensor, bias: Tensor | None) -> Any:
        """(1 or 2, N up to whole panels) float32: what else there is of each output, here the bias."""
        vector = filled.new_zeros(1, filled.shape[0], dtype=torch.float32)
        if bias is not None:
            vector[0, : len(bias)] = bias.detach()
        return vector.numpy()

    def __call__(self, rows: Tensor) -> Tensor:
        """The product, by as many threads as PyTorch has."""
        out = self._out(rows)
        self.of(rows.detach().contiguous(), out)()
        return out

    def of(self, rows: Tensor, out: Tensor | None = None) -> Callable[[], Any]:
        """The call that multiplies what these rows hold then, contiguous, into out (M, N), and returns out as array."""
        out = self._out(rows) if out is None else out
        given = self._array(rows), self._panels, self._of_outputs, self._relu, step_passes.array(out)

        def product() -> Any:
            _multiply(team(), *given)
            return given[-1]

        return product

    def _out(self, rows: Tensor) -> Tensor:
        return rows.new_empty(rows.shape[0], self._outputs)

    def _array(self, x: Tensor) -> Any:
        return step_passes.array(x)


class IntegerPanelProduct(PanelProduct):
    """rows (M, K) uint8 -> ((rows - 128) weight^T) * scales (M, N) float32; weight (N, K) int8 and scales (N,) float32
    as quantize_weight() has them, K a multiple of UNROLLED and below 2^16, so that sums fit 32 bits."""

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__(weight, scales, relu=False)

    def _out(self, rows: Tensor) -> Tensor:
        return rows.new_empty(rows.shape[0], self._outputs, dtype=torch.float32)

    def _array(self, x: Tensor) -> Any:
        return x.numpy()

    def _vectors(self, filled: Tensor, bias: Tensor | None) -> Any:
        """The scales, and the integers at which sums begin, because rows are 128 too large."""
        scales, begin = super()._vectors(filled, bias), -128 * filled.sum(dim=1, dtype=torch.int32)
        return np.concatenate([scales, begin.numpy().view(np.float32)[None]])


def multiplies_integers() -> bool:
    """Return whether numba compiles IntegerPanelProduct's loop for this processor; any compiles PanelProduct's."""
    return _has("avx2")


@functools.cache
def multiplies_pairs() -> bool:
    """Return whether PanelProduct takes bfloat16, and AMX does not multiply it faster."""
    return _has("avx512bf16") and not _has("amx-bf16")


@functools.cache
def adds_four_products() -> bool:
    """Return whether one instruction adds four products of 8-bit integers: VNNI's."""
    return _has("avx512vnni", "avx512vl") or (VECTOR == 8 and _has("avxvnni"))


class _Chunks:
    """Memory for panels, which a chunk gives until it is full; it is freed when nothing of it is used any more."""

    def __init__(self) -> None:
        self._rest: Any = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, count: int) -> Any:
        """An array of so many bytes, from the begin of a cache line on."""
        with self._lock:
            if len(self._rest) < count:
                chunk = np.empty(max(count, _CHUNK) + _LINE, np.uint8)
                self._rest = chunk[-chunk.ctypes.data % _LINE :]
            taken, self._rest = self._rest[:count], self._rest[-(-count // _LINE) * _LINE :]
        return taken


_chunks = _Chunks()


class _Floats:
    """Reading, multiplying and writing float32 in a tile."""

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
    def end(builder, total, of_outputs, place, relu):
        return _positive(builder, total, relu)


def _x86(builder, name, result, *operands):
    """The call of an instruction of this processor's, as LLVM calls it."""
    kind = ir.FunctionType(result, [each.type for each in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)


class _Pairs(_Floats):
    """Reading, multiplying and writing bfloat16 in a tile, two inputs at once."""

    number, together, bytes = _INT, 2, 2

    @staticmethod
    def weight(builder, panel, place):
        return load(builder, panel, place, _INTS)

    @staticmethod
    def add(builder, number, weight, total):
        return _x86(builder, f"avx512bf16.dpbf16ps.{32 * VECTOR}", _VECTOR, total, number, weight)

    @staticmethod
    def end(builder, total, of_outputs, place, relu):
        """Rounds as loop_parts.py does."""
        total = _positive(builder, total, relu)
        bits = builder.bitcast(total, _INTS)
        high = builder.lshr(bits, _INTS([16] * VECTOR))
        half = builder.add(builder.and_(high, _INTS([1] * VECTOR)), _INTS([0x7FFF] * VECTOR))
        rounded = builder.lshr(builder.add(bits, half), _INTS([16] * VECTOR))
        rounded = builder.select(builder.fcmp_unordered("uno", total, total), _INTS([0x7FC0] * VECTOR), rounded)
        return builder.trunc(rounded, ir.VectorType(ir.IntType(16), VECTOR))


_BY_TWO_WIDE = "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512"


class _Integers:
    """Reading, multiplying and writing 8-bit integers in a tile, four inputs at once."""

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
            return _x86(builder, f"avx512.vpdpbusd.{32 * VECTOR}", _INTS, total, number, builder.bitcast(weight, _INTS))
        inputs, pairs = _Integers._inputs, _Integers._pairs
        by_two, widened = ("avx2.pmadd.ub.sw", "avx2.pmadd.wd") if VECTOR == 8 else _BY_TWO_WIDE
        twos = _x86(builder, by_two, pairs, builder.bitcast(number, inputs), weight)
        return builder.add(total, _x86(builder, widened, _INTS, twos, pairs([1] * (2 * VECTOR))))

    @staticmethod
    def end(builder, total, of_outputs, place, relu):
        return builder.fmul(builder.sitofp(total, _VECTOR), load(builder, of_outputs, place))


_KINDS: dict[Any, Any] = {types.float32: _Floats, types.uint16: _Pairs, types.uint8: _Integers}


def _tile(rows, abreast=1):
    """Return tile(x, first, panels, place, following, of_outputs, relu, out, output, columns) for so many rows of
    x (M, K), float32, uint16 that holds bfloat16, or uint8.

    It multiplies rows first, first + 1, ... of x by the panel at `place` and those after it, `abreast` in all, and
    writes `columns` numbers of each row from `output` on. From `following` numbers behind on it asks for a quarter of a
    panel.
    """
    vectors = abreast * VECTORS

    @intrinsic
    def tile(context, x, first, panels, place, following, of_outputs, relu, out, output, columns):
        kind = _KINDS[x.dtype]
        together = kind.together

        def generate(context, builder, signature, values):
            _, first, _, place, following, _, relu, _, output, columns = values

            def array(n):
                return make_array(signature.args[n])(context, builder, values[n])

            inputs = cgutils.unpack_tuple(builder, array(0).shape)[1]
            outputs, width = (cgutils.unpack_tuple(builder, array(n).shape)[1] for n in (7, 5))
            add, times = builder.add, builder.mul
            starts = [builder.gep(array(0).data, [times(add(first, _WORD(m)), inputs)]) for m in range(rows)]
            lines = [builder.bitcast(each, kind.number.as_pointer()) for each in starts]
            nearest = builder.gep(array(2).data, [place])
            panel = [builder.gep(nearest, [times(_WORD(each * PANEL), inputs)]) for each in range(abreast)]
            places = [add(output, _WORD(n * VECTOR)) for n in range(vectors)]
            entry, head, done = builder.block, *(builder.append_basic_block() for _ in range(2))
            start = [kind.begin(builder, array(5).data, each, width) for each in places]
            builder.branch(head)
            builder.position_at_end(head)
            k = builder.phi(_WORD)
            sums = [[builder.phi(kind.sums) for _ in range(vectors)] for _ in range(rows)]
            last = [list(each) for each in sums]
            if abreast == 1:
                asked = add(following, times(k, _WORD(PANEL // UNROLLED * together)))
                _fetch(builder, nearest, asked, PANEL * kind.bytes, 2)
            for step in range(UNROLLED // together):
                now = add(k, _WORD(step))
                offset = times(now, _WORD(PANEL * together))
                inside = [add(offset, _WORD(v * VECTOR * together)) for v in range(VECTORS)]
                weights = [kind.weight(builder, each, at) for each in panel for at in inside]
                if abreast == 1:
                    ahead = add(offset, _WORD(_AHEAD // kind.bytes))
                    _fetch(builder, nearest, ahead, PANEL * together * kind.bytes, 3)
                for m, line in enumerate(lines):
                    number = broadcast(builder, builder.load(builder.gep(line, [now]), align=4 // together))
                    last[m] = [kind.add(builder, number, weight, each) for weight, each in zip(weights, last[m])]
            after = add(k, _WORD(UNROLLED // together))
            for phi, begin, end in [(k, _WORD(0), after)] + [
                (sums[m][n], start[n], last[m][n]) for m in range(rows) for n in range(vectors)
            ]:
                phi.add_incoming(begin, entry)
                phi.add_incoming(end, head)
            builder.cbranch(builder.icmp_signed("<", times(after, _WORD(together)), inputs), head, done)
            builder.position_at_end(done)
            for m in range(rows):
                line = builder.gep(array(7).data, [add(times(add(first, _WORD(m)), outputs), output)])
                for n in range(vectors):
                    result = kind.end(builder, last[m][n], array(5).data, places[n], relu)
                    _store(builder, line, n * VECTOR, result, columns)
            return context.get_dummy_value()

        i = types.int64
        return types.void(x, i, panels, i, i, of_outputs, types.boolean, out, i, i), generate

    return tile


def load(builder, data, place, vector=_VECTOR):
    return builder.load(builder.bitcast(builder.gep(data, [place]), vector.as_pointer()), align=4)


def _fetch(builder, data, place, size, level):
    """Asks for `size` bytes from data[place] on; level: 3 for the nearest cache, 2 for the one after."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    address = builder.bitcast(builder.gep(data, [place]), _BYTES)
    for line in range(0, size, _LINE):
        builder.call(prefetch, [builder.gep(address, [_WORD(line)]), _INT(0), _INT(level), _INT(1)])


def broadcast(builder, number, count=VECTOR):
    undefined = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(undefined, number, _INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, count), None))


def fma(builder, a, b, c):
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32"), [a, b, c])


def _positive(builder, x, relu):
    """max(0, x) where relu says so; NaN stays."""
    zero = ir.Constant(_VECTOR, None)
    return builder.select(relu, builder.select(builder.fcmp_ordered("<", x, zero), zero, x), x)


def _store(builder, line, place, x, columns):
    """Writes x from `place` on, as far as `columns` goes."""
    address = builder.bitcast(builder.gep(line, [_WORD(place)]), x.type.as_pointer())
    with builder.if_else(builder.icmp_signed(">=", columns, _WORD(place + VECTOR))) as (whole, part):
        with whole:
            builder.store(x, address, align=2)
        with part:
            for n in range(VECTOR):
                with builder.if_then(builder.icmp_signed("<", _WORD(place + n), columns)):
                    builder.store(builder.extract_element(x, _INT(n)), builder.gep(line, [_WORD(place + n)]))


_one, _two = (_tile(rows, ABREAST) for rows in (1, 2))
_three, _four, _five, _six = (_tile(rows) for rows in range(3, TILE + 1))


@inlined()
def _parts(begin, end, x, panels, of_outputs, relu, out, blocks, count, abreast):
    """Parts begin to end of the product: each `abreast` panels for a block of rows, in tiles as even as can be."""
    inputs, outputs = x.shape[1], out.shape[1]
    for part in range(np.int64(begin), np.int64(end)):
        block, output = part // count, part % count * abreast * PANEL
        place, columns = output * inputs, min(abreast * PANEL, outputs - output)
        least, more = x.shape[0] // blocks, x.shape[0] % blocks
        row, rows = block * least + min(block, more), least + (block < more)
        tiles = (rows + TILE - 1) // TILE
        following = PANEL * inputs
        for tile in range(tiles):
            size = rows // tiles + (tile < rows % tiles)
            if size == 6:
                _six(x, row, panels, place, following, of_outputs, relu, out, output, columns)
            elif size == 5:
                _five(x, row, panels, place, following, of_outputs, relu, out, output, columns)
            elif size == 4:
                _four(x, row, panels, place, following, of_outputs, relu, out, output, columns)
            elif size == 3:
                _three(x, row, panels, place, following, of_outputs, relu, out, output, columns)
            elif size == 2:
                _two(x, row, panels, place, following, of_outputs, relu, out, output, columns)
            else:
                _one(x, row, panels, place, following, of_outputs, relu, out, output, columns)
            row += size
            following += PANEL * inputs // UNROLLED if tile < UNROLLED - 1 else 0


@loop()
def _multiply(team, x, panels, of_outputs, relu, out):
    rows = x.shape[0]
    abreast = ABREAST if rows <= 2 else 1  # of more rows no tile has one or two
    count = of_outputs.shape[1] // (PANEL * abreast)
    block = _BLOCK // x.itemsize
    blocks = (rows + block - 1) // block
    if blocks == 0 or count == 0:
        return
    parts = blocks * count
    together = min(_TOGETHER // abreast, max(1, parts // (2 * team[0])))
    given = (x, panels, of_outputs, relu, out, blocks, count, abreast)
    over_threads(_parts, team, np.uintp(parts), np.uintp(together), given)
