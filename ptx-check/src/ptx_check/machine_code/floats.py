"""Floating-point instructions: arithmetic, comparisons, functions, conversions.

Functions (MUFU) are numpy's, rounded, like ex2.approx in PTX: a device may differ in the last bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_check import exact
from ptx_check.machine_code.integers import JOINED, Step
from ptx_check.machine_code.operands import (
    F32,
    I32,
    U32,
    U64,
    Code,
    Operand,
    Read,
    bits,
    pair,
    predicate,
    real,
    result,
    truth,
    wide,
)
from ptx_check.rounding import (
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    flush,
    fma32,
    fma_f16,
    larger,
    product_bf16,
    saturated,
    smaller,
)

_ROUNDED = ("RZ", "RM", "RP")


def bits_of(value: Any) -> Any:
    """Bits of a float32."""
    return np.ascontiguousarray(value, F32).view(U32)


def _directed(value: Any, way: str) -> Any:
    """Round float64, exact or rounded to odd, to float32 towards zero (RZ), minus (RM) or plus infinity (RP)."""
    near = value.astype(F32)
    below, above = near.astype(np.float64) > value, near.astype(np.float64) < value
    down = value >= 0 if way == "RZ" else way == "RM"
    lower = np.where(below, np.nextafter(near, F32(-np.inf)), near)
    upper = np.where(above, np.nextafter(near, F32(np.inf)), near)
    return np.where(down, lower, upper)


_ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "FADD": (np.add, exact.odd_sum),
    "FMUL": (np.multiply, np.multiply),
    "FFMA": (fma32, lambda a, b, c: exact.odd_sum(a * b, c)),
}
"""Opcode -> function that rounds to nearest, and one that rounds to odd in float64, for directed rounding."""


def arithmetic(code: Code) -> Step:
    """FADD, FMUL, FFMA."""
    words = code.only("FTZ", "SAT", *_ROUNDED)
    flushed, way = "FTZ" in words, next((w for w in _ROUNDED if w in words), "")
    code.count(4 if code.name == "FFMA" else 3)
    target, *sources = code.operands
    put = result(target, code)
    reads = [real(each, code, flush=flushed) for each in sources]
    plain, widened = _ARITHMETIC[code.name]

    def step(s: Any) -> None:
        values = [read(s) for read in reads]
        if way:
            made = _directed(widened(*np.broadcast_arrays(*(v.astype(np.float64) for v in values))), way)
        else:
            made = plain(*values)
        if flushed:
            made = flush(made)
        if "SAT" in words:
            made = saturated(made)
        put(s, bits_of(made))

    return step


def least_or_greatest(code: Code) -> Step:
    words = code.only("NAN", "FTZ")
    code.count(4)
    target, left, right, choice = code.operands
    put, way = result(target, code), predicate(choice, code)
    a, b = (real(each, code, flush="FTZ" in words) for each in (left, right))
    least, most = (np.minimum, np.maximum) if "NAN" in words else (np.fmin, np.fmax)

    def step(s: Any) -> None:
        x, y, p = a(s), b(s), way(s)
        if p.size == 1:
            made = smaller(x, y, least) if p.flat[0] else larger(x, y, most)
        else:
            made = np.where(p, smaller(x, y, least), larger(x, y, most))
        put(s, np.where(np.isnan(made), U32(0x7FFFFFFF), bits_of(made)))

    return step


COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal,
    "NEU": np.not_equal,
    "LTU": lambda a, b: ~np.greater_equal(a, b), "LEU": lambda a, b: ~np.greater(a, b),
    "GTU": lambda a, b: ~np.less_equal(a, b), "GEU": lambda a, b: ~np.less(a, b),
    "NE": lambda a, b: np.not_equal(a, b) & ~(np.isnan(a) | np.isnan(b)),
    "EQU": lambda a, b: np.equal(a, b) | np.isnan(a) | np.isnan(b),
    "NUM": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "NAN": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
"""Comparisons; those with a U are also true for NaN."""


def chosen(code: Code, table: dict[str, Any]) -> Any:
    """Table entry selected by the opcode's modifiers."""
    return next(table[word] for word in code.words if word in table)


def compare(code: Code) -> Step:
    """FSETP, FSET: a comparison combined with a predicate."""
    words = code.only("FTZ", "BF", *COMPARED, *JOINED)
    found, joint = chosen(code, COMPARED), chosen(code, JOINED)
    flushed = "FTZ" in words
    if code.name == "FSET":
        if "BF" not in words:
            raise code.unknown()
        code.count(4)
        put = result(code.operands[0], code)
        a, b = (real(each, code, flush=flushed) for each in code.operands[1:3])
        also = predicate(code.operands[3], code)
        return lambda s: put(s, np.where(joint(found(a(s), b(s)), also(s)), U32(0x3F800000), U32(0)))
    code.count(5)
    puts = [truth(each, code) for each in code.operands[:2]]
    x, y = (real(each, code, flush=flushed) for each in code.operands[2:4])
    with_ = predicate(code.operands[4], code)

    def step(s: Any) -> None:
        holds, p = found(x(s), y(s)), with_(s)
        puts[0](s, joint(holds, p))
        puts[1](s, joint(~holds, p))

    return step


def needs_care(code: Code) -> Step:
    """FCHK: whether a division needs the slow path. True more often than on a device: the slow path is always right."""
    code.only("DIVIDE")
    code.count(3)
    put, a, b = truth(code.operands[0], code), real(code.operands[1], code), real(code.operands[2], code)

    def near(x: Any) -> Any:
        return (np.abs(x) > F32(2.0**-60)) & (np.abs(x) < F32(2.0**60))

    return lambda s: put(s, ~(near(b(s)) & (near(a(s)) | (a(s) == 0))))


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "EX2": np.exp2, "LG2": np.log2, "RCP": lambda x: F32(1) / x, "SQRT": np.sqrt,
    "RSQ": lambda x: (1.0 / np.sqrt(x.astype(np.float64))).astype(F32), "TANH": np.tanh,
    "SIN": lambda x: np.sin(2 * np.pi * x.astype(np.float64)).astype(F32),
    "COS": lambda x: np.cos(2 * np.pi * x.astype(np.float64)).astype(F32),
}  # fmt: skip


def function(code: Code) -> Step:
    """MUFU: approximate functions; sine and cosine take their angle in turns."""
    code.only(*_FUNCTIONS)
    code.count(2)
    put, a, made = result(code.operands[0], code), real(code.operands[1], code), chosen(code, _FUNCTIONS)
    return lambda s: put(s, bits_of(flush(made(flush(a(s))))))


_WHOLE: dict[str, Any] = {"U8": np.uint8, "S8": np.int8, "U16": np.uint16, "S16": np.int16, "U32": U32, "S32": I32,
          "U64": U64, "S64": np.int64}  # fmt: skip


def from_whole(code: Code) -> Step:
    """I2F, I2FP: integer to float32, to nearest or upwards."""
    words = code.only(*_WHOLE, "F32", "F16", "F64", *_ROUNDED, "RN")
    code.count(2)
    if words & {"F16", "F64", "RM", "RZ"}:
        raise code.unknown()
    kind = next((_WHOLE[word] for word in code.words if word in _WHOLE), I32)
    target, source = code.operands
    read: Read = wide(source, code) if np.dtype(kind).itemsize == 8 else bits(source, code)
    put = result(target, code)

    def step(s: Any) -> None:
        value = read(s)
        number = value.view(kind) if value.itemsize == np.dtype(kind).itemsize else value.astype(kind)
        near = number.astype(F32)
        if "RP" in words:  # occurs in 64-bit division, for which comparing in float64 is exact enough
            near = np.where(near.astype(np.float64) < number.astype(np.float64), np.nextafter(near, F32(np.inf)), near)
        put(s, bits_of(near))

    return step


_TO_WHOLE: dict[str, Callable[[Any], Any]] = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}


def to_whole(code: Code) -> Step:
    """F2I: saturating conversion to 32 or 64 bits; NaN becomes 0, in 64 bits the sign bit (PTX ISA, cvt)."""
    words = code.only(*_WHOLE, *_TO_WHOLE, "FTZ", "NTZ", "F32")
    code.count(2)
    kind = next((_WHOLE[word] for word in code.words if word in _WHOLE), I32)
    if kind in (np.uint8, np.int8, np.uint16, np.int16):
        raise code.unknown()
    target, source = code.operands
    a = real(source, code, flush="FTZ" in words)
    rounded = next((_TO_WHOLE[word] for word in code.words if word in _TO_WHOLE), np.rint)
    long = np.dtype(kind).itemsize == 8
    put = pair(target, code) if long else result(target, code)
    info = np.iinfo(kind)
    low, high = float(info.min), float(info.max)

    def step(s: Any) -> None:
        value = rounded(a(s).astype(np.float64))
        inside = np.where(np.isnan(value), 0.0, np.clip(value, low, high))
        made = np.where(inside >= high, info.max, np.where(inside >= high, 0, inside).astype(kind)).astype(kind)
        put(s, np.where(np.isnan(value), U64(1 << 63), made.view(U64)) if long else made.view(U32))

    return step


def to_integral(code: Code) -> Step:
    """FRND: round to an integral float32."""
    code.only(*_TO_WHOLE, "FTZ")
    code.count(2)
    put, a = result(code.operands[0], code), real(code.operands[1], code)
    rounded = next((_TO_WHOLE[word] for word in code.words if word in _TO_WHOLE), np.rint)
    return lambda s: put(s, bits_of(rounded(a(s))))


def packed(code: Code) -> Step:
    """F2FP: pack two float32 as 16-bit halves of a register, the first in the upper half."""
    words = code.only("BF16", "F16", "F32", "PACK_AB", "RELU")
    if "PACK_AB" not in words:
        raise code.unknown()
    code.count(3)
    put, narrow = result(code.operands[0], code), f32_to_bf16 if "BF16" in words else f32_to_f16
    high, low = (real(each, code) for each in code.operands[1:])

    def half(value: Any) -> Any:
        value = np.array(value, F32)
        return narrow(np.maximum(value, F32(0)) if "RELU" in words else value).astype(U32)

    return lambda s: put(s, half(high(s)) << U32(16) | half(low(s)))


def converted(code: Code) -> Step:
    """F2F: float32 to float16 or bfloat16."""
    words = code.words
    code.count(2)
    put = result(code.operands[0], code)
    if words[:2] in (("BF16", "F32"), ("F16", "F32")):
        narrow, a = f32_to_bf16 if words[0] == "BF16" else f32_to_f16, real(code.operands[1], code)
        code.only("BF16", "F16", "F32")
        return lambda s: put(s, narrow(np.array(a(s), F32)).astype(U32))
    raise code.unknown()


def half(of: Operand, code: Code, *, brain: bool) -> tuple[Read, Read]:
    """Readers of the lower and the upper half of an operand, as float32. brain: bfloat16."""
    widened = bf16_to_f32 if brain else f16_to_f32
    parts = [word for word in of.words if word in ("H0_H0", "H1_H1", "H0", "H1")]
    if set(of.words) - set(parts) or of.file not in ("R", "UR", "c"):
        raise code.unknown(f"takes {of.text}, which is not known,")
    plain = bits(Operand(of.text, of.file, of.number, "", (), of.bank), code)

    def read(s: Any, upper: bool) -> Any:
        value = np.ascontiguousarray(plain(s) >> U32(16) if upper else plain(s)).astype(np.uint16)
        if "|" in of.signs:
            value = value & np.uint16(0x7FFF)
        if "-" in of.signs:
            value = value ^ np.uint16(0x8000)
        return widened(value)

    high_for_low, low_for_high = parts[:1] in (["H1_H1"], ["H1"]), parts[:1] in (["H0_H0"], ["H0"])
    return (lambda s: read(s, high_for_low)), (lambda s: read(s, not low_for_high))


def _always(value: Any) -> Read:
    return lambda s: value


def halves_of(code: Code, operands: list[Operand], *, brain: bool) -> list[tuple[Read, Read]]:
    """Readers of the halves of all sources; immediates are pairs, upper half first."""
    found, rest = [], list(operands)
    while rest:
        of = rest.pop(0)
        if of.file != "n":
            found.append(half(of, code, brain=brain))
            continue
        other = rest.pop(0) if rest and rest[0].file == "n" else of
        high, low = (np.full((1, 1), each.number, U32).view(F32) for each in (of, other))
        found.append((_always(low), _always(high)))
    return found


def half_arithmetic(code: Code) -> Step:
    """HADD2, HMUL2, HFMA2: arithmetic on 16-bit pairs; F32: only the lower half, with a float32 result."""
    words = code.only("F32", "BF16_V2", "MMA", "FTZ", "RELU", "SAT")
    if words & {"SAT", "FTZ"}:
        raise code.unknown()
    brain = "BF16_V2" in words
    narrow = f32_to_bf16 if brain else f32_to_f16
    put = result(code.operands[0], code)
    sources = halves_of(code, code.operands[1:], brain=brain)
    form, _ = _ARITHMETIC[f"F{code.name[1:-1]}"]
    if "F32" not in words and code.name != "HADD2":  # whose float32, rounded to odd, is as good as exact
        form = fma_f16 if code.name == "HFMA2" else product_bf16 if brain else form
    if len(sources) != (3 if code.name == "HFMA2" else 2):
        raise code.unknown("of this form is not known")

    def made(s: Any, upper: int) -> Any:
        value = form(*(each[upper](s) for each in sources))
        return np.maximum(value, F32(0)) if "RELU" in words else value

    if "F32" in words:
        return lambda s: put(s, bits_of(made(s, 0)))

    def step(s: Any) -> None:
        low, high = (narrow(np.array(made(s, upper), F32)).astype(U32) for upper in (0, 1))
        put(s, low | high << U32(16))

    return step


def half_least(code: Code) -> Step:
    """HMNMX2, VHMNMX: minimum of 16-bit pairs if the predicate holds, else maximum."""
    words = code.only("BF16_V2", "NAN")
    brain = "BF16_V2" in words
    narrow = f32_to_bf16 if brain else f32_to_f16
    put, way = result(code.operands[0], code), predicate(code.operands[-1], code)
    a, b = halves_of(code, code.operands[1:-1], brain=brain)
    least, most = (np.minimum, np.maximum) if "NAN" in words else (np.fmin, np.fmax)

    def step(s: Any) -> None:
        sides = [(a[k](s), b[k](s)) for k in (0, 1)]
        made = [np.where(way(s), smaller(*side, least), larger(*side, most)) for side in sides]
        low, high = (narrow(np.array(each, F32)).astype(U32) for each in made)
        put(s, low | high << U32(16))

    return step


def half_compare(code: Code) -> Step:
    """HSETP2: a predicate per half; HSET2: all ones or zeros per half of a register (BF: 1.0 or 0.0)."""
    words = code.only("BF16_V2", "BF", "FTZ", *COMPARED, *JOINED)
    found, joint, brain = chosen(code, COMPARED), chosen(code, JOINED), "BF16_V2" in words
    first = 2 if code.name == "HSETP2" else 1
    a, b = halves_of(code, code.operands[first:-1], brain=brain)
    also = predicate(code.operands[-1], code)
    if code.name == "HSETP2":
        puts = [truth(each, code) for each in code.operands[:2]]

        def both(s: Any) -> None:
            p = also(s)
            values = [joint(found(a[upper](s), b[upper](s)), p) for upper in (0, 1)]
            for put, value in zip(puts, values):
                put(s, value)

        return both
    put = result(code.operands[0], code)
    one = U32((0x3F80 if brain else 0x3C00) if "BF" in words else 0xFFFF)

    def step(s: Any) -> None:
        low, high = (joint(found(a[k](s), b[k](s)), also(s)).astype(U32) * one for k in (0, 1))
        put(s, low | high << U32(16))

    return step


MEANINGS = {
    **dict.fromkeys(("FADD", "FMUL", "FFMA"), arithmetic),
    "FMNMX": least_or_greatest,
    **dict.fromkeys(("FSETP", "FSET"), compare),
    "FCHK": needs_care,
    "MUFU": function,
    **dict.fromkeys(("I2F", "I2FP"), from_whole),
    "F2I": to_whole,
    "FRND": to_integral,
    "F2FP": packed,
    "F2F": converted,
    **dict.fromkeys(("HADD2", "HMUL2", "HFMA2"), half_arithmetic),
    **dict.fromkeys(("HMNMX2", "VHMNMX"), half_least),
    **dict.fromkeys(("HSETP2", "HSET2"), half_compare),
}
