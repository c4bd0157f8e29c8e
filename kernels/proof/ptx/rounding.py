"""Numbers as PTX has them: what numpy lacks or rounds otherwise, on arrays of any shape.

bfloat16 and half registers hold bits (uint16). Approximate instructions (ex2, lg2, rsqrt, sin, ...) are computed as
well as numpy can and rounded; a device may differ in their last bits.
Source: NVIDIA, "PTX ISA", chapter 9.7 (instructions), and IEEE 754.
"""

from __future__ import annotations

import numpy as np

_TINY = np.float32(2.0**-126)
_HALF_WAY = np.uint64(1 << 28)
_BELOW = np.uint64((1 << 29) - 1)


def fma32(a, b, c):
    """a * b + c of float32, rounded once."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits
    total = product + c
    below = total.view(np.uint64) & _BELOW
    single = total.astype(np.float32)
    if (below == _HALF_WAY).any():  # only there does rounding to 53 bits first matter
        _round_ties(product, np.asarray(c, np.float64), total, single, below == _HALF_WAY)
    return single


def _round_ties(product, c, total, single, ties):
    product, c = np.broadcast_to(product, total.shape)[ties], np.broadcast_to(c, total.shape)[ties]
    rounded = total[ties]
    other = rounded - product
    rest = (product - (rounded - other)) + (c - other)  # what the sum lost, exactly
    single[ties] = np.where(rest == 0, rounded, np.nextafter(rounded, np.copysign(np.inf, rest))).astype(np.float32)


def flush(x):
    """Subnormal float32 to zero of its sign."""
    small = np.abs(x) < _TINY
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x):
    """To nearest, ties to even; not a number becomes 0x7fff."""
    bits = x.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
    odd = np.isnan(x)
    if odd.any():
        rounded[odd] = 0x7FFF
    return rounded


def f16_to_f32(bits):
    return bits.view(np.float16).astype(np.float32)


def f32_to_f16(x):
    """To nearest, ties to even; not a number becomes 0x7fff."""
    bits = x.astype(np.float16).view(np.uint16)
    odd = np.isnan(x)
    if odd.any():
        bits[odd] = 0x7FFF
    return bits


def f32_to_tf32(x):
    """To nearest, ties away from zero: 10 bits of mantissa."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def float_to_int(x, kind, whole=np.trunc):
    """Rounded by `whole` and held in kind's range; not a number becomes 0."""
    limits = np.iinfo(kind)
    value = whole(x.astype(np.float64))
    high = value >= float(limits.max)
    low = value <= float(limits.min)
    odd = np.isnan(value)
    made = np.where(high | low | odd, 0, value).astype(kind)
    return np.where(high, kind(limits.max), np.where(low, kind(limits.min), made))


def quotient(a, b):
    """Towards zero; by zero it is all ones."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, b.dtype.type(1), b))
    one = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // one
    quotient = quotient + ((quotient < 0) & (quotient * one != a))
    return np.where(b == 0, a.dtype.type(-1), quotient)


def remainder(a, b):
    """With the sign of a."""
    return a - quotient(a, b) * b


def multiply_high(a, b):
    """The upper half of the product of 32- or 64-bit integers."""
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (np.multiply(a, b, dtype=wide) >> wide(32)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    mid = (x & low) * (y >> half) + (((x & low) * (y & low)) >> half)
    high = (x >> half) * (y >> half) + (((x >> half) * (y & low) + (mid & low)) >> half) + (mid >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def bits_of(x, first, count):
    """bfe: `count` bits from `first` on, with the sign of the topmost where x is signed."""
    width = x.dtype.itemsize * 8
    first, count = np.minimum(first & np.uint32(255), width), np.minimum(count & np.uint32(255), width)
    if x.dtype.kind == "u":
        whole = np.where(count >= width, ~x.dtype.type(0), (x.dtype.type(1) << count.astype(x.dtype)) - x.dtype.type(1))
        return (x >> first.astype(x.dtype)) & whole
    top = np.minimum(first + count, width)
    left = (width - top).astype(x.dtype)
    right = (width - top + np.minimum(first, top)).astype(x.dtype)
    return np.where(count == 0, x.dtype.type(0), (x << left) >> right)


def permute(a, b, selector):
    """prmt: four of the eight bytes of b:a; bit 3 of a nibble spreads the byte's sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    made = np.uint32(0)
    for position in range(4):
        nibble = (selector >> np.uint32(4 * position)) & np.uint32(15)
        shift = (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)
        byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & np.uint32(8), np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)), byte)
        made = made | (byte << np.uint32(8 * position))
    return made


def logic3(a, b, c, table):
    """lop3: any function of three bits, by its truth table."""
    made = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            made |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return made


def leading_zeros(x):
    return np.where(x == 0, 32, 31 - np.floor(np.log2(np.maximum(x, 1).astype(np.float64)))).astype(np.uint32)


def count_bits(x):
    return np.bitwise_count(x).astype(np.uint32)


def pack(low, high):
    """Two 16-bit halves, or two 32-bit ones, as one register."""
    wide = np.uint32 if low.dtype.itemsize == 2 else np.uint64
    return low.astype(wide) | (high.astype(wide) << wide(low.dtype.itemsize * 8))


def halves(x):
    """The inverse of pack."""
    half = np.uint16 if x.dtype.itemsize == 4 else np.uint32
    bits = x.dtype.itemsize * 4
    return x.astype(half), (x >> x.dtype.type(bits)).astype(half)
