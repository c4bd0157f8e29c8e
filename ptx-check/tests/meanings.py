"""What every opcode that touches registers alone gives, by whole numbers and Fractions: a table of its own, which knows
nothing of the machine.

expected(opcode, bits) -> a check of the result's bits. Where the reference leaves a result open (a quotient by zero),
anything passes; of approximate instructions what is near enough does; a NaN may have any payload unless a format has
one alone.
"""

import bisect
import functools
import math
import struct
from collections.abc import Callable
from fractions import Fraction

Check = Callable[[int], bool]
TYPES = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "b16", "b32", "b64", "f16", "bf16", "f16x2", "bf16x2",
         "f32", "f64", "f32x2", "tf32", "pred", "s16x2", "u16x2", "e4m3x2", "e5m2x2"}  # fmt: skip
FORMATS = {"f64": (53, -1074, 1023), "f32": (24, -149, 127), "tf32": (11, -136, 127), "bf16": (8, -133, 127),
           "f16": (11, -24, 15), "e4m3": (4, -9, 8), "e5m2": (3, -16, 15)}  # fmt: skip
"""Digits, exponents of the smallest number and of the largest."""
NANS = {"tf32": {0x7FFFFFFF}}


def width(word: str) -> int:
    """Bits of a type."""
    special = {"f16x2": 32, "bf16x2": 32, "f32x2": 64, "tf32": 32, "bf16": 16, "pred": 1, "s16x2": 32, "u16x2": 32,
               "e4m3x2": 16, "e5m2x2": 16, "e4m3": 8, "e5m2": 8}  # fmt: skip
    return special.get(word) or int(word.lstrip("usbf"))


def signed(bits: int, count: int) -> int:
    bits &= (1 << count) - 1
    return bits - (1 << count) if bits >> (count - 1) else bits


def integer(bits: int, word: str) -> int:
    """The number that bits are as a type."""
    return signed(bits, width(word)) if word[0] == "s" else bits & ((1 << width(word)) - 1)


def exactly(value: int, count: int) -> Check:
    return lambda bits: bits == value & ((1 << count) - 1)


# ------------------------------------------------------------------------------------------------------ floating point


def decoded(bits: int, word: str) -> float:
    if word in ("e4m3", "e5m2"):
        return eight(bits, word)
    if word == "bf16":
        bits, word = bits << 16, "f32"
    code, size = {"f64": ("d", "Q"), "f32": ("f", "I"), "tf32": ("f", "I"), "f16": ("e", "H")}[word]
    return struct.unpack(code, struct.pack(size, bits))[0]


def eight(bits: int, word: str) -> float:
    """The number that eight bits are, by their definition."""
    digits, bias = (3, 7) if word == "e4m3" else (2, 15)
    exponent, rest = bits >> digits & (1 << 7 - digits) - 1, bits & (1 << digits) - 1
    sign = -1.0 if bits >> 7 else 1.0
    if word == "e4m3" and bits & 0x7F == 0x7F:
        return math.nan
    if word == "e5m2" and exponent == 31:
        return math.nan if rest else sign * math.inf
    return sign * (rest + ((1 << digits) if exponent else 0)) * 2.0 ** (max(exponent, 1) - bias - digits)


@functools.cache
def finite(word: str) -> list[Fraction]:
    """The finite numbers of eight bits that are not negative, ascending: a number's place is its bits."""
    numbers = (eight(bits, word) for bits in range(128))
    return [Fraction(number) for number in numbers if math.isfinite(number)]


def into_eight(x: float, word: str) -> int:
    """The nearest of all the finite numbers; of two as near the even one."""
    if math.isnan(x):
        return 0x7F
    sign, numbers = 0x80 if math.copysign(1.0, x) < 0 else 0, finite(word)
    if math.isinf(x):
        return sign | len(numbers) - 1
    size = abs(Fraction(x))
    above = bisect.bisect_left(numbers, size)
    near = range(max(above - 1, 0), min(above + 1, len(numbers)))
    return sign | min(near, key=lambda bits: (abs(numbers[bits] - size), bits & 1))


def encoded(x: float, word: str) -> int:
    """Bits of a number that the format has."""
    if word == "bf16":
        return struct.unpack("I", struct.pack("f", x))[0] >> 16
    code, size = {"f64": ("d", "Q"), "f32": ("f", "I"), "tf32": ("f", "I"), "f16": ("e", "H")}[word]
    return struct.unpack(size, struct.pack(code, x))[0]


def rounded(exact: Fraction | float, word: str, way: str = "rn") -> float:
    """The number of a format that is next to a Fraction in a direction; zeros, infinities and NaNs stay."""
    if isinstance(exact, float):
        if exact == 0 or not math.isfinite(exact):
            return exact
        exact = Fraction(exact)
    digits, least, most = FORMATS[word]
    size, negative = abs(exact), exact < 0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    count, rest = divmod(size, unit)
    up = {"rz": False, "rm": negative and rest > 0, "rp": not negative and rest > 0,
          "rna": 2 * rest >= unit, "rn": 2 * rest > unit or (2 * rest == unit and count % 2 == 1)}[way]  # fmt: skip
    value = (count + up) * unit
    largest = (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** most
    if value > largest:
        inward = way == "rz" or (way == "rm" and not negative) or (way == "rp" and negative)
        value = largest if inward else math.inf
    return math.copysign(float(value), -1.0 if negative else 1.0)


def flushed(x: float, word: str) -> float:
    """Subnormal numbers to zero."""
    least = {"f16": 2.0**-14, "f64": 2.0**-1022}.get(word, 2.0**-126)
    return math.copysign(0.0, x) if abs(x) < least else x


def product_sum(a: float, b: float, c: float, way: str) -> Fraction | float:
    """a * b + c, exactly, with the zero's sign that the direction gives."""
    if not all(map(math.isfinite, (a, b, c))):
        if math.isfinite(a) and math.isfinite(b):
            return c
        return a * b + (c if not math.isfinite(c) else 0.0)
    product = Fraction(a) * Fraction(b)
    total = product + Fraction(c)
    if total:
        return total
    sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    if product == 0 and sign == math.copysign(1.0, c):
        return math.copysign(0.0, c)
    return -0.0 if way == "rm" else 0.0


def product(a: float, b: float) -> Fraction | float:
    if a == 0 or b == 0 or not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    return Fraction(a) * Fraction(b)


def quotient(a: float, b: float) -> Fraction | float:
    if math.isnan(a) or math.isnan(b) or (b == 0 and a == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    if b == 0 or math.isinf(a):
        return sign * math.inf
    if a == 0 or math.isinf(b):
        return sign * 0.0
    return Fraction(a) / Fraction(b)


def root(a: float) -> Fraction | float:
    """A square root to 200 digits, the last of which tells that there are more."""
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    scaled = Fraction(a) * 4**1200
    whole = math.isqrt(int(scaled))
    return Fraction(2 * whole + (whole * whole != scaled), 2 * 2**1200)


def extreme(a: float, b: float, least: bool, nan: bool) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan if nan or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    ranked = sorted((a, b), key=lambda x: (x, math.copysign(1.0, x)))
    return ranked[0] if least else ranked[1]


def ranked(a: float, b: float, least: bool, modes: set[str]) -> float:
    if "xorsign" not in modes:
        return extreme(a, b, least, "NaN" in modes)
    value = extreme(abs(a), abs(b), least, "NaN" in modes)
    return value if math.isnan(value) else math.copysign(value, math.copysign(1.0, a) * math.copysign(1.0, b))


def _exponential(a: float) -> float:
    return math.inf if a > 2000 else 0.0 if a < -2000 else 2.0**a if a < 1023 else math.inf


PROPERTIES = {
    "finite": math.isfinite,
    "infinite": math.isinf,
    "number": lambda x: not math.isnan(x),
    "notanumber": math.isnan,
}


def has(x: float, what: str, word: str) -> bool:
    """testp."""
    if what in PROPERTIES:
        return PROPERTIES[what](x)
    usual = abs(x) >= (2.0**-126 if word == "f32" else 2.0**-1022)
    return usual and math.isfinite(x) if what == "normal" else not usual and x != 0 and not math.isnan(x)


APPROXIMATE = {
    "ex2": _exponential,
    "lg2": lambda a: math.nan if a < 0 else -math.inf if a == 0 else math.log2(a),
    "sin": lambda a: math.nan if math.isinf(a) else math.sin(a),
    "cos": lambda a: math.nan if math.isinf(a) else math.cos(a),
    "tanh": math.tanh,
    "rsqrt": lambda a: math.nan if a < 0 else math.copysign(math.inf, a) if a == 0 else 1 / math.sqrt(a),
    "rcp": lambda a: float(rounded(quotient(1.0, a), "f64")),
    "sqrt": lambda a: float(rounded(root(a), "f64")),
    "div": lambda a, b: float(rounded(quotient(a, b), "f64")),
}


def approximately(value: float, word: str, base: str, given: list[float], modes: set[str]) -> Check:
    digits, least, _ = FORMATS[word]
    seed = word == "f64" and "ftz" in modes
    slack = abs(value) * (2.0**-19 if seed else 2.0 ** (3 - digits)) + (2.0**-1022 if seed else 2.0**least)
    if base in ("sin", "cos", "lg2"):
        slack += 2.0**-20

    def check(bits: int) -> bool:
        actual = decoded(bits, word)
        if base in ("sin", "cos") and abs(given[0]) > 100 and math.isfinite(given[0]):
            return abs(actual) <= 1
        if base == "div" and "approx" in modes and 2.0**126 < abs(given[-1]) < math.inf:
            return math.isnan(actual) if math.isinf(given[0]) or math.isnan(given[0]) else actual == 0
        if math.isnan(value):
            return math.isnan(actual)
        if "ftz" in modes and abs(value) < 2.0**-125 and actual == 0:
            return True
        largest = rounded(Fraction(2) ** 2000, word, "rz")
        if math.isinf(value) or abs(value) > largest * (1 - 2.0 ** (2 - digits)):
            return actual == value or (abs(actual) >= largest * (1 - 2.0 ** (3 - digits)) and actual * value > 0)
        return abs(actual - value) <= slack

    return check


def real(base: str, word: str, modes: set[str], given: list[float]) -> Check:
    """Arithmetic of one floating-point type."""
    flushing = "ftz" in modes and word in ("f64", "f32", "f16", "bf16")
    if flushing:
        given = [flushed(x, word) for x in given]
    way = next((mode for mode in modes if mode in ("rn", "rz", "rm", "rp")), "rn")
    if base in APPROXIMATE and (modes & {"approx", "full"}):
        nan = any(map(math.isnan, given))
        return approximately(math.nan if nan else APPROXIMATE[base](*given), word, base, given, modes)
    exact = {
        "add": lambda a, b: product_sum(a, 1.0, b, way),
        "sub": lambda a, b: product_sum(a, 1.0, -b, way),
        "mul": product,
        "fma": lambda a, b, c: product_sum(a, b, c, way),
        "div": quotient,
        "rcp": lambda a: quotient(1.0, a),
        "sqrt": root,
        "min": lambda a, b: ranked(a, b, True, modes),
        "max": lambda a, b: ranked(a, b, False, modes),
        "neg": lambda a: -a,
        "abs": abs,
        "copysign": lambda a, b: math.copysign(b, a),
    }[base](*given)
    return held(exact, word, modes, way)


def held(exact: Fraction | float, word: str, modes: set[str], way: str = "rn") -> Check:
    """A result rounded, flushed and clamped as the modes say."""
    value = rounded(exact, word, way)
    if "ftz" in modes and word in ("f32", "f16"):
        value = flushed(value, word)
    if "sat" in modes:
        value = 0.0 if math.isnan(value) else min(max(value, 0.0), 1.0)
    if "relu" in modes and not math.isnan(value):
        value = max(value, 0.0)
    if math.isnan(value):
        return lambda bits: bits in NANS[word] if word in NANS else math.isnan(decoded(bits, word))
    if value == 0 and modes & {"sat", "relu"}:
        return lambda bits: decoded(bits, word) == 0
    return exactly(encoded(value, word), 64)


# ---------------------------------------------------------------------------------------------------- whole numbers


def clamped(value: int, word: str) -> int:
    count = width(word)
    low, high = (-(1 << (count - 1)), (1 << (count - 1)) - 1) if word[0] == "s" else (0, (1 << count) - 1)
    return max(low, min(high, value))


def field(a: int, first: int, count: int, bits: int, sign: bool) -> int:
    """bfe, bit by bit."""
    first, count, top = first & 255, count & 255, bits - 1
    fill = (a >> min(first + count - 1, top)) & 1 if sign and count else 0
    return sum(((a >> (first + i)) & 1 if i < count and first + i <= top else fill) << i for i in range(bits))


def inserted(a: int, b: int, first: int, count: int, bits: int) -> int:
    for i in range(count & 255):
        place = (first & 255) + i
        if place < bits:
            b = b & ~(1 << place) | (a >> i & 1) << place
    return b


def highest(a: int, word: str, distance: bool) -> int:
    bits = width(word)
    value = integer(a, word)
    place = (value if value >= 0 else ~value).bit_length() - 1
    return 0xFFFFFFFF if place < 0 else bits - 1 - place if distance else place


def permuted(a: int, b: int, selector: int) -> int:
    data = (b << 32 | a).to_bytes(8, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes(255 * (data[n & 7] >> 7) if n & 8 else data[n & 7] for n in nibbles), "little")


def funnel(a: int, b: int, count: int, left: bool, wrap: bool) -> int:
    count = count & 31 if wrap else min(count, 32)
    both = b << 32 | a
    return (both << count) >> 32 if left else both >> count


def whole(base: str, word: str, modes: set[str], bits: list[int]) -> Check:
    count = width(word)
    x = [integer(b, word) for b in bits]
    if base in ("div", "rem"):
        if x[1] == 0:
            return lambda _: True
        towards_zero = abs(x[0]) // abs(x[1]) * (1 if (x[0] < 0) == (x[1] < 0) else -1)
        return exactly(towards_zero if base == "div" else x[0] - towards_zero * x[1], count)
    shift = min(bits[1] & 0xFFFFFFFF, 64) if base in ("shl", "shr") else 0
    high = count if "hi" in modes else 0
    last = (bits[2] if "wide" in modes else x[2]) if len(x) > 2 else 0
    meaning = {
        "add": lambda: x[0] + x[1],
        "sub": lambda: x[0] - x[1],
        "mul": lambda: x[0] * x[1] >> high,
        "mad": lambda: (x[0] * x[1] >> high) + last,
        "min": lambda: min(x[0], x[1]),
        "max": lambda: max(x[0], x[1]),
        "neg": lambda: -x[0],
        "abs": lambda: abs(x[0]),
        "and": lambda: x[0] & x[1],
        "or": lambda: x[0] | x[1],
        "xor": lambda: x[0] ^ x[1],
        "not": lambda: ~x[0],
        "mov": lambda: x[0],
        "shl": lambda: x[0] << shift,
        "shr": lambda: x[0] >> shift,
        "shf": lambda: funnel(x[0], x[1], bits[2], "l" in modes, "wrap" in modes),
        "popc": lambda: bin(x[0]).count("1"),
        "clz": lambda: count - x[0].bit_length(),
        "brev": lambda: int(f"{x[0]:0{count}b}"[::-1], 2),
        "bfind": lambda: highest(bits[0], word, "shiftamt" in modes),
        "bfe": lambda: field(bits[0], bits[1], bits[2], count, word[0] == "s"),
        "bfi": lambda: inserted(bits[0], bits[1], bits[2], bits[3], count),
        "prmt": lambda: permuted(*bits),
        "selp": lambda: bits[0] if bits[2] else bits[1],
        "sad": lambda: x[2] + abs(x[0] - x[1]),
        "mul24": lambda: (
            signed(x[0], 24) * signed(x[1], 24) if word[0] == "s" else (x[0] & 0xFFFFFF) * (x[1] & 0xFFFFFF)
        ),
    }[base]()
    if "sat" in modes:
        meaning = clamped(meaning, word)
    if "relu" in modes:
        meaning = max(meaning, 0)
    return exactly(meaning, 32 if base in ("popc", "clz", "bfind") else count * (2 if "wide" in modes else 1))


# ------------------------------------------------------------------------------------------ comparisons, conversions


def compared(compare: str, a: float, b: float) -> bool:
    unordered = math.isnan(a) or math.isnan(b)
    if compare in ("nan", "num"):
        return unordered == (compare == "nan")
    plain = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
    truth = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[plain[:2]]
    return unordered or truth if plain.endswith("u") else truth and not unordered


def comparison(words: list[str], bits: list[int]) -> Check:
    word, modes = words[-1], words[1:]
    a, b = (decoded(x, word) if word in FORMATS else integer(x, word) for x in bits[:2])
    if "ftz" in modes:
        a, b = flushed(a, word), flushed(b, word)
    truth = compared(words[0], a, b)
    if len(bits) == 3:
        truth = {"and": truth and bits[2], "or": truth or bits[2], "xor": truth != bool(bits[2])}[modes[0]]
    return lambda actual: bool(actual) == bool(truth)


def conversion(types: list[str], modes: set[str], bits: list[int]) -> Check:
    to, of = types
    if of in ("e4m3x2", "e5m2x2"):
        numbers = [eight(bits[0] >> s & 0xFF, of[:4]) for s in (0, 8)]
        low, high = (held(x, "f16", modes & {"relu"}) for x in numbers)
        return lambda actual: low(actual & 0xFFFF) and high(actual >> 16)
    if to in ("e4m3x2", "e5m2x2"):
        given = bits[::-1] if of == "f32" else [bits[0] & 0xFFFF, bits[0] >> 16]
        numbers = [decoded(b, of.removesuffix("x2")) for b in given]
        wanted = [into_eight(max(x, 0.0) if "relu" in modes and x < 0 else x, to[:4]) for x in numbers]
        unsigned = 0x7F if "relu" in modes else 0xFF  # of a zero
        return lambda actual: all(unsigned & (actual >> s & 0xFF) == unsigned & w if w in (0, 0x80)
                                  else actual >> s & 0xFF == w for s, w in zip((0, 8), wanted))  # fmt: skip
    if to.endswith("x2"):
        one = to.removesuffix("x2")
        upper, lower = (conversion([one, of], modes, [b]) for b in bits)
        return lambda actual: upper(actual >> 16) and lower(actual & 0xFFFF)
    whole_way = next((m for m in modes if m in ("rni", "rzi", "rmi", "rpi")), None)
    way = next((m for m in modes if m in ("rn", "rz", "rm", "rp", "rna")), "rn")
    if of not in FORMATS:
        value = integer(bits[0], of)
        if to in FORMATS:
            return held(Fraction(value) if value else 0.0, to, modes, way)
        value = integer(clamped(value, to) if "sat" in modes else value, to)
        return exactly(value, max(16, width(to)))
    x = decoded(bits[0], of)
    x = flushed(x, of) if "ftz" in modes and of == "f32" else x
    if whole_way and math.isfinite(x):
        rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[whole_way]
        x = math.copysign(float(rounding(Fraction(x))), x) if to in FORMATS else rounding(Fraction(x))
    if to in FORMATS:
        if math.isnan(x) and to == "f16" and of == "f32" and not modes & {"sat"} and not whole_way:
            return exactly(0x7FFF, 16)
        return held(x, to, modes - ({"ftz"} if to != "f32" else set()), way)
    if isinstance(x, float) and math.isnan(x):
        x = 1 << (width(to) - 1) if of == "f64" or width(to) == 64 else 0
        return exactly(integer(x, to), max(16, width(to)))
    if isinstance(x, float):
        x = (1 << 70) * (1 if x > 0 else -1)
    return exactly(clamped(x, to), max(16, width(to)))


def _in_pairs(base: str, word: str, modes: set[str], bits: list[int]) -> Check:
    half, count = word.removesuffix("x2"), width(word) // 2
    mask = (1 << count) - 1
    low, high = (real(base, half, modes, [decoded(b >> s & mask, half) for b in bits]) for s in (0, count))
    return lambda actual: low(actual & mask) and high(actual >> count)


def carried(opcode: str, bits: list[int], carry: int) -> tuple[int, int]:
    """What a sum with a carry gives, and what it carries."""
    base, *words = opcode.split(".")
    word, count = words[-1], width(words[-1])
    carry = carry if base.endswith("c") else 0
    ones = (1 << count) - 1
    first = bits[0]
    if base.startswith("mad"):
        product = integer(bits[0], word) * integer(bits[1], word)
        first = (product >> count if "hi" in words else product) & ones
    total = first - bits[-1] - carry if base.startswith("sub") else first + bits[-1] + carry
    return total & ones, int(not 0 <= total <= ones)


def expected(opcode: str, bits: list[int]) -> Check:
    """A check of what an opcode makes of its operands' bits, in their order."""
    base, *words = opcode.split(".")
    types = [word for word in words if word in TYPES]
    modes, word = {word for word in words if word not in TYPES}, types[-1]
    if base == "setp" and not word.endswith("x2"):
        return comparison(words, bits)
    if base == "set":
        if word == "f16x2":
            sides = [comparison([*words[:-2], "f16"], [b >> s & 0xFFFF for b in bits]) for s in (0, 16)]
            return lambda actual: all(s(actual >> p & 0xFFFF) and (actual >> p & 0xFFFF) in (0, 0xFFFF)
                                      for s, p in zip(sides, (0, 16)))  # fmt: skip
        one = comparison([*words[:-2], word], bits)
        return lambda actual: one(actual) and actual in (0, 0xFFFFFFFF)
    if base == "cvt":
        return conversion(types, modes, bits)
    if base == "lop3":
        a, b, c, table = bits
        rows = (((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) for i in range(32))
        return exactly(sum((table >> row & 1) << i for i, row in enumerate(rows)), 32)
    if base == "testp":
        truth = has(decoded(bits[0], word), words[0], word)
        return lambda actual: bool(actual) == truth
    if base == "dp4a":
        parts = [
            [signed(b >> s, 8) if t[0] == "s" else b >> s & 0xFF for s in (0, 8, 16, 24)] for b, t in zip(bits, types)
        ]
        return exactly(bits[2] + sum(a * b for a, b in zip(*parts)), 32)
    if word in ("u16x2", "s16x2"):
        low, high = (whole(base, word[:3], modes, [b >> s & 0xFFFF for b in bits]) for s in (0, 16))
        return lambda actual: low(actual & 0xFFFF) and high(actual >> 16)
    if len(types) == 2:  # half precision taken into float32
        narrow = [decoded(b, types[1]) for b in bits[:-1]]
        return real(base, "f32", modes, [*narrow, decoded(bits[-1], "f32")])
    if base in ("mov", "selp"):
        whole_word = "b16" if width(word) == 1 else f"b{width(word)}"
        return whole(base, whole_word, set(), bits) if word != "pred" else lambda actual: bool(actual) == bool(bits[0])
    if word == "pred":
        a, b = bool(bits[0]), bool(bits[-1])
        truth = {"and": a and b, "or": a or b, "xor": a != b, "not": not a}[base]
        return lambda actual: bool(actual) == truth
    if word.endswith("x2"):
        return _in_pairs(base, word, modes, bits)
    if word in FORMATS:
        return real(base, word, modes, [decoded(b, word) for b in bits])
    return whole(base, word, modes, bits)
