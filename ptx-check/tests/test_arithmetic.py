"""Every instruction that touches registers alone, against a few lines of plain Python of its own."""

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from ptx_text import apply

from ptx_check import Unsupported, rounding

EDGES = [0, 1, 2, 3, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x12345678, 0x7FFFFFFF, 0x80000000,
         0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF0]  # fmt: skip
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, 3.0, -2.5, 1e-3, 1e10, 3e38, -3e38, 1e-38, 1e-45, math.inf, -math.inf,
         math.nan, 65504.0, 65520.0, 70000.0, 6e-8, 0.1, 1 / 3, 2.0**-126, 16777217.0, 1.00390625, 255.5]  # fmt: skip


def integers(bits, count, seed):
    draw = random.Random(seed)
    actual = [e & ((1 << bits) - 1) for e in EDGES] + [draw.getrandbits(bits) for _ in range(count)]
    draw.shuffle(actual)
    return actual


def reals(count, seed):
    draw = random.Random(seed)
    actual = [single(x) for x in REALS] + [
        single(draw.gauss(0, 1) * 2.0 ** draw.randint(-20, 20)) for _ in range(count)
    ]
    draw.shuffle(actual)
    return actual


def signed(value, bits):
    return value - (1 << bits) if value >> (bits - 1) else value


def single(x):
    """The float32 nearest to a Python float."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def bits32(x):
    return struct.unpack("I", struct.pack("f", x))[0]


def real32(bits):
    return struct.unpack("f", struct.pack("I", bits))[0]


def half(bits):
    return struct.unpack("e", struct.pack("H", bits))[0]


def bfloat(bits):
    return real32(bits << 16)


def to_half(x):
    if math.isnan(x):
        return 0x7FFF
    try:
        return struct.unpack("H", struct.pack("e", x))[0]
    except OverflowError:
        return 0xFC00 if x < 0 else 0x7C00


def to_bfloat(x):
    """To nearest, ties to even, by trying both neighbours."""
    if math.isnan(x):
        return 0x7FFF
    bits = bits32(x)
    low = bits >> 16
    rest = bits & 0xFFFF
    return low + (rest > 0x8000 or (rest == 0x8000 and low & 1))


def nearest32(exact):
    """The float32 nearest to a Fraction, ties to even."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    power = -149
    while magnitude >= Fraction(2) ** (power + 24):
        power += 1
    count, rest = divmod(magnitude, Fraction(2) ** power)
    count = int(count) + (rest * 2 > Fraction(2) ** power or (rest * 2 == Fraction(2) ** power and int(count) & 1))
    actual = math.ldexp(count, power)
    return math.copysign(math.inf if actual >= 2.0**128 else actual, exact)


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a, first, count, bits, sign):
    """bfe as the reference's pseudocode has it."""
    first, count = first & 255, count & 255
    top = bits - 1
    fill = (a >> min(first + count - 1, top)) & 1 if sign and count else 0
    actual = 0
    for i in range(bits):
        actual |= ((a >> (first + i)) & 1 if i < count and first + i <= top else fill) << i
    return actual


def permuted(a, b, selector):
    data = (b << 32 | a).to_bytes(8, "little")
    chosen = [data[selector >> 4 * i & 7] if not selector >> 4 * i & 8 else 255 * (data[selector >> 4 * i & 7] >> 7)
              for i in range(4)]  # fmt: skip
    return int.from_bytes(bytes(chosen), "little")


INTEGER = {
    "add.s32": (32, lambda a, b: a + b),
    "sub.s32": (32, lambda a, b: a - b),
    "add.s64": (64, lambda a, b: a + b),
    "sub.s64": (64, lambda a, b: a - b),
    "mul.lo.s32": (32, lambda a, b: a * b),
    "mul.lo.s64": (64, lambda a, b: a * b),
    "mul.lo.u16": (16, lambda a, b: a * b),
    "add.s16": (16, lambda a, b: a + b),
    "mul.hi.u32": (32, lambda a, b: a * b >> 32),
    "mul.hi.s32": (32, lambda a, b: signed(a, 32) * signed(b, 32) >> 32),
    "mul.hi.u64": (64, lambda a, b: a * b >> 64),
    "mul.hi.s64": (64, lambda a, b: signed(a, 64) * signed(b, 64) >> 64),
    "and.b16": (16, lambda a, b: a & b),
    "and.b32": (32, lambda a, b: a & b),
    "and.b64": (64, lambda a, b: a & b),
    "or.b16": (16, lambda a, b: a | b),
    "or.b32": (32, lambda a, b: a | b),
    "or.b64": (64, lambda a, b: a | b),
    "xor.b16": (16, lambda a, b: a ^ b),
    "xor.b32": (32, lambda a, b: a ^ b),
    "xor.b64": (64, lambda a, b: a ^ b),
    "min.s32": (32, lambda a, b: min(signed(a, 32), signed(b, 32))),
    "max.s32": (32, lambda a, b: max(signed(a, 32), signed(b, 32))),
    "min.u32": (32, min),
    "max.u32": (32, max),
    "min.s64": (64, lambda a, b: min(signed(a, 64), signed(b, 64))),
    "max.s64": (64, lambda a, b: max(signed(a, 64), signed(b, 64))),
    "min.relu.s32": (32, lambda a, b: max(0, min(signed(a, 32), signed(b, 32)))),
    "div.s32": (32, lambda a, b: quotient(signed(a, 32), signed(b, 32)) if b else -1),
    "div.u32": (32, lambda a, b: a // b if b else -1),
    "div.s64": (64, lambda a, b: quotient(signed(a, 64), signed(b, 64)) if b else -1),
    "rem.s32": (32, lambda a, b: signed(a, 32) - quotient(signed(a, 32), signed(b, 32)) * signed(b, 32) if b else a),
    "rem.u32": (32, lambda a, b: a % b if b else a),
}


@pytest.mark.parametrize("opcode", INTEGER)
def test_integers_of_two_operands(opcode):
    bits, meaning = INTEGER[opcode]
    a, b = integers(bits, 100, 1), integers(bits, 100, 2)
    kind, dtype = f"b{bits}", f"u{bits // 8}"
    actual = apply(opcode, kind, (kind, np.array(a, dtype)), (kind, np.array(b, dtype)))
    assert actual.tolist() == [meaning(x, y) & ((1 << bits) - 1) for x, y in zip(a, b)]


WIDE = {
    "mul.wide.s32": lambda a, b, c: signed(a, 32) * signed(b, 32),
    "mul.wide.u32": lambda a, b, c: a * b,
    "mad.wide.s32": lambda a, b, c: signed(a, 32) * signed(b, 32) + c,
    "mad.wide.u32": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("opcode", WIDE)
def test_products_of_twice_the_width(opcode):
    a, b, c = integers(32, 100, 3), integers(32, 100, 4), integers(64, 100, 5)
    operands = [("b32", np.array(a, "u4")), ("b32", np.array(b, "u4")), ("b64", np.array(c, "u8"))]
    actual = apply(opcode, "b64", *operands[: 3 if opcode.startswith("mad") else 2])
    assert actual.tolist() == [WIDE[opcode](*x) & ((1 << 64) - 1) for x in zip(a, b, c)]


@pytest.mark.parametrize(("opcode", "bits"), [("mad.lo.s32", 32), ("mad.lo.s64", 64), ("mad.lo.u32", 32)])
def test_product_and_sum(opcode, bits):
    a, b, c = (integers(bits, 60, seed) for seed in (1, 2, 3))
    actual = apply(opcode, f"b{bits}", *((f"b{bits}", np.array(x, f"u{bits // 8}")) for x in (a, b, c)))
    assert actual.tolist() == [(x * y + z) & ((1 << bits) - 1) for x, y, z in zip(a, b, c)]


SHIFTS = {
    "shl.b16": (16, lambda a, n: a << n),
    "shl.b32": (32, lambda a, n: a << n),
    "shl.b64": (64, lambda a, n: a << n),
    "shr.u16": (16, lambda a, n: a >> n),
    "shr.u32": (32, lambda a, n: a >> n),
    "shr.u64": (64, lambda a, n: a >> n),
    "shr.b32": (32, lambda a, n: a >> n),
    "shr.s32": (32, lambda a, n: signed(a, 32) >> n),
    "shr.s64": (64, lambda a, n: signed(a, 64) >> n),
}


@pytest.mark.parametrize("opcode", SHIFTS)
def test_shifts_by_any_amount(opcode):
    bits, meaning = SHIFTS[opcode]
    a = integers(bits, 80, 6)
    n = [i % 70 for i in range(len(a))]
    actual = apply(opcode, f"b{bits}", (f"b{bits}", np.array(a, f"u{bits // 8}")), ("b32", np.array(n, "u4")))
    assert actual.tolist() == [meaning(x, k) & ((1 << bits) - 1) for x, k in zip(a, n)]


@pytest.mark.parametrize(("opcode", "sign"), [("bfe.u32", False), ("bfe.s32", True)])
def test_bit_fields(opcode, sign):
    a = integers(32, 100, 7)
    first, count = [i * 7 % 40 for i in range(len(a))], [i * 5 % 40 for i in range(len(a))]
    actual = apply(opcode, "b32", *(("b32", np.array(x, "u4")) for x in (a, first, count)))
    assert actual.tolist() == [field(x, f, c, 32, sign) for x, f, c in zip(a, first, count)]


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x3340, 0x7701, 0x9ABC, 0x0123])
def test_bytes_are_permuted(selector):
    a, b = integers(32, 60, 8), integers(32, 60, 9)
    actual = apply("prmt.b32", "b32", ("b32", np.array(a, "u4")), ("b32", np.array(b, "u4")), f"{selector:#x}U")
    assert actual.tolist() == [permuted(x, y, selector) for x, y in zip(a, b)]


@pytest.mark.parametrize("table", [0x80, 0xFE, 0x96, 0xCA, 0x1B])
def test_any_function_of_three_bits(table):
    a, b, c = (integers(32, 40, seed) for seed in (1, 2, 3))
    actual = apply("lop3.b32", "b32", *(("b32", np.array(x, "u4")) for x in (a, b, c)), f"{table:#x}")
    wanted = [
        sum((table >> ((x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1)) & 1) << i for i in range(32))
        for x, y, z in zip(a, b, c)
    ]
    assert actual.tolist() == wanted


UNARY = {
    "neg.s32": ("b32", "b32", lambda a: -a),
    "neg.s64": ("b64", "b64", lambda a: -a),
    "not.b32": ("b32", "b32", lambda a: ~a),
    "not.b64": ("b64", "b64", lambda a: ~a),
    "abs.s32": ("b32", "b32", lambda a: abs(signed(a, 32))),
    "mov.b32": ("b32", "b32", lambda a: a),
    "mov.u32": ("b32", "b32", lambda a: a),
    "mov.b64": ("b64", "b64", lambda a: a),
    "mov.u64": ("b64", "b64", lambda a: a),
    "mov.b16": ("b16", "b16", lambda a: a),
    "mov.u16": ("b16", "b16", lambda a: a),
    "popc.b32": ("b32", "b32", lambda a: bin(a).count("1")),
    "clz.b32": ("b32", "b32", lambda a: 32 - a.bit_length()),
    "cvt.s64.s32": ("b32", "b64", lambda a: signed(a, 32)),
    "cvt.u64.u32": ("b32", "b64", lambda a: a),
    "cvt.u32.u64": ("b64", "b32", lambda a: a),
    "cvt.u32.u16": ("b16", "b32", lambda a: a),
    "cvt.s32.s16": ("b16", "b32", lambda a: signed(a, 16)),
    "cvt.s32.s8": ("b32", "b32", lambda a: signed(a & 255, 8)),
    "cvt.u16.u32": ("b32", "b16", lambda a: a),
    "cvt.u16.u64": ("b64", "b16", lambda a: a),
    "cvt.s16.s8": ("b16", "b16", lambda a: signed(a & 255, 8)),
    "cvt.rn.f32.s32": ("b32", "b32", lambda a: bits32(nearest32(Fraction(signed(a, 32))))),
    "cvt.rn.f32.u32": ("b32", "b32", lambda a: bits32(nearest32(Fraction(a)))),
    "cvt.rn.f32.s64": ("b64", "b32", lambda a: bits32(nearest32(Fraction(signed(a, 64))))),
    "cvt.rn.bf16.s16": ("b16", "b16", lambda a: to_bfloat(float(signed(a, 16)))),
    "cvt.rn.f16.u16": ("b16", "b16", lambda a: to_half(float(a))),
    "cvt.rn.f16.s8": ("b16", "b16", lambda a: to_half(float(signed(a & 255, 8)))),
    "cvt.f32.f16": ("b16", "b32", lambda a: bits32(half(a))),
    "cvt.f32.bf16": ("b16", "b32", lambda a: a << 16),
}


@pytest.mark.parametrize("opcode", UNARY)
def test_integers_of_one_operand(opcode):
    source, result, meaning = UNARY[opcode]
    bits, wide = int(source[1:]), int(result[1:])
    a = integers(bits, 120, 10)
    if "f16" in opcode:  # not numbers keep no bits in Python
        a = [x for x in a if x >> 10 & 31 != 31 or not x & 1023]
    actual = apply(opcode, result, (source, np.array(a, f"u{bits // 8}")))
    assert actual.tolist() == [meaning(x) & ((1 << wide) - 1) for x in a]


def saturated(x, bits):
    if math.isnan(x):
        return 0
    if math.isinf(x):
        return (1 << (bits - 1)) - 1 if x > 0 else -(1 << (bits - 1))
    return max(-(1 << (bits - 1)), min((1 << (bits - 1)) - 1, math.trunc(x)))


NARROWING = {
    "cvt.rn.f16.f32": ("b16", to_half),
    "cvt.rn.bf16.f32": ("b16", to_bfloat),
    "cvt.rzi.s32.f32": ("b32", lambda x: saturated(x, 32) & 0xFFFFFFFF),
    "cvt.rna.tf32.f32": ("b32", lambda x: (bits32(x) + 0x1000) & 0xFFFFE000),
}


@pytest.mark.parametrize("opcode", NARROWING)
def test_narrower_numbers_are_rounded_to_the_nearest(opcode):
    result, meaning = NARROWING[opcode]
    x = reals(400, 11)
    x += [bfloat(i) for i in (0x3F80, 0x3F81)] + [real32(0x3F808000), real32(0x3F818000), real32(0x3F808001)]  # ties
    x = [v for v in x if "tf32" not in opcode or math.isfinite(v)]
    actual = apply(opcode, result, ("b32", np.array(x, "f4")))
    assert actual.tolist() == [meaning(v) for v in x]


@pytest.mark.parametrize(("opcode", "meaning"), [("cvt.rn.f16x2.f32", to_half), ("cvt.rn.bf16x2.f32", to_bfloat)])
def test_a_pair_is_packed_with_its_first_operand_above(opcode, meaning):
    x, y = reals(100, 12), reals(100, 13)
    actual = apply(opcode, "b32", ("b32", np.array(x, "f4")), ("b32", np.array(y, "f4")))
    assert actual.tolist() == [meaning(a) << 16 | meaning(b) for a, b in zip(x, y)]


def fraction(x):
    return Fraction(x) if math.isfinite(x) else None


def exactly(exact, fallback):
    """Of finite operands the nearest float32, of others what Python's floats give."""

    def meaning(*operands):
        if all(math.isfinite(x) for x in operands):
            value = nearest32(exact(*map(Fraction, operands)))
            return value if value else fallback(*operands) * 0.0
        return fallback(*operands)

    return meaning


FLOAT = {
    "add.f32": (2, exactly(lambda a, b: a + b, lambda a, b: a + b)),
    "sub.f32": (2, exactly(lambda a, b: a - b, lambda a, b: a - b)),
    "mul.f32": (2, exactly(lambda a, b: a * b, lambda a, b: a * b)),
    "fma.rn.f32": (3, exactly(lambda a, b, c: a * b + c, lambda a, b, c: a * b + c)),
    "max.f32": (2, lambda a, b: b if math.isnan(a) else a if math.isnan(b) else max(a, b)),
    "min.f32": (2, lambda a, b: b if math.isnan(a) else a if math.isnan(b) else min(a, b)),
    "max.NaN.f32": (2, lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else max(a, b)),
    "neg.f32": (1, lambda a: -a),
    "abs.f32": (1, abs),
}


def same(actual, wanted):
    return math.isnan(wanted) if math.isnan(actual) else actual == wanted


@pytest.mark.parametrize("opcode", FLOAT)
def test_float32_is_rounded_once(opcode):
    count, meaning = FLOAT[opcode]
    operands = [reals(300, seed) for seed in range(20, 20 + count)]
    actual = apply(opcode, "b32", *(("b32", np.array(x, "f4")) for x in operands)).view("f4")
    for position, of in enumerate(zip(*operands)):
        assert same(float(actual[position]), meaning(*of)), (opcode, of)


def test_a_fused_sum_that_float64_would_round_twice():
    """a * b + c a hair beside the middle of two float32s."""
    a, b = single(1 + 2.0**-23), single(1 + 2.0**-23)
    c = [single(2.0**-24 * 2.0**k) for k in range(-8, 30)] + [single(-(2.0**-24) * 2.0**k) for k in range(-8, 30)]
    c += [single(2.0**30 + 2.0**7), single(2.0**29), single(2.0**53)]
    actual = apply("fma.rn.f32", "b32", *(("b32", np.array(x, "f4")) for x in ([a] * len(c), [b] * len(c), c)))
    assert actual.view("f4").tolist() == [nearest32(Fraction(a) * Fraction(b) + Fraction(x)) for x in c]
    # 2^0 + 2^-24 + 2^-60: exactly above the middle of 1 and the next float32
    tie = apply("fma.rn.f32", "b32", *(("b32", np.array(x, "f4")) for x in ([2.0**-30], [2.0**-30], [1.0])))
    assert tie.view("f4").tolist() == [1.0]
    x, y, z = single(1 + 2.0**-12), single(2.0**-24 * (1 - 2.0**-12)), 1.0
    low = apply("fma.rn.f32", "b32", *(("b32", np.array([v], "f4")) for v in (x, y, z)))
    assert low.view("f4").tolist() == [nearest32(Fraction(x) * Fraction(y) + 1)]
    x, y, z = single(2.0**-24 * (1 + 2.0**-23)), single(1 - 2.0**-23 + 2.0**-24), single(1 + 2.0**-23)
    low = apply("fma.rn.f32", "b32", *(("b32", np.array([v], "f4")) for v in (x, y, z)))
    assert low.view("f4").tolist() == [nearest32(Fraction(x) * Fraction(y) + Fraction(z))]


APPROXIMATE = {
    "ex2.approx.f32": (1, lambda a: 2.0**a),
    "ex2.approx.ftz.f32": (1, lambda a: 2.0**a),
    "lg2.approx.f32": (1, lambda a: math.log2(abs(a))),
    "rsqrt.approx.ftz.f32": (1, lambda a: abs(a) ** -0.5),
    "sqrt.rn.f32": (1, lambda a: math.sqrt(abs(a))),
    "rcp.approx.f32": (1, lambda a: 1 / a),
    "div.full.f32": (2, lambda a, b: a / b),
    "div.rn.f32": (2, lambda a, b: a / b),
    "sin.approx.f32": (1, math.sin),
    "cos.approx.f32": (1, math.cos),
    "tanh.approx.f32": (1, math.tanh),
}


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximate_instructions_are_as_near_as_float32_can_be(opcode):
    count, meaning = APPROXIMATE[opcode]
    draw = random.Random(30)
    low = 0.1 if opcode.startswith(("lg2", "rsqrt", "sqrt", "rcp", "div")) else -8.0
    operands = [[single(draw.uniform(low, 8.0)) for _ in range(200)] for _ in range(count)]
    actual = apply(opcode, "b32", *(("b32", np.array(x, "f4")) for x in operands)).view("f4")
    for position, of in enumerate(zip(*operands)):
        assert float(actual[position]) == pytest.approx(meaning(*of), rel=3e-7, abs=1e-7)


def test_ftz_flushes_subnormal_operands_and_results():
    tiny = [2.0**-127, -(2.0**-130), 2.0**-126]
    kept = apply("fma.rn.f32", "b32", ("b32", np.array(tiny, "f4")), "0f3F800000", "0f00000000").view("f4")
    flushed = apply("fma.rn.ftz.f32", "b32", ("b32", np.array(tiny, "f4")), "0f3F800000", "0f00000000").view("f4")
    assert kept.tolist() == tiny
    assert flushed.tolist() == [0.0, 0.0, 2.0**-126]
    assert apply("ex2.approx.ftz.f32", "b32", ("b32", np.array([-127.0, -126.0], "f4"))).view("f4").tolist() == [
        0.0,
        2.0**-126,
    ]


def test_pairs_of_float32_are_computed_each_alone():
    a, b, c = (np.array(reals(60, seed)[: 2 * 40], "f4") for seed in (31, 32, 33))
    actual = apply("fma.rn.f32x2", "b64", *(("b64", x.view("u8")) for x in (a, b, c))).view("f4")
    alone = apply("fma.rn.f32", "b32", *(("b32", x) for x in (a, b, c))).view("f4")
    assert np.array_equal(actual, alone, equal_nan=True)


@pytest.mark.parametrize(("word", "encode", "decode"), [("f16", to_half, half), ("bf16", to_bfloat, bfloat)])
@pytest.mark.parametrize(
    ("name", "meaning"), [("add", lambda a, b: a + b), ("mul", lambda a, b: a * b), ("sub", lambda a, b: a - b)]
)
def test_half_precision_is_rounded_once(word, encode, decode, name, meaning):
    draw = random.Random(34)
    a, b = ([encode(draw.gauss(0, 1) * 2.0 ** draw.randint(-5, 5)) for _ in range(200)] for _ in range(2))
    actual = apply(f"{name}.rn.{word}", "b16", ("b16", np.array(a, "u2")), ("b16", np.array(b, "u2")))
    assert [decode(int(x)) for x in actual] == [decode(encode(meaning(decode(x), decode(y)))) for x, y in zip(a, b)]


@pytest.mark.parametrize(("word", "encode", "decode"), [("f16", to_half, half), ("bf16", to_bfloat, bfloat)])
@pytest.mark.parametrize(("name", "sign"), [("add", 1.0), ("sub", -1.0), ("fma", 1.0)])
def test_half_precision_is_taken_into_a_sum_of_float32(word, encode, decode, name, sign):
    """Of sm_100 and newer: sums and products with the last operand in float32."""
    draw = random.Random(36)
    narrow = [[encode(draw.gauss(0, 1)) for _ in range(200)] for _ in range(2 if name == "fma" else 1)]
    last = [single(draw.gauss(0, 1)) for _ in range(200)]
    operands = [("b16", np.array(x, "u2")) for x in narrow]
    actual = apply(f"{name}.rn.f32.{word}", "b32", *operands, ("b32", np.array(last, "f4").view("u4")))
    wanted = [single(math.prod(decode(x) for x in xs) + sign * c) for *xs, c in zip(*narrow, last)]
    assert actual.view("f4").tolist() == wanted


def test_an_instruction_of_two_types_that_is_not_known_is_refused():
    with pytest.raises(Unsupported, match=r"mul\.rn\.f32\.f16"):
        apply("mul.rn.f32.f16", "b32", ("b16", np.ones(32, "u2")), ("b32", np.ones(32, "u4")))


ORDERED = {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
           "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}  # fmt: skip


@pytest.mark.parametrize("compare", ORDERED)
@pytest.mark.parametrize("word", ["s32", "u32", "s64", "u64", "b16", "b32"])
def test_integers_are_compared(compare, word):
    if word[0] == "b" and compare not in ("eq", "ne"):
        return  # bits have no order
    bits = int(word[1:])
    a, b = integers(bits, 60, 14), integers(bits, 60, 15)
    b[:20] = a[:20]
    actual = apply(f"setp.{compare}.{word}", "pred", *((f"b{bits}", np.array(x, f"u{bits // 8}")) for x in (a, b)))
    values = [(signed(x, bits), signed(y, bits)) if word[0] == "s" else (x, y) for x, y in zip(a, b)]
    assert actual.tolist() == [ORDERED[compare](*v) for v in values]


@pytest.mark.parametrize("compare", [*ORDERED, *(f"{name}u" for name in ORDERED), "nan", "num"])
@pytest.mark.parametrize("word", ["f32", "bf16", "f16"])
def test_numbers_are_compared_and_what_is_none_is_unordered(compare, word):
    a, b = reals(80, 16), reals(80, 17)
    b[:30] = a[:30]
    if word == "f32":
        operands = [("b32", np.array(x, "f4")) for x in (a, b)]
    else:
        encode, decode = (to_half, half) if word == "f16" else (to_bfloat, bfloat)
        operands = [("b16", np.array([encode(v) for v in x], "u2")) for x in (a, b)]
        a, b = ([decode(encode(v)) for v in x] for x in (a, b))
    wanted = []
    for x, y in zip(a, b):
        unordered = math.isnan(x) or math.isnan(y)
        if compare in ("nan", "num"):
            wanted.append(unordered == (compare == "nan"))
        elif compare in ORDERED:
            wanted.append(not unordered and ORDERED[compare](x, y))
        else:
            wanted.append(unordered or ORDERED[compare[:-1]](x, y))
    assert apply(f"setp.{compare}.{word}", "pred", *operands).tolist() == wanted


@pytest.mark.parametrize(("word", "join"), [("and", lambda x, p: x and p), ("or", lambda x, p: x or p)])
def test_a_comparison_joined_with_a_predicate(word, join):
    a, b = integers(32, 40, 18), integers(32, 40, 19)
    p = [i % 3 == 0 for i in range(len(a))]
    actual = apply(f"setp.lt.{word}.s32", "pred", *(("b32", np.array(x, "u4")) for x in (a, b)), ("pred", np.array(p)))
    assert actual.tolist() == [join(signed(x, 32) < signed(y, 32), q) for x, y, q in zip(a, b, p)]


@pytest.mark.parametrize(("opcode", "bits"), [("selp.b16", 16), ("selp.b32", 32), ("selp.b64", 64), ("selp.f32", 32)])
def test_a_predicate_selects(opcode, bits):
    a, b = integers(bits, 40, 20), integers(bits, 40, 21)
    p = [i % 3 == 0 for i in range(len(a))]
    operands = ((f"b{bits}", np.array(x, f"u{bits // 8}")) for x in (a, b))
    assert apply(opcode, f"b{bits}", *operands, ("pred", np.array(p))).tolist() == [
        x if q else y for x, y, q in zip(a, b, p)
    ]


@pytest.mark.parametrize(
    ("opcode", "meaning"),
    [("and.pred", lambda a, b: a and b), ("or.pred", lambda a, b: a or b), ("xor.pred", lambda a, b: a != b)],
)
def test_predicates(opcode, meaning):
    a, b = [False, False, True, True], [False, True, False, True]
    actual = apply(opcode, "pred", ("pred", np.array(a)), ("pred", np.array(b)))
    assert actual.tolist() == [meaning(x, y) for x, y in zip(a, b)]
    assert apply("not.pred", "pred", ("pred", np.array(a))).tolist() == [not x for x in a]


@pytest.mark.parametrize("opcode", ["frobnicate.b32", "add.rz.s32", "tcgen05.mma", "tensormap.replace", "cvt.f32.e4m3"])
def test_an_unknown_opcode_is_told_by_name_and_line(opcode):
    with pytest.raises(Unsupported, match=rf"opcode {opcode} is .*, at probe, PTX line \d+"):
        apply(opcode, "b32", ("b32", np.arange(32, dtype="u4")))


def test_many_halves_are_converted_as_few_are():
    """PyTorch converts many, numpy few."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        near = np.concatenate([numbers, np.nextafter(bits.view(np.float16).astype(np.float32), np.float32(1))])
        few_wide = np.concatenate([rounding.f16_to_f32(part) for part in bits.reshape(64, -1)])
        few_narrow = np.concatenate([rounding.f32_to_f16(part) for part in near.reshape(128, -1)])
        assert np.array_equal(rounding.f16_to_f32(bits), few_wide, equal_nan=True)
        assert np.array_equal(rounding.f32_to_f16(near), few_narrow)
