"""Instructions that touch registers alone, beside test_every_form.py: counts beyond the width, immediate operands, long
arrays, and what is refused."""

import random

import numpy as np
import pytest
from meanings import permuted, signed
from ptx_text import apply

from ptx_check import Unsupported, rounding

EDGES = [0, 1, 2, 3, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x12345678, 0x7FFFFFFF, 0x80000000,
         0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF0]  # fmt: skip


def integers(bits, count, seed):
    draw = random.Random(seed)
    actual = [e & ((1 << bits) - 1) for e in EDGES] + [draw.getrandbits(bits) for _ in range(count)]
    draw.shuffle(actual)
    return actual


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


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x3340, 0x7701, 0x9ABC, 0x0123])
def test_bytes_are_permuted_as_an_immediate_says(selector):
    a, b = integers(32, 60, 8), integers(32, 60, 9)
    actual = apply("prmt.b32", "b32", ("b32", np.array(a, "u4")), ("b32", np.array(b, "u4")), f"{selector:#x}U")
    assert actual.tolist() == [permuted(x, y, selector) for x, y in zip(a, b)]


def test_an_immediate_float32_is_its_bits():
    x = np.array([1.5, -2.0], "f4")
    assert apply("fma.rn.f32", "b32", ("b32", x), "0f40000000", "0f3F800000").view("f4").tolist() == [4.0, -3.0]


def test_an_instruction_of_two_types_that_is_not_known_is_refused():
    with pytest.raises(Unsupported, match=r"mul\.rn\.f32\.f16"):
        apply("mul.rn.f32.f16", "b32", ("b16", np.ones(32, "u2")), ("b32", np.ones(32, "u4")))


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
