"""Loops compiled by numba run in parts, over the threads that PyTorch computes with.

The threads of PyTorch's OpenMP library spin for a while when an operator has ended: a pool of our own would fight with
them for the cores. So they are asked themselves, by the function that compilers call for `#pragma omp parallel` (GCC's
library has it, and Intel's and LLVM's for its sake). A thread takes the next part when it has done one. What the parts
are must not depend on the number of threads; then results have the same bits with any number.
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
    """Return over_threads()'s number of threads and what starts them; one alone where a fork has left the others."""
    return (1, 0) if _forked or not start() else (torch.get_num_threads(), start())


@functools.cache
def start() -> int:
    """The address of GOMP_parallel in the library that this PyTorch computes with; 0 where it has none."""
    if not torch.backends.openmp.is_available():
        return 0
    for library in (None, *(Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):  # as the linker looks it up
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
    """body(begin, end, *arguments) for every part of range(count), `step` long but for the last; body is inlined.

    There is one copy of body, whatever the number of threads: two could be made vectors in different ways.
    """
    given = (types.uintp, types.uintp, *arguments)
    body.dispatcher.get_call_template(given, {})  # compiles it
    compiled = body.dispatcher.overloads[given]

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
            context.call_conv.return_user_exc(builder, MemoryError, ("a loop over threads has failed",))
        return context.get_dummy_value()

    return types.void(body, types.UniTuple(types.int64, 2), types.uintp, types.uintp, arguments), generate


def _parts(context, module, compiled, kind):
    """Return what each thread of a team runs: void(struct of all: parts taken, count, step, failed, arguments)."""
    function = ir.Function(module, _FUNCTION, module.get_unique_name("parts"))
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    data = builder.bitcast(function.args[0], kind.as_pointer())
    fields = [cgutils.gep_inbounds(builder, data, 0, n) for n in range(len(kind.elements))]
    count, step, *given = (builder.load(field) for n, field in enumerate(fields) if n not in (_TAKEN, _FAILED))
    take, work, end = (function.append_basic_block() for _ in range(3))
    builder.branch(take)
    builder.position_at_end(take)
    first = builder.atomic_rmw("add", fields[_TAKEN], step, "monotonic")
    builder.cbranch(builder.icmp_unsigned("<", first, count), work, end)
    builder.position_at_end(work)
    last = builder.add(first, step)
    last = builder.select(builder.icmp_unsigned("<", last, count), last, count)
    status, _ = context.call_internal_no_propagate(builder, compiled.fndesc, compiled.signature, [first, last, *given])
    with builder.if_then(status.is_error, likely=False):
        builder.store(_WORD(1), fields[_FAILED])
    builder.branch(take)
    builder.position_at_end(end)
    builder.ret_void()
    return function
