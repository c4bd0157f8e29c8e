"""Features of the language that make numbers of numbers: operators, whole numbers of every width, casts, libdevice."""

import torch
import triton.language as tl
from language import BFLOAT, DOUBLE, EXACT, POSITIVE, WHOLE, feature, named
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


@feature(lambda x, y: (((x > 0) & (y > 0)) | ~(x > y)).int())
def _logic(x, y):
    return (((x > 0) & (y > 0)) | ((x > y) == False)).to(tl.int32)  # noqa: E712


@feature(lambda x, y: torch.where(x > 3, 99.0, torch.minimum(x, y)))
def _minimum_with_nan(x, y):
    least = tl.minimum(tl.where(x > 3, float("nan"), x), y, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(least == least, least, 99.0)


@feature(lambda x, y: torch.where(x > 3, y, torch.maximum(x, y)))
def _maximum_without_nan(x, y):
    return tl.maximum(tl.where(x > 3, float("nan"), x), y)


@feature(lambda x, y: torch.where(x > 3, 99.0, x.clamp(-1, 1)))
def _clamp_with_nan(x, y):
    kept = tl.clamp(tl.where(x > 3, float("nan"), x), -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(kept == kept, kept, 99.0)


@feature(lambda x, y: x.abs() + y.abs(), **BFLOAT)
def _abs_of_bfloat16(x, y):
    return tl.abs(x) + tl.abs(y)


@feature(lambda x, y: x * y + 1, dtype=torch.float16, tolerance=1e-3)
def _fma_of_half(x, y):
    return tl.fma(x, y, 1.0)


# ----------------------------------------------------------------------------------------------------- whole numbers


@feature(lambda x, y: torch.fmod(x, 7), **WHOLE)
def _remainder_of_negatives(x, y):
    return x % 7


@feature(lambda x, y: torch.div(x, 7, rounding_mode="trunc"), **WHOLE)
def _division_of_negatives(x, y):
    return x // 7


@feature(lambda x, y: ~x ^ y, **WHOLE)
def _inversion(x, y):
    return ~x ^ y


@feature(lambda x, y: (x << (y & 7)) + (x >> (y & 3)), **WHOLE)
def _shifts_by_a_tile(x, y):
    return (x << (y & 7)) + (x >> (y & 3))


@feature(lambda x, y: (x.long() & 0xFFFFFFFF) >> 5, **WHOLE)
def _logical_shift(x, y):
    return (x.to(tl.uint32, bitcast=True) >> 5).to(tl.int64)


@feature(lambda x, y: x + y * 3, dtype=torch.uint8, low=0, high=255, **EXACT)
def _uint8(x, y):
    return x + y * 3


@feature(lambda x, y: (x * 60 * y & 0xFFFF).int(), **COUNTS)
def _uint16(x, y):
    return ((x * 60).to(tl.uint16) * y.to(tl.uint16)).to(tl.int32)


@feature(lambda x, y: (x.long() & 0xFFFFFFFF) // 3, **WHOLE)
def _uint32_division(x, y):
    return (x.to(tl.uint32, bitcast=True) // 3).to(tl.int64)


@feature(lambda x, y: ((x.long() & 0xFFFFFFFF) > (y.long() & 0xFFFFFFFF)).int(), **WHOLE)
def _uint32_comparison(x, y):
    return (x.to(tl.uint32, bitcast=True) > y.to(tl.uint32, bitcast=True)).to(tl.int32)


@feature(lambda x, y: torch.tensor([v % 2**64 % 1000 for v in x.flatten().tolist()]), **WHOLE)
def _uint64_remainder(x, y):
    return (x.to(tl.int64).to(tl.uint64, bitcast=True) % 1000).to(tl.int64)


@feature(lambda x, y: torch.minimum(x, y) * 3 + torch.maximum(x, y).abs(), dtype=torch.int64,
         low=-(2**40), high=2**40, **EXACT)  # fmt: skip
def _int64(x, y):
    return tl.minimum(x, y) * 3 + tl.abs(tl.maximum(x, y))


@feature(lambda x, y: x.long() * y.long() * 64, **COUNTS)
def _umulhi_of_64_bits(x, y):
    return tl.umulhi(x.to(tl.int64) << 40, y.to(tl.int64) << 30)


def _of_bits(function) -> dict:
    """What a function gives of the 32 bits of x, as int32."""

    def wanted(x: Tensor, y: Tensor) -> Tensor:
        made = torch.tensor([function(v & 0xFFFFFFFF) for v in x.flatten().tolist()])
        return ((made + (1 << 31)) % (1 << 32) - (1 << 31)).int()

    return {"wanted": wanted, **WHOLE}


@feature(**_of_bits(lambda v: 32 - v.bit_length()))
def _clz(x, y):
    return libdevice.clz(x)


@feature(**_of_bits(lambda v: (v & -v).bit_length()))
def _ffs(x, y):
    return libdevice.ffs(x)


@feature(**_of_bits(lambda v: int(f"{v:032b}"[::-1], 2)))
def _brev(x, y):
    return libdevice.brev(x)


@feature(**_of_bits(lambda v: int.from_bytes(v.to_bytes(4, "little"), "big")))
def _byte_perm(x, y):
    return libdevice.byte_perm(x, y, 0x0123)


@feature(lambda x, y: ((x.long() << 22) * (y.long() << 20) >> 32).int(), **COUNTS | {"high": 500})
def _mulhi(x, y):
    return libdevice.mulhi(x << 22, y << 20)


# ------------------------------------------------------------------------------------------------------------- casts


@feature(lambda x, y: x.bfloat16().float(), **EXACT)
def _to_bfloat16(x, y):
    return x.to(tl.bfloat16).to(tl.float32)


@feature(lambda x, y: (x.view(torch.int32) & -65536).view(torch.float32), **EXACT)
def _to_bfloat16_towards_zero(x, y):
    return tl.cast(x, tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32)


def _half_towards_zero(x: Tensor) -> Tensor:
    nearest = x.half()
    below = (nearest.view(torch.int16) - 1).view(torch.float16)
    return torch.where(nearest.float().abs() > x.abs(), below, nearest)


@feature(lambda x, y: _half_towards_zero(x).float(), **EXACT)
def _to_half_towards_zero(x, y):
    return tl.cast(x, tl.float16, fp_downcast_rounding="rtz").to(tl.float32)


@feature(lambda x, y: x.half().float(), **EXACT | {"dtype": torch.float64})
def _float64_to_half(x, y):
    return x.to(tl.float16).to(tl.float32)


@feature(lambda x, y: x.bfloat16().float(), dtype=torch.float16, **EXACT)
def _half_to_bfloat16(x, y):
    return x.to(tl.bfloat16).to(tl.float32)


@feature(lambda x, y: (x * 1000).int(), **EXACT)
def _to_int32(x, y):
    return (x * 1000).to(tl.int32)


@feature(lambda x, y: (x * 2.0**40).long(), **EXACT)
def _to_int64(x, y):
    return (x * 1099511627776.0).to(tl.int64)


@feature(lambda x, y: (x.long() * 1234567890123).float(), **WHOLE)
def _int64_to_float32(x, y):
    return (x.to(tl.int64) * 1234567890123).to(tl.float32)


@feature(lambda x, y: (x.long() & 0xFFFFFFFF).float(), **WHOLE)
def _uint32_to_float32(x, y):
    return x.to(tl.uint32, bitcast=True).to(tl.float32)


@feature(lambda x, y: x.half(), dtype=torch.int8, low=-128, high=128, **EXACT)
def _int8_to_half(x, y):
    return x.to(tl.float16)


@feature(lambda x, y: x.bfloat16(), dtype=torch.int8, low=-128, high=128, **EXACT)
def _int8_to_bfloat16(x, y):
    return x.to(tl.bfloat16)


@feature(lambda x, y: x.to(torch.int8), dtype=torch.int32, low=-1000, high=1000, **EXACT)
def _int32_to_int8(x, y):
    return x.to(tl.int8)


@feature(lambda x, y: (x != 0).int(), dtype=torch.int32, low=-1, high=2, **EXACT)
def _to_bool(x, y):
    return x.to(tl.int1).to(tl.int32)


@feature(lambda x, y: (x > y).float() * 3)
def _bool_to_float(x, y):
    return (x > y).to(tl.float32) * 3


@feature(lambda x, y: x.view(torch.int16), dtype=torch.float16, **EXACT)
def _bits_of_half(x, y):
    return x.to(tl.int16, bitcast=True)


@feature(lambda x, y: (x + 0x3F800000).view(torch.float32), **COUNTS)
def _float_of_bits(x, y):
    return (x + 0x3F800000).to(tl.float32, bitcast=True)


@feature(lambda x, y: x.view(torch.float8_e5m2).float(), **BYTES)
def _bits_of_fp8_e5m2(x, y):
    return x.to(tl.float8e5, bitcast=True).to(tl.float32)


@feature(lambda x, y: x.view(torch.float8_e4m3fn).float(), since=89, **BYTES)
def _bits_of_fp8_e4m3(x, y):
    return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@feature(lambda x, y: x.half() / 8, dtype=torch.int8, low=-14, high=15, **EXACT)
def _fp8_e4b15(x, y):
    return (x.to(tl.float16) * 0.125).to(tl.float8e4b15).to(tl.float16)


# --------------------------------------------------------------------------------------------------------- libdevice


@feature(lambda x, y: torch.asin(x) + torch.acos(y), low=-1, high=1)
def _asin_acos(x, y):
    return libdevice.asin(x) + libdevice.acos(y)


@feature(lambda x, y: torch.sinh(x) + torch.cosh(y))
def _sinh_cosh(x, y):
    return libdevice.sinh(x) + libdevice.cosh(y)


@feature(lambda x, y: torch.asinh(x) + torch.acosh(y + 1), **POSITIVE)
def _asinh_acosh(x, y):
    return libdevice.asinh(x) + libdevice.acosh(y + 1)


@feature(lambda x, y: 10**x + torch.log10(y), **POSITIVE)
def _exp10_log10(x, y):
    return libdevice.exp10(x) + libdevice.log10(y)


@feature(lambda x, y: torch.signbit(x).int() + 2 * (y > 3).int())
def _signbit_isinf(x, y):
    signs = libdevice.signbit(x).to(tl.int32) != 0
    return signs.to(tl.int32) + 2 * (libdevice.isinf(tl.where(y > 3, float("inf"), y)).to(tl.int32) != 0).to(tl.int32)


@feature(lambda x, y: torch.ldexp(x, y.int()) + torch.frexp(x).exponent - 1, **POSITIVE)
def _ldexp_ilogb(x, y):
    return libdevice.ldexp(x, y.to(tl.int32)) + libdevice.ilogb(x).to(tl.float32)


@feature(lambda x, y: (x * 2).floor().mul(0.5).sign() * ((x * 2).floor().abs() * 0.5 + 0.5).floor(), **EXACT)
def _round_half_away(x, y):
    return libdevice.round(tl.floor(x * 2) * 0.5)


@feature(lambda x, y: (x * 99).round().long(), **EXACT)
def _llrint(x, y):
    return libdevice.llrint(x * 99)


@feature(lambda x, y: torch.exp(x) / y, tolerance=1e-5, **POSITIVE)
def _fast_functions(x, y):
    return libdevice.fast_dividef(libdevice.fast_expf(x), y)


@feature(lambda x, y: (x.double() / y.double()).float().clamp(0, 1), tolerance=1e-6, **POSITIVE)
def _rounding_of_quotients(x, y):
    return libdevice.saturatef(tl.minimum(libdevice.div_ru(x, y), libdevice.div_rz(x, y)))


@feature(lambda x, y: torch.log1p(x) + torch.sqrt(y), **DOUBLE, **POSITIVE)
def _log1p_of_float64(x, y):
    return libdevice.log1p(x) + libdevice.sqrt_rn(y)


named(
    {
        "tan": ("libdevice.tan", torch.tan, {"low": -1.5, "high": 1.5}),
        "atan": ("libdevice.atan", torch.atan, {}),
        "atanh": ("libdevice.atanh", torch.atanh, {"low": -0.9, "high": 0.9}),
        "cbrt": ("libdevice.cbrt", lambda x: x.sign() * x.abs().double().pow(1 / 3).float(), {}),
        "erfc": ("libdevice.erfc", torch.erfc, {}),
        "erfinv": ("libdevice.erfinv", torch.erfinv, {"low": -0.9, "high": 0.9}),
        "lgamma": ("libdevice.lgamma", torch.lgamma, POSITIVE),
        "tgamma": ("libdevice.tgamma", lambda x: torch.lgamma(x.double()).exp().float(), POSITIVE),
    },
    operands=1,
)
named(
    {
        "fdiv_of_float64": ("tl.fdiv", lambda x, y: x / y, {**DOUBLE, **POSITIVE}),
        "hypot": ("libdevice.hypot", torch.hypot, {}),
        "copysign": ("libdevice.copysign", torch.copysign, EXACT),
        "fmod": ("libdevice.fmod", torch.fmod, POSITIVE),
        "ieee_remainder": (
            "libdevice.remainder",
            lambda x, y: (x.double() - y * torch.round(x.double() / y)).float(),
            POSITIVE,
        ),
        "nextafter": ("libdevice.nextafter", torch.nextafter, EXACT),
    },
    operands=2,
)
