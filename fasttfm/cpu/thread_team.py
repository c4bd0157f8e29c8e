"""Parallel loops of numba on PyTorch's own threads.

The threads of PyTorch's OpenMP library spin for a while after an operator: a second pool would compete with them for
the cores. So the loops start a team with the function that compilers call for `#pragma omp parallel`, GOMP_parallel
(GCC's; the libraries of Intel and LLVM have it for compatibility). Each thread takes the next part when it is done with
one. Parts must not depend on the number of threads; then the bits of the results do not either.
"""

import ctypes
import functools
import os
from pathlib import Path

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
_FUNCTION = ir.FunctionType(ir.VoidType(), [_BYTES])
_START = ir.FunctionType(ir.VoidType(), [_FUNCTION.as_pointer(), _BYTES, ir.IntType(32), ir.IntType(32)])
_TAKEN, _COUNT, _STEP, _FAILED, _OWN = range(5)

_forked = False


def team() -> tuple[int, int]:
    """The number of threads and the address of start(), for over_threads(); (1, 0) in a forked process."""
    return (1, 0) if _forked or not start() else (torch.get_num_threads(), start())


@functools.cache
def start() -> int:
    """The address of GOMP_parallel in PyTorch's OpenMP library; 0 if there is none."""
    if not torch.backends.openmp.is_available():
        return 0
    for library in (None, *(Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):  # in the linker's order
        try:
            function = ctypes.CDLL(None if library is None else str(library)).GOMP_parallel
        except (OSError, AttributeError, TypeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@intrinsic
def over_threads(context, body, team, count, step, arguments):
    """Call body(begin, end, *arguments), inlined, for every part of range(count), `step` long except the last.

    One copy of body serves any number of threads: two might be vectorised differently.
    """
    signature = (types.uintp, types.uintp, *arguments)
    body.dispatcher.get_call_template(signature, {})  # compiles it
    compiled = body.dispatcher.overloads[signature]

    def generate(context, builder, signature, values):
        _, team, count, step, arguments = values
        fields = cgutils.unpack_tuple(builder, arguments)
        kind = ir.LiteralStructType([_WORD] * _OWN + [field.type for field in fields])
        function = _parts(context, builder.module, compiled, kind)
        context.add_linking_libs([compiled.library])
        data = cgutils.alloca_once(builder, kind)
        for n, value in enumerate([_WORD(0), count, step, _WORD(0), *fields]):
            builder.store(value, cgutils.gep_inbounds(builder, data, 0, n))
        address, (threads, starts) = builder.bitcast(data, _BYTES), cgutils.unpack_tuple(builder, team)
        alone = builder.or_(builder.icmp_signed("<=", threads, _WORD(1)), builder.icmp_unsigned("<=", count, step))
        with builder.if_else(alone) as (one, several):
            with several:
                begin = builder.inttoptr(starts, _START.as_pointer())
                builder.call(begin, [function, address, builder.trunc(threads, ir.IntType(32)), ir.IntType(32)(0)])
            with one:
                builder.call(function, [address])
        failed = builder.load(cgutils.gep_inbounds(builder, data, 0, _FAILED))
        with builder.if_then(builder.icmp_unsigned("!=", failed, _WORD(0)), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("a parallel loop failed",))
        return context.get_dummy_value()

    return types.void(body, types.UniTuple(types.int64, 2), types.uintp, types.uintp, arguments), generate


def _parts(context, module, compiled, kind):
    """The function that each thread runs: void(struct shared by all: next part, count, step, failed, arguments)."""
    function = ir.Function(module, _FUNCTION, module.get_unique_name("parts"))
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    data = builder.bitcast(function.args[0], kind.as_pointer())
    fields = [cgutils.gep_inbounds(builder, data, 0, n) for n in range(len(kind.elements))]
    count, step, *args = (builder.load(field) for n, field in enumerate(fields) if n not in (_TAKEN, _FAILED))
    take, work, end = (function.append_basic_block() for _ in range(3))
    builder.branch(take)
    builder.position_at_end(take)
    first = builder.atomic_rmw("add", fields[_TAKEN], step, "monotonic")
    builder.cbranch(builder.icmp_unsigned("<", first, count), work, end)
    builder.position_at_end(work)
    last = builder.add(first, step)
    last = builder.select(builder.icmp_unsigned("<", last, count), last, count)
    status, _ = context.call_internal_no_propagate(builder, compiled.fndesc, compiled.signature, [first, last, *args])
    with builder.if_then(status.is_error, likely=False):
        builder.store(_WORD(1), fields[_FAILED])
    builder.branch(take)
    builder.position_at_end(end)
    builder.ret_void()
    return function
