"""Instructions that touch registers alone, beside test_every_form.py: immediate operands, many numbers, refusals."""

import numpy as np
import pytest
from meanings import permuted
from ptx_text import apply

from ptx_check import Unsupported, rounding


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x3340, 0x7701, 0x9ABC, 0x0123])
def test_bytes_are_permuted_as_an_immediate_says(selector):
    a, b = np.random.default_rng(8).integers(1 << 32, size=(2, 64)).astype("u4")
    actual = apply("prmt.b32", "b32", ("b32", a), ("b32", b), f"{selector:#x}U")
    assert actual.tolist() == [permuted(x, y, selector) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_an_immediate_float32_is_its_bits():
    x = np.array([1.5, -2.0], "f4")
    assert apply("fma.rn.f32", "b32", ("b32", x), "0f40000000", "0f3F800000").view("f4").tolist() == [4.0, -3.0]


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
