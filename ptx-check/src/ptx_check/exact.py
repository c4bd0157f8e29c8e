"""Sums and products of floating-point numbers rounded once, to any format in any direction.

A sum that is inexact in float64 is rounded to odd there: to the neighbour whose last bit is 1. Rounding that to a
narrower format gives the same result as rounding the exact sum, in every direction.
Source: Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums"; IEEE 754.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable
from fractions import Fraction

import numpy as np

FORMATS = {"f32": (24, -149), "tf32": (11, -136), "bf16": (8, -133), "f16": (11, -24), "e4m3": (4, -9),
           "e5m2": (3, -16)}  # fmt: skip
"""Significand digits, and exponent of the smallest subnormal."""
LARGEST = {"f32": 2.0**128 - 2.0**104, "tf32": 2.0**128 - 2.0**117, "bf16": 2.0**128 - 2.0**120, "f16": 65504.0,
           "e4m3": 448.0, "e5m2": 57344.0}  # fmt: skip
_WAYS = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


def _to_odd(total, lost):
    """total + lost rounded to odd; |lost| is below total's last bit."""
    even = (np.abs(lost) > 0) & (total.view(np.uint64) & np.uint64(1) == 0)
    return np.where(even, np.nextafter(total, np.copysign(np.inf, lost)), total)


def _sum(a, b):
    """a + b rounded to nearest, and the exact error."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def odd_sum(a, b):
    """a + b of float64, rounded to odd."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return _to_odd(*_sum(a, b))


def odd_product_sum(a, b, c):
    """a * b + c rounded to odd; a and b have at most 26 significand bits."""
    return odd_sum(np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64))


def odd32(x):
    """Convert float64, exact or rounded to odd, to float32, rounded to odd."""
    single = x.astype(np.float32)
    lost = x - single
    even = (np.abs(lost) > 0) & (single.view(np.uint32) & np.uint32(1) == 0)
    return np.where(even, np.nextafter(single, np.copysign(np.float32(np.inf), lost).astype(np.float32)), single)


def rounded(x, name: str, way: str):
    """Round float64, exact or rounded to odd, to a format in a direction; returns float64."""
    digits, least = FORMATS[name]
    _, exponent = np.frexp(x)
    unit = np.maximum(exponent - digits, least)
    made = np.ldexp(_WAYS[way](np.ldexp(x, -unit)), unit)
    beyond = np.isfinite(x) & (np.abs(made) > LARGEST[name])
    if beyond.any():
        inward = {"rn": np.zeros_like(beyond), "rz": beyond, "rm": x > 0, "rp": x < 0}[way]
        limit = np.where(inward, LARGEST[name], np.inf)
        made = np.where(beyond, np.copysign(limit, x), made)
    return made


def sum32(a, b, way: str):
    """a + b of float32, rounded in a direction; exact cancellation gives -0 when rounding down."""
    total = odd_sum(a, b)
    if way == "rm":
        total = np.where((total == 0) & ~((a == 0) & (b == 0) & (np.signbit(a) == np.signbit(b))), -0.0, total)
    return rounded(total, "f32", way).astype(np.float32)


def product32(a, b, way: str):
    return rounded(np.multiply(a, b, dtype=np.float64), "f32", way).astype(np.float32)


def product_sum32(a, b, c, way: str):
    product = np.multiply(a, b, dtype=np.float64)
    total = odd_sum(product, c)
    if way == "rm":
        alike = (product == 0) & (np.asarray(c) == 0) & (np.signbit(product) == np.signbit(c))
        total = np.where((total == 0) & ~alike, -0.0, total)
    return rounded(total, "f32", way).astype(np.float32)


def quotient32(a, b, way: str):
    """a / b of float32, rounded in a direction."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    made = a / b
    lost = fma64(-made, b, a) * np.sign(b)
    return rounded(_to_odd(made, np.where(np.isfinite(made), lost, 0.0)), "f32", way).astype(np.float32)


def root32(a, way: str):
    a = np.asarray(a, np.float64)
    made = np.sqrt(a)
    lost = fma64(-made, made, a)
    return rounded(_to_odd(made, np.where(np.isfinite(made), lost, 0.0)), "f32", way).astype(np.float32)


_NEAREST64: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
    "rcp": np.reciprocal,
    "fma": lambda a, b, c: fma64(a, b, c),
}
_EXACT64: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a * b + c,
}


def directed64(name: str, way: str, *operands):
    """A directed-rounding operation of float64, element by element; rarely used."""
    given = np.broadcast_arrays(*operands)
    made = np.array(_NEAREST64[name](*given))
    regular = functools.reduce(np.logical_and, map(np.isfinite, given))
    if name in ("div", "rcp"):
        regular &= given[-1] != 0
    if name == "sqrt":
        regular &= given[0] >= 0
    for place in zip(*np.nonzero(regular)):
        made[place] = _directed(name, way, float(made[place]), [float(x[place]) for x in given])
    return made


def _directed(name: str, way: str, nearest: float, given: list[float]) -> float:
    nearest = math.copysign(sys.float_info.max, nearest) if math.isinf(nearest) else nearest
    numbers = [Fraction(x) for x in given]
    if name == "sqrt":  # compare the square of the result with the operand
        true, made = numbers[0], Fraction(nearest) ** 2
    else:
        true, made = _EXACT64[name](*numbers), Fraction(nearest)
    if true == 0 and way == "rm" and name in ("add", "sub", "fma"):
        first = given[0] if name != "fma" else math.copysign(1.0, given[0]) * given[1]
        last = -given[-1] if name == "sub" else given[-1]
        alike = last == 0 and first == 0 and math.copysign(1.0, first) == math.copysign(1.0, last)
        return nearest if alike else -0.0
    goal = {"rp": math.inf, "rm": -math.inf, "rz": 0.0}[way]
    inside = {"rp": true > made, "rm": true < made, "rz": abs(true) < abs(made)}[way]
    return math.nextafter(nearest, goal) if inside else nearest


def whole64(x, way: str):
    """Convert an integer to float64, rounded in a direction."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    half = x.dtype.type(32)
    high, low = (x >> half).astype(np.float64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return np.where(x == 0, 0.0, directed64("add", way, high, low))


def fma64(a, b, c):
    """a * b + c of float64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product, low = _product(a, b)
    high, rest = _sum(c, low)
    total, lost = _sum(product, high)
    made = total + _to_odd(*_sum(lost, rest))
    size = np.maximum(np.abs(product), np.abs(c))
    usual = (np.abs(product) < 2.0**1000) & (np.abs(product) > 2.0**-900) & (np.abs(a) < 2.0**990) & (size < 2.0**1000)
    usual &= np.abs(b) < 2.0**990
    plain = ~(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)) | (a == 0) | (b == 0)
    made = np.where(plain, a * b + c, made)
    for place in zip(*np.nonzero(~usual & ~plain)):
        made[place] = _nearest(Fraction(a[place]) * Fraction(b[place]) + Fraction(c[place]))
    return made


def _product(a, b):
    """a * b rounded to nearest, and the exact error, barring overflow and underflow."""
    split = 134217729.0 * a
    high_a = split - (split - a)
    split = 134217729.0 * b
    high_b = split - (split - b)
    low_a, low_b = a - high_a, b - high_b
    product = a * b
    return product, ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def whole_number(x):
    """Convert an integer to float64, rounded to odd if inexact."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    half = x.dtype.type(32)
    high, low = (x >> half).astype(np.float64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return odd_sum(high, low)
