"""Every accepted opcode and mode on edges and random numbers, against the table of meanings.py."""

import itertools
import math
import random
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from meanings import FORMATS, TYPES, encoded, expected, rounded, width
from ptx_text import Ran, execute

from ptx_check.forms import accepted

COUNT = 128
"""Tries of each opcode."""
TOGETHER = 48
"""Opcodes of one kernel."""
TABLES = {f"lop3.b32 {table:#x}": table for table in (0x00, 0x1B, 0x80, 0x96, 0xCA, 0xFE)}
COUNTS = [0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 255, 256, 65535, 65536, 65537, 1 << 31, (1 << 32) - 1]


def operands(opcode: str) -> tuple[list[str], str]:
    """Types of what an opcode reads, and of what it gives."""
    base, *words = opcode.split()[0].split(".")
    types = [word for word in words if word in TYPES]
    last = types[-1]
    if base in ("setp", "set"):
        return [
            last,
            last,
            *(["pred"] if {"and", "or", "xor"} & set(words) else []),
        ], "pred" if base == "setp" else "b32"
    if base == "cvt":
        return [types[1]] * (2 if types[0].endswith("x2") and types[1] == "f32" else 1), types[0]
    if base == "testp":
        return [last], "pred"
    if base == "dp4a":
        return ["b32", "b32", "b32"], "b32"
    if len(types) == 2:
        return [last] * (2 if base == "fma" else 1) + ["f32"], "f32"
    if "wide" in words:
        twice = f"b{2 * width(last)}"
        return [last, last, *([twice] if base == "mad" else [])], twice
    more = {"shl": ["count"], "shr": ["count"], "shf": [last, "count"], "bfe": ["count"] * 2, "prmt": [last] * 2,
            "bfi": [last, "count", "count"], "selp": [last, "pred"], "lop3": [last] * 2, "fma": [last] * 2,
            "mad": [last] * 2, "sad": [last] * 2}  # fmt: skip
    one = {"neg", "abs", "not", "mov", "popc", "clz", "brev", "bfind", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2",
           "ex2", "tanh"}  # fmt: skip
    rest = more.get(base, [] if base in one else [last])
    return [last, *rest], "b32" if base in ("popc", "clz", "bfind") else last


def kind(word: str) -> str:
    """The register that holds a type."""
    return "pred" if word == "pred" else "b32" if word == "count" else f"b{max(16, width(word))}"


def real_bits(word: str, draw: random.Random) -> int:
    """Bits of one floating-point number: edges, neighbours of powers of two, ties of narrower formats, anything."""
    count, mantissa = {"f64": (64, 52), "f32": (32, 23), "tf32": (32, 23), "bf16": (16, 7), "f16": (16, 10)}[word]
    sign = draw.getrandbits(1) << (count - 1)
    top = (1 << (count - 1 - mantissa)) - 1
    choice = draw.randrange(10)
    if choice == 0:
        infinite, one = top << mantissa, 1 << mantissa
        return sign | draw.choice([0, 1, 2, one - 1, one, one + 1, infinite, infinite - 1, infinite | 1,
                                   infinite | one >> 1, top // 2 << mantissa])  # fmt: skip
    if choice == 1:
        return sign | draw.getrandbits(mantissa)  # subnormal
    if choice == 2:
        return draw.getrandbits(count)
    exponent = max(0, min(top - 1, top // 2 + draw.choice([0, 0, 0, 1, -1, 2, -3, 5, -8, 12, 24, 31, 33, 53, 63, -24])))
    bits = draw.getrandbits(mantissa)
    if choice > 6:  # few digits, or a tie of fewer
        cut = draw.randrange(mantissa)
        bits = bits >> cut << cut
    return sign | exponent << mantissa | bits


def whole_bits(count: int, draw: random.Random) -> int:
    edges = [0, 1, 2, (1 << (count - 1)) - 1, 1 << (count - 1), (1 << count) - 1, (1 << count) - 2, 1 << (count // 2)]
    choice = draw.randrange(4)
    if choice == 0:
        return draw.choice(edges)
    return draw.getrandbits(draw.randint(1, count)) if choice == 1 else draw.getrandbits(count)


def number(word: str, draw: random.Random) -> int:
    if word == "count":
        return draw.choice(COUNTS)
    if word == "pred":
        return draw.getrandbits(1)
    if word in ("e4m3x2", "e5m2x2", "u16x2", "s16x2"):
        return whole_bits(width(word), draw)
    if word.endswith("x2"):
        half = word.removesuffix("x2")
        return real_bits(half, draw) | real_bits(half, draw) << width(half)
    if word in ("f64", "f32", "tf32", "f16", "bf16"):
        return real_bits(word, draw)
    return whole_bits(max(16, width(word)), draw)


def special_pairs(word: str) -> list[tuple[int, int]]:
    """Zeros of either sign, infinities and NaN beside each other."""
    numbers = [encoded(x, word) for x in (0.0, -0.0, 1.0, math.inf, -math.inf, math.nan)]
    return list(itertools.product(numbers, numbers))


def near_a_tie(word: str, draw: random.Random) -> list[int]:
    """A product beside half of the last digit of what is added: rounding twice goes wrong."""
    digits = FORMATS[word][0]
    a = rounded(Fraction(draw.uniform(1, 2)), word)
    b = rounded(1 / Fraction(a), word) * draw.choice([-1, 1])
    c = 2.0 * draw.randrange(1 << (digits - 1), 1 << digits) * draw.choice([-1, 1])
    return [encoded(x, word) for x in (a, b, c)]


def columns(words: tuple[str, ...]) -> list[list[int]]:
    """Operands of every try; sometimes two are alike, or opposite."""
    draw = random.Random(str(words))
    rows: list[list[int]] = []
    if len(words) > 1 and words[0] in FORMATS and words[1] == words[0]:
        rows += [[*pair, *(number(word, draw) for word in words[2:])] for pair in special_pairs(words[0])]
    for _ in range(COUNT - len(rows)):
        row = [number(word, draw) for word in words]
        if words == (words[0],) * 3 and words[0] in FORMATS and draw.random() < 0.25:
            row = near_a_tie(words[0], draw)
        for position in range(1, len(words)):
            if words[position] == words[0] and words[0] != "pred" and draw.random() < 0.2:
                row[position] = row[0] ^ (draw.getrandbits(1) << (width(words[0]) - 1) if words[0] != "count" else 0)
        rows.append(row)
    return [list(column) for column in zip(*rows, strict=True)]


def executed_together(opcodes: list[str], words: tuple[str, ...], result: str, fresh=()) -> Ran:
    """Runs opcodes with the same operands; fresh: places of those that nobody wrote."""
    operands = [(kind(word), np.array(column, f"u{max(2, width(kind(word)) // 8)}"))
                for word, column in zip(words, columns(words), strict=True)]  # fmt: skip
    return execute(opcodes, kind(result), operands, fresh)


def wrong(opcode: str, bits: list[int], actual: int) -> bool:
    code, _, table = opcode.partition(" ")
    if code.startswith("setp") and code.endswith("x2"):
        one = code.removesuffix("x2")
        halves = ([b >> s & 0xFFFF for b in bits[:2]] + bits[2:] for s in (0, 16))
        return not all(expected(one, half)(actual >> side & 1) for side, half in enumerate(halves))
    return not expected(code, [*bits, *([int(table, 0)] if table else [])])(actual)


def families() -> dict[str, list[str]]:
    grouped = defaultdict(list)
    for opcode in sorted(accepted()):
        grouped[opcode.split(".")[0]] += list(TABLES) if opcode == "lop3.b32" else [opcode]
    return grouped


@pytest.mark.parametrize("base", families())
def test_every_form_gives_what_an_independent_table_says(base):
    alike = defaultdict(list)
    for opcode in families()[base]:
        words, result = operands(opcode)
        alike[tuple(words), result].append(opcode)
    faults = []
    for (words, result), opcodes in alike.items():
        given = columns(words)
        for first in range(0, len(opcodes), TOGETHER):
            some = opcodes[first : first + TOGETHER]
            ran = executed_together(some, words, result)
            assert not ran.faults, ran.faults
            for opcode, actual in zip(some, ran["out"].reshape(len(some), COUNT), strict=True):
                for bits, value in zip(zip(*given, strict=True), actual.tolist()):
                    if wrong(opcode, list(bits), value):
                        faults.append(f"{opcode} of {', '.join(map(hex, bits))} gave {value:#x}")
                        break
    assert not faults, f"{len(faults)} forms are wrong:\n" + "\n".join(faults[:40])


@pytest.mark.parametrize("base", families())
def test_every_form_keeps_the_marks_of_what_nobody_wrote(base):
    """Whichever operand it is, what is made of it and stored is a fault. Each in a kernel of its own: a fault is told
    once for what was loaded."""
    alike = {(tuple(words), result): opcode for opcode in families()[base] for words, result in [operands(opcode)]}
    for (words, result), opcode in alike.items():
        for position in range(len(words)):
            assert executed_together([opcode], words, result, fresh=(position,)).kinds == {"unwritten"}, opcode
