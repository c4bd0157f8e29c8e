"""Parallel loops of numba on PyTorch's own threads.

The threads of PyTorch's OpenMP library spin for a while after an operator: a second pool would compete with them for
the cores. So the loops start a team with the function that compilers call for `#pragma omp parallel`, GOMP_parallel
(GCC's; the libraries of Intel and LLVM have it for compatibility). Each thread takes the next part when it is done with
one. Parts must not depend on the number of threads; then the bits of the results do not either.

A loop's arguments lie in a block of memory that all threads read. A loop called with an address to record at writes its
block there instead of running; launch() runs it from there, as often as wanted (launches.py).
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
_WORDS = _WORD.as_pointer()
_FUNCTION = ir.FunctionType(ir.VoidType(), [_BYTES])
_START = ir.FunctionType(ir.VoidType(), [_FUNCTION.as_pointer(), _BYTES, ir.IntType(32), ir.IntType(32)])
_TAKEN, _COUNT, _STEP, _FAILED, _OWN = range(5)
RECORD_HEAD = 2
"""Words of a record before the block: the address of the function that computes parts, and the block's bytes, which are
the room for it at first."""

_forked = False


def team(record: int = 0) -> tuple[int, int, int]:
    """The number of threads, 1 in a forked process, the address of start(), and that of a record or 0: for
    over_threads()."""
    return (1, 0, record) if _forked or not start() else (torch.get_num_threads(), start(), record)


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

    If the team has a record, write the call there instead. One copy of body serves any number of threads: two might be
    vectorised differently.
    """
    signature = (types.uintp, types.uintp, *arguments)
    body.dispatcher.get_call_template(signature, {})  # compiles it
    compiled = body.dispatcher.overloads[signature]

    def generate(context, builder, signature, values):
        _, team, count, step, arguments = values
        fields = [
            _unowned(builder, field) if isinstance(kind, types.Array) else field
            for kind, field in zip(signature.args[4], cgutils.unpack_tuple(builder, arguments))
        ]
        kind = ir.LiteralStructType([_WORD] * _OWN + [field.type for field in fields])
        function = _parts(context, builder.module, compiled, kind)
        context.add_linking_libs([compiled.library])
        data = cgutils.alloca_once(builder, kind)
        for n, value in enumerate([_WORD(0), count, step, _WORD(0), *fields]):
            builder.store(value, cgutils.gep_inbounds(builder, data, 0, n))
        *team, record = cgutils.unpack_tuple(builder, team)
        with builder.if_else(builder.icmp_unsigned("==", record, _WORD(0))) as (now, later):
            with now:
                _run(context, builder, function, builder.bitcast(data, _WORDS), team)
            with later:
                head, size = builder.inttoptr(record, _WORDS), _WORD(context.get_abi_sizeof(kind))
                room = builder.load(builder.gep(head, [_WORD(1)]))
                with builder.if_then(builder.icmp_unsigned(">", size, room), likely=False):
                    context.call_conv.return_user_exc(builder, OverflowError, ("a loop's arguments exceed its record",))
                for n, value in enumerate([builder.ptrtoint(function, _WORD), size]):
                    builder.store(value, builder.gep(head, [_WORD(n)]))
                cgutils.raw_memcpy(builder, builder.gep(head, [_WORD(RECORD_HEAD)]), data, size, 1)
        return context.get_dummy_value()

    return types.void(body, types.UniTuple(types.int64, 3), types.uintp, types.uintp, arguments), generate


@intrinsic
def launch(context, team, record):
    """Run the loop that was recorded at this address."""

    def generate(context, builder, signature, values):
        team, record = values
        head = builder.inttoptr(record, _WORDS)
        function = builder.inttoptr(builder.load(head), _FUNCTION.as_pointer())
        data = builder.gep(head, [_WORD(RECORD_HEAD)])
        builder.store(_WORD(0), data)  # no part is taken
        _run(context, builder, function, data, cgutils.unpack_tuple(builder, team)[:2])
        return context.get_dummy_value()

    return types.void(types.UniTuple(types.int64, 3), types.int64), generate


def _unowned(builder, array):
    """An array that does not count references: its owner may change before a record is read."""
    for n in range(2):  # meminfo and parent
        array = builder.insert_value(array, array.type.elements[n](None), n)
    return array


def _run(context, builder, function, data, team):
    """Call the function of _parts() with its block, on one thread or on all of the team."""
    count, step = (builder.load(builder.gep(data, [_WORD(n)])) for n in (_COUNT, _STEP))
    address, (threads, starts) = builder.bitcast(data, _BYTES), team
    alone = builder.or_(builder.icmp_signed("<=", threads, _WORD(1)), builder.icmp_unsigned("<=", count, step))
    with builder.if_else(alone) as (one, several):
        with several:
            begin = builder.inttoptr(starts, _START.as_pointer())
            builder.call(begin, [function, address, builder.trunc(threads, ir.IntType(32)), ir.IntType(32)(0)])
        with one:
            builder.call(function, [address])
    failed = builder.load(builder.gep(data, [_WORD(_FAILED)]))
    with builder.if_then(builder.icmp_unsigned("!=", failed, _WORD(0)), likely=False):
        context.call_conv.return_user_exc(builder, MemoryError, ("a parallel loop failed",))


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
