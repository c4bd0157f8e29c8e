"""Features of the language that make numbers of numbers: functions, several in a formula, operators, whole numbers of
every width, casts. What single instructions give is held bit by bit by test_every_form.py."""

import torch
from language import BFLOAT, DOUBLE, EXACT, POSITIVE, WHOLE, formula

COUNTS = {"dtype": torch.int32, "low": 0, "high": 1000, "tolerance": 0.0}
BYTES = {"dtype": torch.uint8, "low": 0, "high": 0x70, "tolerance": 0.0}
"""Of a float8 all that are finite and not negative."""
INT8 = {"dtype": torch.int8, "low": -128, "high": 128, "tolerance": 0.0}

# ---------------------------------------------------------------------------------------------------------- functions


formula("circular_functions", "tl.sin(x) + tl.cos(y) + libdevice.tan(x * 0.3) + libdevice.atan(y)",
        lambda x, y: x.sin() + y.cos() + (x * 0.3).tan() + y.atan())  # fmt: skip
formula("inverse_functions", "libdevice.asin(x) + libdevice.acos(y) + libdevice.atanh(x) + libdevice.erfinv(y)",
        lambda x, y: x.asin() + y.acos() + x.atanh() + y.erfinv(), low=-0.9, high=0.9)  # fmt: skip
formula("hyperbolic_functions",
        "libdevice.tanh(x) + libdevice.sinh(y) + libdevice.cosh(x) + libdevice.asinh(y) + libdevice.acosh(x + 5)",
        lambda x, y: x.tanh() + y.sinh() + x.cosh() + y.asinh() + (x + 5).acosh())  # fmt: skip
formula("exponentials",
        "tl.exp(x) + tl.exp2(y) + libdevice.expm1(y) + libdevice.exp10(x * 0.5) + libdevice.fast_expf(y)",
        lambda x, y: x.exp() + y.exp2() + y.expm1() + 10 ** (x * 0.5) + y.exp())  # fmt: skip
formula("logarithms", "tl.log(x) + tl.log2(y) + libdevice.log1p(x) + libdevice.log10(y)",
        lambda x, y: x.log() + y.log2() + x.log1p() + y.log10(), **POSITIVE)  # fmt: skip
formula("roots", "tl.sqrt(x) + tl.sqrt_rn(y) + tl.rsqrt(x) + libdevice.cbrt(y)",
        lambda x, y: x.sqrt() + y.sqrt() + x.rsqrt() + y.double().pow(1 / 3).float(), **POSITIVE)  # fmt: skip
formula("error_functions", "tl.erf(x) + libdevice.erfc(y) + tl.sigmoid(x)",
        lambda x, y: x.erf() + y.erfc() + x.sigmoid())  # fmt: skip
formula("gamma_functions", "libdevice.lgamma(x) + libdevice.tgamma(y)",
        lambda x, y: x.lgamma() + y.double().lgamma().exp().float(), **POSITIVE)  # fmt: skip
formula("rounding", "tl.floor(x) + 10 * tl.ceil(y) + 100 * libdevice.rint(x) + 1000 * libdevice.trunc(y)",
        lambda x, y: x.floor() + 10 * y.ceil() + 100 * x.round() + 1000 * y.trunc(), **EXACT)  # fmt: skip
formula("quotients", "x / y + tl.div_rn(y, x) + tl.fdiv(x, y)", lambda x, y: x / y + y / x + x / y, **POSITIVE)
formula("functions_of_two", "libdevice.atan2(x, y) + libdevice.hypot(x, y) + libdevice.fmod(x, y)",
        lambda x, y: torch.atan2(x, y) + torch.hypot(x, y) + torch.fmod(x, y), **POSITIVE)  # fmt: skip
formula("pow", "libdevice.pow(x, y)", torch.pow, **POSITIVE, tolerance=1e-4)
formula("copysign_and_nextafter", "libdevice.nextafter(libdevice.copysign(x, y), y)",
        lambda x, y: torch.nextafter(torch.copysign(x, y), y), **EXACT)  # fmt: skip
formula("ldexp_ilogb", "libdevice.ldexp(x, y.to(tl.int32)) + libdevice.ilogb(x).to(tl.float32)",
        lambda x, y: torch.ldexp(x, y.int()) + torch.frexp(x).exponent - 1, **POSITIVE)  # fmt: skip
formula("isnan", "libdevice.isnan(x / 0.0).to(tl.int32)", lambda x, y: torch.isnan(x / 0).int(), low=0, high=1)
formula("softmax", "tl.softmax(x, 0)", lambda x, y: torch.softmax(x, 0))
formula("sin_of_large_numbers", "tl.sin(1e6 * x)", lambda x, y: torch.sin(1e6 * x), tolerance=1e-4)
formula("sin_of_float64", "tl.sin(x) + tl.cos(1e7 * y)", lambda x, y: torch.sin(x) + torch.cos(1e7 * y), **DOUBLE)
formula("functions_of_float64", "tl.exp(x) * tl.exp2(y) + tl.log(x) + libdevice.log1p(y)",
        lambda x, y: x.exp() * y.exp2() + x.log() + y.log1p(), **DOUBLE, **POSITIVE)  # fmt: skip
formula("quotients_of_float64", "tl.sqrt(x * x + y) / y + libdevice.sqrt_rn(y) + tl.fdiv(x, y) + tl.floor(y)",
        lambda x, y: (x * x + y).sqrt() / y + y.sqrt() + x / y + y.floor(), **DOUBLE, **POSITIVE)  # fmt: skip

# ----------------------------------------------------------------------------------------- operators and whole numbers


formula("maximum_without_nan", 'tl.maximum(tl.where(x > 3, float("nan"), x), y)',
        lambda x, y: torch.where(x > 3, y, torch.maximum(x, y)))  # fmt: skip
formula("half", "tl.exp2(tl.fma(x, y, tl.clamp(x, -1.0, 1.0)).to(tl.float32))",
        lambda x, y: (x * y + x.clamp(-1, 1)).float().exp2(),
        dtype=torch.float16, low=-2, high=2, tolerance=1e-2)  # fmt: skip
formula("bfloat16", "tl.maximum(x * y, tl.abs(x)).to(tl.float32)",
        lambda x, y: torch.maximum(x * y, x.abs()).float(), **BFLOAT)  # fmt: skip
formula("bits", "((x >> 2) | (y << 3) & ~x) ^ (x << (y & 7))",
        lambda x, y: ((x >> 2) | (y << 3) & ~x) ^ (x << (y & 7)), **WHOLE)  # fmt: skip
formula("division_of_64_bits", "(x.to(tl.int64) << 33) // y.to(tl.int64)",
        lambda x, y: x.long() * 2**33 // y.long(), **COUNTS | {"low": 1})  # fmt: skip
formula("uint8", "x + y * 3", lambda x, y: x + y * 3, dtype=torch.uint8, low=0, high=255, **EXACT)
formula("uint32", "(x.to(tl.uint32, bitcast=True) // 3).to(tl.int64)",
        lambda x, y: (x.long() & 0xFFFFFFFF) // 3, **WHOLE)  # fmt: skip
formula("uint64", "(x.to(tl.int64).to(tl.uint64, bitcast=True) % 1000).to(tl.int64)",
        lambda x, y: torch.tensor([v % 2**64 % 1000 for v in x.flatten().tolist()]), **WHOLE)  # fmt: skip
formula("int8", "tl.minimum(x, y) - tl.abs(x)",
        lambda x, y: torch.minimum(x, y) - x.abs(), **INT8 | {"low": -50, "high": 50})  # fmt: skip
formula("int64", "tl.minimum(x, y) * 3 + tl.abs(tl.maximum(x, y))",
        lambda x, y: torch.minimum(x, y) * 3 + torch.maximum(x, y).abs(),
        dtype=torch.int64, low=-(2**40), high=2**40, **EXACT)  # fmt: skip
formula("umulhi_of_64_bits", "tl.umulhi(x.to(tl.int64) << 40, y.to(tl.int64) << 30)",
        lambda x, y: x.long() * y.long() * 64, **COUNTS)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- casts


formula("to_bfloat16", "x.to(tl.bfloat16).to(tl.float32)", lambda x, y: x.bfloat16().float(), **EXACT)
formula("to_bfloat16_towards_zero", 'tl.cast(x, tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32)',
        lambda x, y: (x.view(torch.int32) & -65536).view(torch.float32), **EXACT)  # fmt: skip
formula("casts_of_float64",
        "x.to(tl.float16).to(tl.float64) + y.to(tl.float32).to(tl.float64) + y.to(tl.int32)",
        lambda x, y: x.half().double() + y.float().double() + y.int(), **DOUBLE)  # fmt: skip
formula("to_whole_numbers",
        "(x * 1000).to(tl.int32).to(tl.int64) + (y * 1099511627776.0).to(tl.int64) + tl.abs(x * 9).to(tl.uint8)",
        lambda x, y: (x * 1000).int().long() + (y * 2.0**40).long() + (x * 9).abs().long(), **EXACT)  # fmt: skip
formula("of_whole_numbers",
        "(x.to(tl.int64) * 1234567890123).to(tl.float32) + y.to(tl.uint32, bitcast=True).to(tl.float32)",
        lambda x, y: (x.long() * 1234567890123).float() + (y.long() & 0xFFFFFFFF).float(), **WHOLE)  # fmt: skip
formula("of_int8", "x.to(tl.float16).to(tl.float32) + y.to(tl.bfloat16).to(tl.float32)",
        lambda x, y: x.half().float() + y.bfloat16().float(), **INT8)  # fmt: skip
formula("to_int8", "x.to(tl.int8)", lambda x, y: x.to(torch.int8), **WHOLE | {"low": -1000, "high": 1000})
formula("bools", "(x > y).to(tl.float32) * 3 + x.to(tl.int1).to(tl.float32)",
        lambda x, y: (x > y).float() * 3 + (x != 0).float(), **WHOLE | {"low": -1, "high": 2})  # fmt: skip
formula("to_fp8_e4m3", "x.to(tl.float8e4nv).to(tl.float32)",
        lambda x, y: x.to(torch.float8_e4m3fn).float(), since=89, **EXACT)  # fmt: skip
formula("to_fp8_e5m2", "x.to(tl.float8e5).to(tl.float32)", lambda x, y: x.to(torch.float8_e5m2).float(), **EXACT)
formula("bits_of_fp8_e5m2", "x.to(tl.float8e5, bitcast=True).to(tl.float32)",
        lambda x, y: x.view(torch.float8_e5m2).float(), **BYTES)  # fmt: skip
formula("bits_of_fp8_e4m3", "x.to(tl.float8e4nv, bitcast=True).to(tl.float32)",
        lambda x, y: x.view(torch.float8_e4m3fn).float(), since=89, **BYTES)  # fmt: skip
formula("fp8_e4b15", "(x.to(tl.float16) * 0.125).to(tl.float8e4b15).to(tl.float16)",
        lambda x, y: x.half() / 8, dtype=torch.int8, low=-14, high=15, **EXACT)  # fmt: skip
