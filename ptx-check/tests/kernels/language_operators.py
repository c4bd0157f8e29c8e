"""Features of the language that make numbers of numbers: operators, whole numbers of every width, casts, libdevice."""

import torch
import triton.language as tl
from language import BFLOAT, DOUBLE, EXACT, POSITIVE, WHOLE, feature, formula
from torch import Tensor
from triton.language.extra import libdevice

COUNTS = {"dtype": torch.int32, "low": 0, "high": 1000, "tolerance": 0.0}
BYTES = {"dtype": torch.uint8, "low": 0, "high": 0x70, "tolerance": 0.0}
"""Of a float8 all that are finite and not negative."""


# --------------------------------------------------------------------------------------------------------- operators


@feature(
    lambda x, y: (x < y).int() + 2 * (x <= y) + 4 * (x > y) + 8 * (x >= y) + 16 * (x == y) + 32 * (x != y), **WHOLE
)
def _comparisons(x, y):
    less = (x < y).to(tl.int32) + 2 * (x <= y).to(tl.int32)
    more = 4 * (x > y).to(tl.int32) + 8 * (x >= y).to(tl.int32)
    return less + more + 16 * (x == y).to(tl.int32) + 32 * (x != y).to(tl.int32)


formula("logic", "(((x > 0) & (y > 0)) | ((x > y) == False)).to(tl.int32)",
        lambda x, y: (((x > 0) & (y > 0)) | ~(x > y)).int())  # fmt: skip


@feature(lambda x, y: torch.where(x > 3, 99.0, torch.minimum(x, y)))
def _minimum_with_nan(x, y):
    least = tl.minimum(tl.where(x > 3, float("nan"), x), y, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(least == least, least, 99.0)


formula("maximum_without_nan", 'tl.maximum(tl.where(x > 3, float("nan"), x), y)',
        lambda x, y: torch.where(x > 3, y, torch.maximum(x, y)))  # fmt: skip


@feature(lambda x, y: torch.where(x > 3, 99.0, x.clamp(-1, 1)))
def _clamp_with_nan(x, y):
    kept = tl.clamp(tl.where(x > 3, float("nan"), x), -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(kept == kept, kept, 99.0)


formula("abs_of_bfloat16", "tl.abs(x) + tl.abs(y)", lambda x, y: x.abs() + y.abs(), **BFLOAT)
formula("fma_of_half", "tl.fma(x, y, 1.0)", lambda x, y: x * y + 1, dtype=torch.float16, tolerance=1e-3)


# ----------------------------------------------------------------------------------------------------- whole numbers


formula("remainder_of_negatives", "x % 7", lambda x, y: torch.fmod(x, 7), **WHOLE)
formula("division_of_negatives", "x // 7", lambda x, y: torch.div(x, 7, rounding_mode="trunc"), **WHOLE)
formula("inversion", "~x ^ y", lambda x, y: ~x ^ y, **WHOLE)
formula("shifts_by_a_tile", "(x << (y & 7)) + (x >> (y & 3))", lambda x, y: (x << (y & 7)) + (x >> (y & 3)), **WHOLE)
formula("logical_shift", "(x.to(tl.uint32, bitcast=True) >> 5).to(tl.int64)",
        lambda x, y: (x.long() & 0xFFFFFFFF) >> 5, **WHOLE)  # fmt: skip
formula("uint8", "x + y * 3", lambda x, y: x + y * 3, dtype=torch.uint8, low=0, high=255, **EXACT)
formula("uint16", "((x * 60).to(tl.uint16) * y.to(tl.uint16)).to(tl.int32)",
        lambda x, y: (x * 60 * y & 0xFFFF).int(), **COUNTS)  # fmt: skip
formula("uint32_division", "(x.to(tl.uint32, bitcast=True) // 3).to(tl.int64)",
        lambda x, y: (x.long() & 0xFFFFFFFF) // 3, **WHOLE)  # fmt: skip
formula("uint32_comparison", "(x.to(tl.uint32, bitcast=True) > y.to(tl.uint32, bitcast=True)).to(tl.int32)",
        lambda x, y: ((x.long() & 0xFFFFFFFF) > (y.long() & 0xFFFFFFFF)).int(), **WHOLE)  # fmt: skip
formula("uint64_remainder", "(x.to(tl.int64).to(tl.uint64, bitcast=True) % 1000).to(tl.int64)",
        lambda x, y: torch.tensor([v % 2**64 % 1000 for v in x.flatten().tolist()]), **WHOLE)  # fmt: skip
formula("int64", "tl.minimum(x, y) * 3 + tl.abs(tl.maximum(x, y))",
        lambda x, y: torch.minimum(x, y) * 3 + torch.maximum(x, y).abs(),
        dtype=torch.int64, low=-(2**40), high=2**40, **EXACT)  # fmt: skip
formula("umulhi_of_64_bits", "tl.umulhi(x.to(tl.int64) << 40, y.to(tl.int64) << 30)",
        lambda x, y: x.long() * y.long() * 64, **COUNTS)  # fmt: skip


def _of_bits(function) -> dict:
    """What a function gives of the 32 bits of x, as int32."""

    def wanted(x: Tensor, y: Tensor) -> Tensor:
        made = torch.tensor([function(v & 0xFFFFFFFF) for v in x.flatten().tolist()])
        return ((made + (1 << 31)) % (1 << 32) - (1 << 31)).int()

    return {"wanted": wanted, **WHOLE}


formula("clz", "libdevice.clz(x)", **_of_bits(lambda v: 32 - v.bit_length()))
formula("ffs", "libdevice.ffs(x)", **_of_bits(lambda v: (v & -v).bit_length()))
formula("brev", "libdevice.brev(x)", **_of_bits(lambda v: int(f"{v:032b}"[::-1], 2)))
formula("byte_perm", "libdevice.byte_perm(x, y, 0x0123)",
        **_of_bits(lambda v: int.from_bytes(v.to_bytes(4, "little"), "big")))  # fmt: skip
formula("mulhi", "libdevice.mulhi(x << 22, y << 20)",
        lambda x, y: ((x.long() << 22) * (y.long() << 20) >> 32).int(), **COUNTS | {"high": 500})  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- casts


formula("to_bfloat16", "x.to(tl.bfloat16).to(tl.float32)", lambda x, y: x.bfloat16().float(), **EXACT)
formula("to_bfloat16_towards_zero", 'tl.cast(x, tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32)',
        lambda x, y: (x.view(torch.int32) & -65536).view(torch.float32), **EXACT)  # fmt: skip


def _half_towards_zero(x: Tensor) -> Tensor:
    nearest = x.half()
    below = (nearest.view(torch.int16) - 1).view(torch.float16)
    return torch.where(nearest.float().abs() > x.abs(), below, nearest)


formula("to_half_towards_zero", 'tl.cast(x, tl.float16, fp_downcast_rounding="rtz").to(tl.float32)',
        lambda x, y: _half_towards_zero(x).float(), **EXACT)  # fmt: skip
formula("float64_to_half", "x.to(tl.float16).to(tl.float32)",
        lambda x, y: x.half().float(), **EXACT | {"dtype": torch.float64})  # fmt: skip
formula("half_to_bfloat16", "x.to(tl.bfloat16).to(tl.float32)",
        lambda x, y: x.bfloat16().float(), dtype=torch.float16, **EXACT)  # fmt: skip
formula("to_int32", "(x * 1000).to(tl.int32)", lambda x, y: (x * 1000).int(), **EXACT)
formula("to_int64", "(x * 1099511627776.0).to(tl.int64)", lambda x, y: (x * 2.0**40).long(), **EXACT)
formula("int64_to_float32", "(x.to(tl.int64) * 1234567890123).to(tl.float32)",
        lambda x, y: (x.long() * 1234567890123).float(), **WHOLE)  # fmt: skip
formula("uint32_to_float32", "x.to(tl.uint32, bitcast=True).to(tl.float32)",
        lambda x, y: (x.long() & 0xFFFFFFFF).float(), **WHOLE)  # fmt: skip
formula("int8_to_half", "x.to(tl.float16)", lambda x, y: x.half(), dtype=torch.int8, low=-128, high=128, **EXACT)
formula("int8_to_bfloat16", "x.to(tl.bfloat16)",
        lambda x, y: x.bfloat16(), dtype=torch.int8, low=-128, high=128, **EXACT)  # fmt: skip
formula("int32_to_int8", "x.to(tl.int8)",
        lambda x, y: x.to(torch.int8), dtype=torch.int32, low=-1000, high=1000, **EXACT)  # fmt: skip
formula("to_bool", "x.to(tl.int1).to(tl.int32)",
        lambda x, y: (x != 0).int(), dtype=torch.int32, low=-1, high=2, **EXACT)  # fmt: skip
formula("bool_to_float", "(x > y).to(tl.float32) * 3", lambda x, y: (x > y).float() * 3)
formula("bits_of_half", "x.to(tl.int16, bitcast=True)", lambda x, y: x.view(torch.int16), dtype=torch.float16, **EXACT)
formula("float_of_bits", "(x + 0x3F800000).to(tl.float32, bitcast=True)",
        lambda x, y: (x + 0x3F800000).view(torch.float32), **COUNTS)  # fmt: skip
formula("bits_of_fp8_e5m2", "x.to(tl.float8e5, bitcast=True).to(tl.float32)",
        lambda x, y: x.view(torch.float8_e5m2).float(), **BYTES)  # fmt: skip
formula("bits_of_fp8_e4m3", "x.to(tl.float8e4nv, bitcast=True).to(tl.float32)",
        lambda x, y: x.view(torch.float8_e4m3fn).float(), since=89, **BYTES)  # fmt: skip
formula("fp8_e4b15", "(x.to(tl.float16) * 0.125).to(tl.float8e4b15).to(tl.float16)",
        lambda x, y: x.half() / 8, dtype=torch.int8, low=-14, high=15, **EXACT)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- libdevice


formula("asin_acos", "libdevice.asin(x) + libdevice.acos(y)",
        lambda x, y: torch.asin(x) + torch.acos(y), low=-1, high=1)  # fmt: skip
formula("sinh_cosh", "libdevice.sinh(x) + libdevice.cosh(y)", lambda x, y: torch.sinh(x) + torch.cosh(y))
formula("asinh_acosh", "libdevice.asinh(x) + libdevice.acosh(y + 1)",
        lambda x, y: torch.asinh(x) + torch.acosh(y + 1), **POSITIVE)  # fmt: skip
formula("exp10_log10", "libdevice.exp10(x) + libdevice.log10(y)", lambda x, y: 10**x + torch.log10(y), **POSITIVE)


@feature(lambda x, y: torch.signbit(x).int() + 2 * (y > 3).int())
def _signbit_isinf(x, y):
    signs = libdevice.signbit(x).to(tl.int32) != 0
    return signs.to(tl.int32) + 2 * (libdevice.isinf(tl.where(y > 3, float("inf"), y)).to(tl.int32) != 0).to(tl.int32)


formula("ldexp_ilogb", "libdevice.ldexp(x, y.to(tl.int32)) + libdevice.ilogb(x).to(tl.float32)",
        lambda x, y: torch.ldexp(x, y.int()) + torch.frexp(x).exponent - 1, **POSITIVE)  # fmt: skip
formula("round_half_away", "libdevice.round(tl.floor(x * 2) * 0.5)",
        lambda x, y: (x * 2).floor().mul(0.5).sign() * ((x * 2).floor().abs() * 0.5 + 0.5).floor(),
        **EXACT)  # fmt: skip
formula("llrint", "libdevice.llrint(x * 99)", lambda x, y: (x * 99).round().long(), **EXACT)
formula("fast_functions", "libdevice.fast_dividef(libdevice.fast_expf(x), y)",
        lambda x, y: torch.exp(x) / y, tolerance=1e-5, **POSITIVE)  # fmt: skip
formula("rounding_of_quotients", "libdevice.saturatef(tl.minimum(libdevice.div_ru(x, y), libdevice.div_rz(x, y)))",
        lambda x, y: (x.double() / y.double()).float().clamp(0, 1), tolerance=1e-6, **POSITIVE)  # fmt: skip
formula("log1p_of_float64", "libdevice.log1p(x) + libdevice.sqrt_rn(y)",
        lambda x, y: torch.log1p(x) + torch.sqrt(y), **DOUBLE, **POSITIVE)  # fmt: skip
formula("tan", "libdevice.tan(x)", lambda x, y: torch.tan(x), low=-1.5, high=1.5)
formula("atan", "libdevice.atan(x)", lambda x, y: torch.atan(x))
formula("atanh", "libdevice.atanh(x)", lambda x, y: torch.atanh(x), low=-0.9, high=0.9)
formula("cbrt", "libdevice.cbrt(x)", lambda x, y: x.sign() * x.abs().double().pow(1 / 3).float())
formula("erfc", "libdevice.erfc(x)", lambda x, y: torch.erfc(x))
formula("erfinv", "libdevice.erfinv(x)", lambda x, y: torch.erfinv(x), low=-0.9, high=0.9)
formula("lgamma", "libdevice.lgamma(x)", lambda x, y: torch.lgamma(x), **POSITIVE)
formula("tgamma", "libdevice.tgamma(x)", lambda x, y: torch.lgamma(x.double()).exp().float(), **POSITIVE)
formula("fdiv_of_float64", "tl.fdiv(x, y)", lambda x, y: x / y, **DOUBLE, **POSITIVE)
formula("hypot", "libdevice.hypot(x, y)", torch.hypot)
formula("copysign", "libdevice.copysign(x, y)", torch.copysign, **EXACT)
formula("fmod", "libdevice.fmod(x, y)", torch.fmod, **POSITIVE)
formula("ieee_remainder", "libdevice.remainder(x, y)",
        lambda x, y: (x.double() - y * torch.round(x.double() / y)).float(), **POSITIVE)  # fmt: skip
formula("nextafter", "libdevice.nextafter(x, y)", torch.nextafter, **EXACT)
