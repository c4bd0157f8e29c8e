"""A float32 product whose matrix is read once, in panels of 16 outputs, for a search on a CPU; compiled by numba.

A tile of six rows and a panel has its sums in twelve of AVX2's sixteen registers, and each number that is read of
either side is used by all of them (van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS
Functionality", 2015). Rows are read where they lie. The panels of a few rows come from memory, in huge pages where the
system has them. A tile of one row or two takes four panels at once: with two sums a row each addition would wait for
the one before, and a processor reads ahead in several places. Tiles of more rows ask for what they need soon, and the
first four for a quarter each of the panel that comes after this one.

A sum begins with the bias and goes through the inputs in their order, whatever the number of rows or threads: a row
has the same bits beside any others.

Cost: 2 * M * N * K operations; N * K numbers are read for each 96 rows, and M * K once for every panel, from a cache.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from torch import Tensor

from fasttfm.cpu.loop_parts import inlined, loop
from fasttfm.cpu.thread_team import over_threads, team

VECTOR, VECTORS, TILE = 8, 2, 6
"""Numbers of a register, registers a row of a tile, and its rows."""
PANEL = VECTOR * VECTORS
"""Outputs of a panel."""
UNROLLED = 4
"""Inputs that one turn of the loop adds; a product has a multiple of them."""
BLOCK = 96
"""Rows that a panel is read for at a time: with 512 inputs they take 192 KiB, which a second-level cache holds."""
ABREAST = 4
"""Panels of a tile of one row or two."""
_TOGETHER = 8
"""Panels that a thread takes at a time, so that what it asks for is mostly its own."""
_AHEAD = 512
"""Numbers between what a tile of more rows multiplies and what it asks for: 2 KiB."""
_CHUNK = 1 << 23
"""Numbers of the memory that panels of many weights share: 32 MiB. NumPy asks for huge pages from 4 MiB on."""
_LINE = 16
"""Numbers of a line of a cache."""

_FLOAT, _WORD, _INT, _BYTES = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, VECTOR)


class PanelProduct:
    """rows (M, K) -> rows weight^T + bias (M, N), then max(0, .) with relu; all float32, K a multiple of UNROLLED."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool) -> None:
        outputs, inputs = weight.shape
        count = -(-outputs // (PANEL * ABREAST)) * ABREAST
        filled = torch.zeros(count * PANEL, inputs)
        filled[:outputs] = weight.detach()
        self._panels = _chunks.take(filled.numel())
        torch.from_numpy(self._panels).view(count, inputs, PANEL).copy_(filled.view(count, PANEL, inputs).mT)
        self._bias = np.zeros(count * PANEL, np.float32)
        if bias is not None:
            self._bias[:outputs] = bias.detach().numpy()
        self._outputs, self._relu = outputs, relu

    def __call__(self, rows: Tensor) -> Tensor:
        """The product, by as many threads as PyTorch has."""
        out = torch.empty(rows.shape[0], self._outputs)
        self.of(rows.detach().contiguous(), out)()
        return out

    def of(self, rows: Tensor, out: Tensor | None = None) -> Callable[[], Any]:
        """The call that multiplies what these rows hold then, contiguous, into out (M, N), and returns out as array."""
        out = torch.empty(rows.shape[0], self._outputs) if out is None else out
        given = rows.numpy(), self._panels, self._bias, self._relu, out.numpy()

        def product() -> Any:
            _multiply(team(), *given)
            return given[-1]

        return product


class _Chunks:
    """Memory for panels, which a chunk gives until it is full; it is freed when nothing of it is used any more."""

    def __init__(self) -> None:
        self._rest: Any = np.empty(0, np.float32)
        self._lock = threading.Lock()

    def take(self, count: int) -> Any:
        """An array of so many numbers, from the begin of a cache line on."""
        with self._lock:
            if len(self._rest) < count:
                chunk = np.empty(max(count, _CHUNK) + _LINE, np.float32)
                self._rest = chunk[-chunk.ctypes.data % (4 * _LINE) // 4 :]
            taken, self._rest = self._rest[:count], self._rest[-(-count // _LINE) * _LINE :]
        return taken


_chunks = _Chunks()


def _tile(rows, abreast=1):
    """Return tile(x, first, panels, place, following, bias, relu, out, output, columns) for so many rows of x (M, K).

    It multiplies rows first, first + 1, ... of x by the panel at `place` and those after it, `abreast` in all, and
    writes `columns` numbers of each row from `output` on. From `following` numbers behind on it asks for a quarter of a
    panel.
    """
    vectors = abreast * VECTORS

    @intrinsic
    def tile(context, x, first, panels, place, following, bias, relu, out, output, columns):
        def generate(context, builder, signature, values):
            _, first, _, place, following, _, relu, _, output, columns = values

            def array(n):
                return make_array(signature.args[n])(context, builder, values[n])

            inputs = cgutils.unpack_tuple(builder, array(0).shape)[1]
            outputs = cgutils.unpack_tuple(builder, array(7).shape)[1]
            add, times = builder.add, builder.mul
            lines = [builder.gep(array(0).data, [times(add(first, _WORD(m)), inputs)]) for m in range(rows)]
            nearest = builder.gep(array(2).data, [place])
            panel = [builder.gep(nearest, [times(_WORD(each * PANEL), inputs)]) for each in range(abreast)]
            entry, head, done = builder.block, *(builder.append_basic_block() for _ in range(2))
            start = [load(builder, array(5).data, add(output, _WORD(n * VECTOR))) for n in range(vectors)]
            builder.branch(head)
            builder.position_at_end(head)
            k = builder.phi(_WORD)
            sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
            last = [list(each) for each in sums]
            if abreast == 1:
                _fetch(builder, builder.gep(nearest, [add(following, times(k, _WORD(PANEL // UNROLLED)))]), 2)
            for step in range(UNROLLED):
                now = add(k, _WORD(step))
                offset = times(now, _WORD(PANEL))
                weights = [
                    load(builder, each, add(offset, _WORD(v * VECTOR))) for each in panel for v in range(VECTORS)
                ]
                if abreast == 1:
                    _fetch(builder, builder.gep(nearest, [add(offset, _WORD(_AHEAD))]), 3)
                for m, line in enumerate(lines):
                    number = broadcast(builder, builder.load(builder.gep(line, [now])))
                    last[m] = [fma(builder, number, weight, each) for weight, each in zip(weights, last[m])]
            after = add(k, _WORD(UNROLLED))
            for phi, begin, end in [(k, _WORD(0), after)] + [
                (sums[m][n], start[n], last[m][n]) for m in range(rows) for n in range(vectors)
            ]:
                phi.add_incoming(begin, entry)
                phi.add_incoming(end, head)
            builder.cbranch(builder.icmp_signed("<", after, inputs), head, done)
            builder.position_at_end(done)
            for m in range(rows):
                line = builder.gep(array(7).data, [add(times(add(first, _WORD(m)), outputs), output)])
                for n in range(vectors):
                    _store(builder, line, n * VECTOR, _positive(builder, last[m][n], relu), columns)
            return context.get_dummy_value()

        i = types.int64
        return types.void(x, i, panels, i, i, bias, types.boolean, out, i, i), generate

    return tile


def load(builder, data, place):
    return builder.load(builder.bitcast(builder.gep(data, [place]), _VECTOR.as_pointer()), align=4)


def _fetch(builder, address, level):
    """Asks for the memory at an address; level: 3 for the nearest cache, 2 for the one after."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(address, _BYTES), _INT(0), _INT(level), _INT(1)])


def broadcast(builder, number):
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, _INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, VECTOR), None))


def fma(builder, a, b, c):
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{VECTOR}f32"), [a, b, c])


def _positive(builder, x, relu):
    """max(0, x) where relu says so; NaN stays."""
    zero = ir.Constant(_VECTOR, None)
    return builder.select(relu, builder.select(builder.fcmp_ordered("<", x, zero), zero, x), x)


def _store(builder, line, place, x, columns):
    """Writes x from `place` on, as far as `columns` goes."""
    address = builder.bitcast(builder.gep(line, [_WORD(place)]), _VECTOR.as_pointer())
    with builder.if_else(builder.icmp_signed(">=", columns, _WORD(place + VECTOR))) as (whole, part):
        with whole:
            builder.store(x, address, align=4)
        with part:
            for n in range(VECTOR):
                with builder.if_then(builder.icmp_signed("<", _WORD(place + n), columns)):
                    builder.store(builder.extract_element(x, _INT(n)), builder.gep(line, [_WORD(place + n)]))


_one, _two = (_tile(rows, ABREAST) for rows in (1, 2))
_three, _four, _five, _six = (_tile(rows) for rows in range(3, TILE + 1))


@inlined()
def _parts(begin, end, x, panels, bias, relu, out, blocks, count, abreast):
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
                _six(x, row, panels, place, following, bias, relu, out, output, columns)
            elif size == 5:
                _five(x, row, panels, place, following, bias, relu, out, output, columns)
            elif size == 4:
                _four(x, row, panels, place, following, bias, relu, out, output, columns)
            elif size == 3:
                _three(x, row, panels, place, following, bias, relu, out, output, columns)
            elif size == 2:
                _two(x, row, panels, place, following, bias, relu, out, output, columns)
            else:
                _one(x, row, panels, place, following, bias, relu, out, output, columns)
            row += size
            following += PANEL * inputs // UNROLLED if tile < UNROLLED - 1 else 0


@loop()
def _multiply(team, x, panels, bias, relu, out):
    rows = x.shape[0]
    abreast = ABREAST if rows <= 2 else 1  # of more rows no tile has one or two
    count = len(bias) // (PANEL * abreast)
    blocks = (rows + BLOCK - 1) // BLOCK
    if blocks == 0 or count == 0:
        return
    parts = blocks * count
    together = min(_TOGETHER // abreast, max(1, parts // (2 * team[0])))
    given = (x, panels, bias, relu, out, blocks, count, abreast)
    over_threads(_parts, team, np.uintp(parts), np.uintp(together), given)
