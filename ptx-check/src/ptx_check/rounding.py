"""PTX arithmetic that numpy lacks or rounds differently, on arrays of any shape.

bfloat16 and half registers hold bits (uint16). Approximate instructions (ex2, lg2, rsqrt, sin, ...) use numpy's best
result, rounded; a device may differ in the last bits.
Source: NVIDIA, "PTX ISA", chapter 9.7 (instructions), and IEEE 754.
"""

import numpy as np
import torch

from ptx_check import exact

_TINY = np.float32(2.0**-126)
_HALF_WAY = np.uint64(1 << 28)
_BELOW = np.uint64((1 << 29) - 1)
_MANY = 4096


def fma32(a, b, c):
    """a * b + c of float32, rounded once."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits
    total = product + c
    below = total.view(np.uint64) & _BELOW
    try:
        with np.errstate(under="raise"):
            single = total.astype(np.float32)
    except FloatingPointError:  # subnormal results are rounded at another bit
        return exact.odd_sum(product, c).astype(np.float32)
    if (below == _HALF_WAY).any():  # double rounding matters only for ties
        return exact.odd_sum(product, c).astype(np.float32)
    return single


def flush(x):
    """Flush subnormal float32 to signed zero."""
    small = np.abs(x) < _TINY
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x):
    """Round to nearest, ties to even; NaN becomes 0x7fff."""
    if x.size >= _MANY and x.flags.c_contiguous and x.flags.writeable:
        rounded = torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
    else:
        bits = x.view(np.uint32)
        even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = ((bits + even) >> np.uint32(16)).astype(np.uint16)
    odd = np.isnan(x)
    if odd.any():
        rounded[odd] = 0x7FFF
    return rounded


def converted(x, kind):
    """Convert x to float16 or float32; large arrays with PyTorch, ten times as fast as numpy."""
    if x.size < _MANY or not (x.flags.c_contiguous and x.flags.writeable):
        return x.astype(kind)
    return torch.from_numpy(x).to(torch.float16 if kind is np.float16 else torch.float32).numpy()


def f16_to_f32(bits):
    return converted(bits.view(np.float16), np.float32)


def f32_to_f16(x):
    """Round to nearest, ties to even; NaN becomes 0x7fff."""
    bits = converted(x, np.float16).view(np.uint16)
    odd = np.isnan(x)
    if odd.any():
        bits[odd] = 0x7FFF
    return bits


def flush16(bits):
    """Flush subnormal half precision to signed zero."""
    return np.where(bits & np.uint16(0x7C00), bits, bits & np.uint16(0x8000))


def f32_to_tf32(x):
    """Round to nearest, ties away from zero, 10 bits of mantissa; NaN becomes 0x7fffffff."""
    bits = (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits).view(np.float32)


def f32_to_e4m3(x):
    """e4m3, saturated at 448; NaN becomes 0x7f. Its bits are those of half precision scaled by 1/256."""
    bits = (_held(x, "e4m3") * 2.0**-8).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), 0x7F, (bits >> 8 & 0x80) | (bits >> 7 & 0x7F)).astype(np.uint8)


def f32_to_e5m2(x):
    """e5m2, saturated at 57344; NaN becomes 0x7f."""
    bits = _held(x, "e5m2").astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), 0x7F, bits >> 8).astype(np.uint8)


def _held(x, name):
    made, most = exact.rounded(x.astype(np.float64), name, "rn"), exact.LARGEST[name]
    return np.clip(made, -most, most)


def e4m3_to_f32(bits):
    wide = bits.astype(np.uint16)
    half = (wide & np.uint16(0x80)) << np.uint16(8) | (wide & np.uint16(0x7F)) << np.uint16(7)
    return np.where(wide & 0x7F == 0x7F, np.float32(np.nan), f16_to_f32(half) * np.float32(256))


def e5m2_to_f32(bits):
    return f16_to_f32(bits.astype(np.uint16) << np.uint16(8))


def to_f16(x, way):
    """Round float64, exact or rounded to odd, to float16 in a direction; returns its bits."""
    return f32_to_f16(exact.rounded(x, "f16", way).astype(np.float32))


def to_bf16(x, way):
    return f32_to_bf16(exact.rounded(x, "bf16", way).astype(np.float32))


def to_f32(x, way):
    return exact.rounded(x, "f32", way).astype(np.float32)


def to_tf32(x, way):
    made = exact.rounded(x.astype(np.float64), "tf32", way).astype(np.float32)
    return np.where(np.isnan(made), np.uint32(0x7FFFFFFF), made.view(np.uint32)).view(np.float32)


def fma_f16(a, b, c):
    """a * b + c of float16 values held in float32, rounded to odd in float32 for a final rounding to float16."""
    return exact.odd32(exact.odd_product_sum(a, b, c))


def product_bf16(a, b):
    """a * b of bfloat16 values held in float32, rounded to odd if float32 is too narrow."""
    return exact.odd32(np.multiply(a, b, dtype=np.float64))


def saturated(x):
    """Clamp to [0, 1]; NaN becomes 0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(x > zero, np.minimum(x, one), zero)


def positive(x):
    """Negative numbers become 0; NaN stays."""
    return np.where(x <= x.dtype.type(0), x.dtype.type(0), x)


def smaller(a, b, choose=np.fmin):
    """The minimum; -0 is less than 0."""
    made = choose(a, b)
    zero = made == 0
    return np.where(zero & (a == b), -(-a - b), made) if zero.any() else made


def larger(a, b, choose=np.fmax):
    made = choose(a, b)
    zero = made == 0
    return np.where(zero & (a == b), a + b, made) if zero.any() else made


def of_both_signs(x, a, b):
    """-x if the signs of a and b differ, else x; NaN stays."""
    return np.where(np.isnan(x), x, np.where(np.signbit(a) != np.signbit(b), -x, x))


def seed64(x, name, ftz):
    """Approximate rcp or rsqrt of float64; ftz: uses the upper 32 bits of x and zeroes the lower 32 of the result."""
    upper = np.uint64(0xFFFFFFFF00000000)
    if not ftz:
        return 1.0 / np.sqrt(x)
    x = np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), (x.view(np.uint64) & upper).view(np.float64))
    made = 1.0 / (x if name == "rcp" else np.sqrt(x))
    made = np.where(np.abs(made) < 2.0**-1022, np.copysign(0.0, made), made)
    return (made.view(np.uint64) & upper).view(np.float64)


def product_of_bytes(a, b, c, first, second):
    """dp4a: sum of four byte products and c."""
    total = c.view(np.uint32)
    for shift in (0, 8, 16, 24):
        x, y = ((part >> np.uint32(shift)).astype(np.uint8).view(kind).astype(np.int32)
                for part, kind in ((a, first), (b, second)))  # fmt: skip
        total = total + (x * y).view(np.uint32)
    return total.view(c.dtype)


def carried(x, y, carry):
    """x + y + carry of unsigned numbers, and the carry out."""
    part = x + y
    total = part + carry
    return total, (part < x) | (total < part)


def borrowed(x, y, borrow):
    """x - y - borrow, and the borrow out."""
    part = x - y
    return part - borrow, (x < y) | (part < borrow)


def approximate_quotient(a, b):
    """div.approx: divisors above 2^126 give 0, because their reciprocal is flushed to 0."""
    huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    if not huge.any():
        return a / b
    vanished = np.where(np.isfinite(a), np.copysign(np.float32(0), a) * np.sign(b), np.float32(np.nan))
    return np.where(huge, vanished, a / b)


def float_to_int(x, kind, whole=np.trunc):
    """Round by `whole` and saturate to kind's range; NaN becomes 0, or only the sign bit if either side has 64
    bits."""
    limits = np.iinfo(kind)
    value = whole(x.astype(np.float64))
    high = value >= float(limits.max)
    low = value <= float(limits.min)
    odd = np.isnan(value)
    made = np.where(high | low | odd, 0, value).astype(kind)
    made = np.where(high, kind(limits.max), np.where(low, kind(limits.min), made))
    if odd.any() and 8 in (x.dtype.itemsize, made.dtype.itemsize):
        sign = np.array(1 << (limits.bits - 1), f"u{made.dtype.itemsize}").view(kind)
        made = np.where(odd, sign, made)
    return made


def clamped(x, kind):
    """Saturate an integer to another type's range."""
    here, there = np.iinfo(x.dtype), np.iinfo(kind)
    low, high = max(here.min, there.min), min(here.max, there.max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(kind)


def sum_in_range(a, b):
    """Saturating a + b of int32."""
    return clamped(np.add(a, b, dtype=np.int64), np.int32)


def difference_in_range(a, b):
    return clamped(np.subtract(a, b, dtype=np.int64), np.int32)


def quotient(a, b):
    """Division rounded towards zero; by zero: all ones."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, b.dtype.type(1), b))
    one = np.where((b == 0) | (b == -1), b.dtype.type(1), b)
    quotient = np.where(b == -1, -a, a // one)
    quotient = quotient + ((quotient < 0) & (b != -1) & (quotient * one != a))
    return np.where(b == 0, a.dtype.type(-1), quotient)


def remainder(a, b):
    """Remainder with the sign of a."""
    return a - quotient(a, b) * b


def multiply_high(a, b):
    """The upper half of a product of integers."""
    if a.dtype.itemsize < 8:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (np.multiply(a, b, dtype=wide) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    mid = (x & low) * (y >> half) + (((x & low) * (y & low)) >> half)
    high = (x >> half) * (y >> half) + (((x >> half) * (y & low) + (mid & low)) >> half) + (mid >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def bits_of(x, first, count):
    """bfe: extract `count` bits from bit `first` on, sign-extended if x is signed."""
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
    """prmt: four of the eight bytes of b:a; bit 3 of a nibble replicates the byte's sign."""
    if selector.size == 1 and not int(selector.flat[0]) & 0x8888:
        return _arranged(a, b, int(selector.flat[0]))
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    made = np.uint32(0)
    for position in range(4):
        nibble = (selector >> np.uint32(4 * position)) & np.uint32(15)
        shift = (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)
        byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & np.uint32(8), np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)), byte)
        made = made | (byte << np.uint32(8 * position))
    return made


def _arranged(a, b, selector: int):
    """prmt with a constant selector; bytes shifted by the same distance move together."""
    masks: dict[tuple[bool, int], int] = {}
    for position in range(4):
        second, byte = divmod(selector >> 4 * position & 7, 4)
        key = (bool(second), 8 * (position - byte))
        masks[key] = masks.get(key, 0) | 0xFF << 8 * byte
    made = None
    for (second, left), mask in masks.items():
        all_bytes = 0xFFFFFFFF
        whole = (mask << left ^ all_bytes << left) & all_bytes == 0 if left >= 0 else (mask ^ all_bytes) >> -left == 0
        part = b if second else a
        part = part if whole else part & np.uint32(mask)
        if left:
            part = part << np.uint32(left) if left > 0 else part >> np.uint32(-left)
        made = part if made is None else made | part
    return made


def logic3(a, b, c, table):
    """lop3: any function of three bits, by its truth table."""
    made = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            made |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return made


def leading_zeros(x):
    width = x.dtype.itemsize * 8
    for step in (1, 2, 4, 8, 16, 32)[: width.bit_length() - 1]:
        x = x | (x >> x.dtype.type(step))
    return np.uint32(width) - count_bits(x)


def highest_bit(x, distance=False):
    """bfind: position of the highest 1 (negative numbers: highest 0); distance: counted from the top instead."""
    width = x.dtype.itemsize * 8
    bits = np.where(x < 0, ~x, x).view(f"u{x.dtype.itemsize}")
    zeros = leading_zeros(bits)
    found = zeros if distance else np.uint32(width - 1) - zeros
    return np.where(bits == 0, np.uint32(0xFFFFFFFF), found)


def turned(x):
    """brev: reverse the bits."""
    made = np.zeros_like(x)
    one = x.dtype.type(1)
    for _ in range(x.dtype.itemsize * 8):
        made = (made << one) | (x & one)
        x = x >> one
    return made


def inserted(a, b, first, count):
    """bfi: insert the lowest `count` bits of a into b from bit `first` on."""
    width = a.dtype.itemsize * 8
    first = np.minimum(first & np.uint32(255), np.uint32(width)).astype(a.dtype)
    count = np.minimum(count & np.uint32(255), np.uint32(width)).astype(a.dtype)
    one = a.dtype.type(1)
    mask = np.where(count >= width, ~a.dtype.type(0), (one << count) - one) << first
    return (b & ~mask) | ((a << first) & mask)


def funnel(low, high, count, left, wrap):
    """shf: funnel shift of high:low; returns 32 bits."""
    count = (count & np.uint32(31)) if wrap else np.minimum(count, np.uint32(32))
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    count = count.astype(np.uint64)
    return ((both << count) >> np.uint64(32) if left else both >> count).astype(np.uint32)


def count_bits(x):
    return np.bitwise_count(x).astype(np.uint32)


def pack(low, high):
    """Pack two halves of 8, 16 or 32 bits into one register."""
    wide = {1: np.uint16, 2: np.uint32, 4: np.uint64}[low.dtype.itemsize]
    return low.astype(wide) | (high.astype(wide) << wide(low.dtype.itemsize * 8))


def halves(x):
    """Split a register into its two halves, the inverse of pack()."""
    half = {2: np.uint8, 4: np.uint16, 8: np.uint32}[x.dtype.itemsize]
    bits = x.dtype.itemsize * 4
    return x.astype(half), (x >> x.dtype.type(bits)).astype(half)
