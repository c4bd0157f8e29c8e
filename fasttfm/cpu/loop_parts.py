"""Building blocks of the numba loops: decorators, element types, exp and log, and dropout's random bytes.

All arithmetic is float32. uint16 holds bfloat16 and int16 float16, widened on load and rounded to nearest even on
store; uint32 holds a pair of bfloat16, for the products of such pairs alone.
"""

import functools
import hashlib
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags for functions that only reduce: sums may be vectorised; infinities and NaN keep their meaning. LLVM
makes two copies of a loop that stores, vector and scalar, and the scalar one runs if the output begins just behind the
input. With leave to reorder, the two would round differently, and addresses would decide the last bits."""

_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).digest()


def loop():
    """Decorator of loops called from Python, cached on disk until a file of this folder changes: by itself numba checks
    the loop's own file alone, and loads machine code with outdated functions inlined from others."""

    def compiled(function):
        dispatcher = njit(nogil=True, cache=True)(function)
        dispatcher._cache._cache_file._source_stamp = _SOURCES  # type: ignore[attr-defined]
        return dispatcher

    return compiled


inlined = functools.partial(njit, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of functions called from loops alone; Python wrappers would add a sixth to the compile time. Inlining is
required: a call would link to the first copy in the process, and copies differ in vectorisation and so in rounding.
Results would then differ between the process that compiles a loop and those that load it from disk."""


def _conversion(source, result, written):
    """An intrinsic that converts `source` to `result`, with the LLVM instructions of written(builder, x)."""

    @intrinsic
    def converted(context, x):
        return result(source), lambda context, builder, signature, arguments: written(builder, arguments[0])

    return converted


_WORD = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)
_INT16, _INT32, _HALF, _FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_from_bfloat16 = _conversion(
    types.uint16, types.float32, lambda llvm, x: llvm.bitcast(llvm.shl(llvm.zext(x, _INT32), _INT32(16)), _FLOAT)
)
_from_float16 = _conversion(types.int16, types.float32, lambda llvm, x: llvm.fpext(llvm.bitcast(x, _HALF), _FLOAT))
_to_float16 = _conversion(types.float32, types.int16, lambda llvm, x: llvm.bitcast(llvm.fptrunc(x, _HALF), _INT16))
_as_word = _conversion(types.uint32, types.float32, lambda llvm, x: llvm.bitcast(x, _FLOAT))
bits_of = _conversion(types.float32, types.uint32, lambda llvm, x: llvm.bitcast(x, _INT32))
from_bits = _conversion(types.int32, types.float32, lambda llvm, x: llvm.bitcast(x, _FLOAT))


def read(x):
    """The element x as float32."""


def round_to(x, like):
    """The float32 x rounded to the element type of like."""


@overload(read, jit_options={"forceinline": True})
def _read_of_kind(x):
    if x == types.uint16:
        return lambda x: _from_bfloat16(x)
    if x == types.int16:
        return lambda x: _from_float16(x)
    if x == types.uint32:
        return lambda x: _as_word(x)
    return lambda x: x


@overload(round_to, jit_options={"forceinline": True})
def _round_to_kind(x, like):
    if like == types.uint16:
        return lambda x, like: _to_bfloat16(x)
    if like == types.int16:
        return lambda x, like: _to_float16(x)
    return lambda x, like: x


MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
"""Mask of a float32's bits without the sign, and the bits of infinity; those of NaN are above them."""


@inlined()
def sort_key(x):
    """An integer with the order of float32 x; LLVM vectorises integer maxima, but not those of floats with NaN."""
    bits = np.int32(bits_of(x))
    return bits ^ ((bits >> np.int32(31)) & MAGNITUDE)


@inlined()
def of_sort_key(key):
    return from_bits(key ^ ((key >> np.int32(31)) & MAGNITUDE))


@intrinsic
def multiply_add(context, a, b, c):
    """a * b + c in float32, rounded once if the processor has FMA, in vector and scalar code alike."""

    def generate(context, builder, signature, arguments):
        function = get_or_insert_function(builder.module, ir.FunctionType(_FLOAT, [_FLOAT] * 3), "llvm.fmuladd.f32")
        return builder.call(function, arguments)

    return types.float32(*[types.float32] * 3), generate


@inlined(fastmath=FAST)
def total_of(x, first, count):
    """The sum of x[first : first + count]."""
    total = np.float32(0.0)
    for n in range(count):
        total += read(x[first + n])
    return total


@inlined(fastmath=FAST)
def squares_of(x, count, mean):
    """The sum of the squares of x[:count] - mean."""
    total = np.float32(0.0)
    for n in range(count):
        centred = x[n] - mean
        total += centred * centred
    return total


@inlined(fastmath=FAST)
def dot(x, at, y, place, size):
    """The dot product of x[at : at + size] and y[place : place + size]."""
    total = np.float32(0.0)
    for d in range(size):
        total += read(x[at + d]) * read(y[place + d])
    return total


@intrinsic
def _pointer(context, address, like):
    """The integer address as a pointer to elements of like's type."""

    def generate(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


@inlined()
def numbers_at(address, count, like):
    """The array (count,) of like's type at an address; must not be read if that is 0."""
    return carray(_pointer(address, like), (count,))


@intrinsic
def pointer_to(context, array):
    """The address of an array's first element, to index as a flat array; keep(array) must follow the last use.

    Functions that are inlined count a reference to each array passed to them, which costs more than the products of a
    short row; pointers have none.
    """

    def generate(context, builder, signature, values):
        return make_array(signature.args[0])(context, builder, values[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def keep(context, array):
    """Keep an array alive up to this point."""
    return types.void(array), lambda context, builder, signature, values: context.get_dummy_value()


@intrinsic
def _fetch(context, flat, index):
    """Prefetch flat[index], of an array or pointer_to() one."""

    def generate(context, builder, signature, arguments):
        data = arguments[0]
        if isinstance(flat, types.Array):
            data = make_array(flat)(context, builder, data).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [address.type, _INT32, _INT32, _INT32])
        prefetch = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [address, _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.void(flat, types.uintp), generate


@inlined()
def rows_of_part(columns, elements):
    """The number of rows in a part of about `elements` elements, at least 1."""
    return max(np.uintp(1), elements // max(np.uintp(1), np.uintp(columns)))


@inlined()
def fetch_run(flat, first, count, step):
    for n in range(np.uintp(0), count, step):
        _fetch(flat, first + n)


@inlined()
def _to_bfloat16(x):
    bits = bits_of(x)
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inlined()
def exp(x):
    """exp of float32 x <= 0, within 2 ulp (Cephes' polynomial); it vectorises."""
    x = max(x, np.float32(-87.0))
    n = np.floor(multiply_add(x, np.float32(1.44269504), np.float32(0.5)))
    r = multiply_add(n, np.float32(2.12194440e-4), multiply_add(n, np.float32(-0.693359375), x))
    p = multiply_add(np.float32(1.9875691500e-4), r, np.float32(1.3981999507e-3))
    p = multiply_add(p, r, np.float32(8.3334519073e-3))
    p = multiply_add(p, r, np.float32(4.1665795894e-2))
    p = multiply_add(p, r, np.float32(1.6666665459e-1))
    p = multiply_add(p, r, np.float32(5.0000001201e-1))
    p = multiply_add(p * r, r, r) + np.float32(1.0)
    return p * from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@inlined()
def log(x):
    """log of a positive, finite float32, within 2 ulp (Cephes' polynomial); inlined, while NumPy's is a call."""
    half = np.int32(0x3F3504F3)  # bits of sqrt(0.5), the lower end of the mantissa's range
    bits = np.int32(np.int32(bits_of(x)) - half)
    n, f = np.float32(bits >> np.int32(23)), from_bits(np.int32((bits & np.int32(0x7FFFFF)) + half)) - np.float32(1.0)
    p = np.float32(7.0376836292e-2)
    p = p * f - np.float32(1.1514610310e-1)
    p = p * f + np.float32(1.1676998740e-1)
    p = p * f - np.float32(1.2420140846e-1)
    p = p * f + np.float32(1.4249322787e-1)
    p = p * f - np.float32(1.6668057665e-1)
    p = p * f + np.float32(2.0000714765e-1)
    p = p * f - np.float32(2.4999993993e-1)
    p = p * f + np.float32(3.3333331174e-1)
    y = p * f * f * f - np.float32(0.5) * f * f
    return n * np.float32(0.693359375) + (f + (y - n * np.float32(2.12194440e-4)))


@inlined()
def draw_lanes(words, key, row, plane, site):
    """Philox4x32-7 of a row (kernels/philox.py): four words per block, whose bytes are the lanes in order.

    LLVM vectorises over blocks, four with AVX2: 5.2e9 bytes/s on one core, three times as many as two interleaved
    chains, which it does not vectorise.
    """
    blocks = np.uintp(words.shape[0] // 4)
    for block in range(blocks):
        c0, c1, c2, c3 = np.uint64(block), row, plane, site
        k0, k1 = key & _WORD, key >> _HALF_WORD
        for _ in range(7):
            a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
            c0, c2 = (b >> _HALF_WORD) ^ c1 ^ k0, (a >> _HALF_WORD) ^ c3 ^ k1
            c1, c3 = b & _WORD, a & _WORD
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _WORD, (k1 + np.uint64(0xBB67AE85)) & _WORD
        first = np.uintp(4) * block
        words[first] = np.uint32(c0)
        words[first + np.uintp(1)] = np.uint32(c1)
        words[first + np.uintp(2)] = np.uint32(c2)
        words[first + np.uintp(3)] = np.uint32(c3)
