"""A float32 product whose matrix is read once, in panels of 16 outputs, for a search on a CPU; compiled by numba.

A tile of six rows and a panel has its sums in twelve of AVX2's sixteen registers, and each number that is read of
either side is used by all of them (van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS
Functionality", 2015). Rows are read where they lie. The panels of a few rows come from memory, so each tile asks for
the panel after its own while it multiplies.

A sum begins with the bias and goes through the inputs in their order, whatever the number of rows or threads: a row
has the same bits beside any others.

Cost: 2 * M * N * K operations; N * K numbers are read for each 96 rows, and M * K once for every panel, from a cache.
"""

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
_TOGETHER = 8
"""Panels that a thread takes at a time, so that the one after this is mostly its own."""

_FLOAT, _WORD, _INT, _BYTES = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, VECTOR)


class PanelProduct:
    """rows (M, K) -> rows weight^T + bias (M, N), then max(0, .) with relu; all float32, K a multiple of UNROLLED."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool) -> None:
        outputs, inputs = weight.shape
        count = -(-outputs // PANEL)
        filled = torch.zeros(count * PANEL, inputs)
        filled[:outputs] = weight.detach()
        self._panels = filled.view(count, PANEL, inputs).transpose(1, 2).contiguous().view(-1).numpy()
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


def _tile(rows):
    """Return tile(x, first, panels, place, following, bias, relu, out, output, columns) for so many rows of x (M, K).

    It multiplies rows first, first + 1, ... of x by the panel at `place`, asks for the one `following` numbers
    behind, and writes `columns` numbers of each row from `output` on.
    """

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
            panel = builder.gep(array(2).data, [place])
            entry, head, done = builder.block, *(builder.append_basic_block() for _ in range(2))
            start = [load(builder, array(5).data, add(output, _WORD(v * VECTOR))) for v in range(VECTORS)]
            builder.branch(head)
            builder.position_at_end(head)
            k = builder.phi(_WORD)
            sums = [[builder.phi(_VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
            last = [list(each) for each in sums]
            for step in range(UNROLLED):
                now = add(k, _WORD(step))
                offset = times(now, _WORD(PANEL))
                weights = [load(builder, panel, add(offset, _WORD(v * VECTOR))) for v in range(VECTORS)]
                _fetch(builder, builder.gep(panel, [add(offset, following)]))
                for m, line in enumerate(lines):
                    number = broadcast(builder, builder.load(builder.gep(line, [now])))
                    last[m] = [fma(builder, number, weight, each) for weight, each in zip(weights, last[m])]
            after = add(k, _WORD(UNROLLED))
            for phi, begin, end in [(k, _WORD(0), after)] + [
                (sums[m][v], start[v], last[m][v]) for m in range(rows) for v in range(VECTORS)
            ]:
                phi.add_incoming(begin, entry)
                phi.add_incoming(end, head)
            builder.cbranch(builder.icmp_signed("<", after, inputs), head, done)
            builder.position_at_end(done)
            for m in range(rows):
                line = builder.gep(array(7).data, [add(times(add(first, _WORD(m)), outputs), output)])
                for v in range(VECTORS):
                    _store(builder, line, v * VECTOR, _positive(builder, last[m][v], relu), columns)
            return context.get_dummy_value()

        i = types.int64
        return types.void(x, i, panels, i, i, bias, types.boolean, out, i, i), generate

    return tile


def load(builder, data, place):
    return builder.load(builder.bitcast(builder.gep(data, [place]), _VECTOR.as_pointer()), align=4)


def _fetch(builder, address):
    """Asks for the memory at an address, for the second-level cache."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(address, _BYTES), _INT(0), _INT(2), _INT(1)])


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


_one, _two, _three, _four, _five, _six = (_tile(rows) for rows in range(1, TILE + 1))


@inlined()
def _parts(begin, end, x, panels, bias, relu, out, block, count):
    """Parts begin to end of the product: each a panel for a block of rows, in tiles as even as can be."""
    inputs, outputs = x.shape[1], out.shape[1]
    for part in range(np.int64(begin), np.int64(end)):
        row, output = part // count * block, part % count * PANEL
        place, columns = output * inputs, min(PANEL, outputs - output)
        rows = min(block, x.shape[0] - row)
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
            row, following = row + size, 0  # the first tile has asked for the next panel


@loop()
def _multiply(team, x, panels, bias, relu, out):
    rows, count = x.shape[0], len(bias) // PANEL
    blocks = (rows + BLOCK - 1) // BLOCK
    if blocks == 0 or count == 0:
        return
    block = ((rows + blocks - 1) // blocks + TILE - 1) // TILE * TILE
    parts = (rows + block - 1) // block * count
    together = min(_TOGETHER, max(1, parts // (2 * team[0])))
    over_threads(_parts, team, np.uintp(parts), np.uintp(together), (x, panels, bias, relu, out, block, count))
