"""Features of the language that make numbers of numbers."""

import torch
import triton.language as tl
from language import BFLOAT, DOUBLE, EXACT, POSITIVE, WHOLE, feature, named
from triton.language.extra import libdevice


@feature(lambda x, y: torch.sin(1e6 * x), tolerance=1e-4)
def _sin_of_large_numbers(x, y):
    return tl.sin(1e6 * x)


@feature(lambda x, y: torch.sin(x) + torch.cos(1e7 * y), **DOUBLE)
def _sin_of_float64(x, y):
    return tl.sin(x) + tl.cos(1e7 * y)


@feature(lambda x, y: torch.softmax(x, 0))
def _softmax(x, y):
    return tl.softmax(x, 0)


@feature(lambda x, y: x / y, **POSITIVE)
def _divide(x, y):
    return x / y


@feature(lambda x, y: x * y + x)
def _fma(x, y):
    return tl.fma(x, y, x)


@feature(lambda x, y: x.clamp(-1, 1))
def _clamp(x, y):
    return tl.clamp(x, -1.0, 1.0)


@feature(lambda x, y: torch.maximum(x, y))
def _maximum_with_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@feature(lambda x, y: torch.where(x > y, x, 2 * y))
def _where(x, y):
    return tl.where(x > y, x, 2 * y)


@feature(lambda x, y: torch.fmod(x, y), **POSITIVE)
def _remainder(x, y):
    return x % y


@feature(lambda x, y: torch.isnan(x / 0).int(), low=0, high=1, dtype=torch.float32)
def _isnan(x, y):
    return libdevice.isnan(x / 0.0).to(tl.int32)


@feature(lambda x, y: torch.exp(x) * torch.exp2(y), **DOUBLE)
def _exp_of_float64(x, y):
    return tl.exp(x) * tl.exp2(y)


@feature(lambda x, y: torch.sqrt(x * x + y) / y, **DOUBLE, **POSITIVE)
def _float64(x, y):
    return tl.sqrt(x * x + y) / y


@feature(lambda x, y: torch.log(x) + torch.floor(y), **DOUBLE, **POSITIVE)
def _log_of_float64(x, y):
    return tl.log(x) + tl.floor(y)


@feature(lambda x, y: x.float().double() + y.int(), **DOUBLE)
def _conversions_of_float64(x, y):
    return x.to(tl.float32).to(tl.float64) + y.to(tl.int32)


@feature(lambda x, y: (x * y + x.clamp(-1, 1)).float().exp2(), dtype=torch.float16, low=-2, high=2, tolerance=1e-2)
def _half(x, y):
    return tl.exp2((x * y + tl.clamp(x, -1.0, 1.0)).to(tl.float32))


@feature(lambda x, y: torch.maximum(x * y, x).float(), **BFLOAT)
def _bfloat16(x, y):
    return tl.maximum(x * y, x).to(tl.float32)


@feature(lambda x, y: x.to(torch.float8_e4m3fn).float(), since=89, **EXACT)
def _to_fp8_e4m3(x, y):
    return x.to(tl.float8e4nv).to(tl.float32)


@feature(lambda x, y: x.to(torch.float8_e5m2).float(), **EXACT)
def _to_fp8_e5m2(x, y):
    return x.to(tl.float8e5).to(tl.float32)


@feature(lambda x, y: x.to(torch.float8_e5m2).float(), dtype=torch.float16, since=89, **EXACT)
def _half_to_fp8_e5m2(x, y):
    return x.to(tl.float8e5).to(tl.float32)


@feature(lambda x, y: x.to(torch.float8_e4m3fn).float(), dtype=torch.bfloat16, since=89, **EXACT)
def _bfloat16_to_fp8_e4m3(x, y):
    return x.to(tl.float8e4nv).to(tl.float32)


@feature(lambda x, y: x.view(torch.int32) ^ y.view(torch.int32), **EXACT)
def _bitcast(x, y):
    return x.to(tl.int32, bitcast=True) ^ y.to(tl.int32, bitcast=True)


@feature(lambda x, y: x // y, dtype=torch.int32, low=1, high=1000, **EXACT)
def _whole_division(x, y):
    return x // y


@feature(lambda x, y: x.long() * 2**33 // y.long(), dtype=torch.int32, low=1, high=1000, **EXACT)
def _whole_division_of_64_bits(x, y):
    return (x.to(tl.int64) << 33) // y.to(tl.int64)


@feature(lambda x, y: (x >> 2) | (y << 3) & ~x, **WHOLE)
def _bits(x, y):
    return (x >> 2) | (y << 3) & ~x


@feature(lambda x, y: (x.long() * 2**24 * (y.long() * 2**20) >> 32).int(), dtype=torch.int32, low=1, high=100, **EXACT)
def _umulhi(x, y):
    return tl.umulhi((x << 24).to(tl.uint32), (y << 20).to(tl.uint32)).to(tl.int32)


@feature(lambda x, y: torch.minimum(x, y) + torch.maximum(x, y) * 3, dtype=torch.int16, low=-99, high=99, **EXACT)
def _int16(x, y):
    return tl.minimum(x, y) + tl.maximum(x, y) * 3


@feature(lambda x, y: torch.minimum(x, y) - x.abs(), dtype=torch.int8, low=-50, high=50, **EXACT)
def _int8(x, y):
    return tl.minimum(x, y) - tl.abs(x)


@feature(lambda x, y: (x.float() * 0.5).round().to(torch.int8), dtype=torch.int8, low=-50, high=50, **EXACT)
def _quantized(x, y):
    return libdevice.rint(x.to(tl.float32) * 0.5).to(tl.int8)


@feature(lambda x, y: x.clamp(0, 200).to(torch.uint8).int(), low=0, high=99, **EXACT)
def _float_to_uint8(x, y):
    return x.to(tl.uint8).to(tl.int32)


def _bit_counts(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([bin(v & 0xFFFFFFFF).count("1") for v in x.flatten().tolist()])


named(
    {
        "sin": ("tl.sin", torch.sin, {}),
        "cos": ("tl.cos", torch.cos, {}),
        "exp": ("tl.exp", torch.exp, {}),
        "exp2": ("tl.exp2", torch.exp2, {}),
        "log": ("tl.log", torch.log, POSITIVE),
        "log2": ("tl.log2", torch.log2, POSITIVE),
        "sqrt": ("tl.sqrt", torch.sqrt, POSITIVE),
        "sqrt_rn": ("tl.sqrt_rn", torch.sqrt, POSITIVE),
        "rsqrt": ("tl.rsqrt", torch.rsqrt, POSITIVE),
        "erf": ("tl.erf", torch.erf, {}),
        "sigmoid": ("tl.sigmoid", torch.sigmoid, {}),
        "floor": ("tl.floor", torch.floor, {}),
        "ceil": ("tl.ceil", torch.ceil, {}),
        "abs": ("tl.abs", lambda x: x.abs(), {}),
        "tanh": ("libdevice.tanh", torch.tanh, {}),
        "round": ("libdevice.rint", torch.round, {}),
        "trunc": ("libdevice.trunc", torch.trunc, {}),
        "log1p": ("libdevice.log1p", torch.log1p, POSITIVE),
        "expm1": ("libdevice.expm1", torch.expm1, {}),
        "popc": ("libdevice.popc", _bit_counts, WHOLE),
    },
    operands=1,
)
named(
    {
        "div_rn": ("tl.div_rn", lambda x, y: x / y, POSITIVE),
        "fdiv": ("tl.fdiv", lambda x, y: x / y, POSITIVE),
        "pow": ("libdevice.pow", torch.pow, {**POSITIVE, "tolerance": 1e-4}),
        "atan2": ("libdevice.atan2", torch.atan2, {}),
    },
    operands=2,
)
