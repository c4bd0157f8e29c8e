"""Features of the language that make numbers of numbers."""

import torch
from language import BFLOAT, DOUBLE, EXACT, POSITIVE, WHOLE, formula

formula("sin_of_large_numbers", "tl.sin(1e6 * x)", lambda x, y: torch.sin(1e6 * x), tolerance=1e-4)
formula("sin_of_float64", "tl.sin(x) + tl.cos(1e7 * y)", lambda x, y: torch.sin(x) + torch.cos(1e7 * y), **DOUBLE)
formula("softmax", "tl.softmax(x, 0)", lambda x, y: torch.softmax(x, 0))
formula("divide", "x / y", lambda x, y: x / y, **POSITIVE)
formula("fma", "tl.fma(x, y, x)", lambda x, y: x * y + x)
formula("clamp", "tl.clamp(x, -1.0, 1.0)", lambda x, y: x.clamp(-1, 1))
formula("maximum_with_nan", "tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)", lambda x, y: torch.maximum(x, y))
formula("where", "tl.where(x > y, x, 2 * y)", lambda x, y: torch.where(x > y, x, 2 * y))
formula("remainder", "x % y", lambda x, y: torch.fmod(x, y), **POSITIVE)
formula("isnan", "libdevice.isnan(x / 0.0).to(tl.int32)",
        lambda x, y: torch.isnan(x / 0).int(), low=0, high=1, dtype=torch.float32)  # fmt: skip
formula("exp_of_float64", "tl.exp(x) * tl.exp2(y)", lambda x, y: torch.exp(x) * torch.exp2(y), **DOUBLE)
formula("float64", "tl.sqrt(x * x + y) / y", lambda x, y: torch.sqrt(x * x + y) / y, **DOUBLE, **POSITIVE)
formula("log_of_float64", "tl.log(x) + tl.floor(y)", lambda x, y: torch.log(x) + torch.floor(y), **DOUBLE, **POSITIVE)
formula("conversions_of_float64", "x.to(tl.float32).to(tl.float64) + y.to(tl.int32)",
        lambda x, y: x.float().double() + y.int(), **DOUBLE)  # fmt: skip
formula("half", "tl.exp2((x * y + tl.clamp(x, -1.0, 1.0)).to(tl.float32))",
        lambda x, y: (x * y + x.clamp(-1, 1)).float().exp2(),
        dtype=torch.float16, low=-2, high=2, tolerance=1e-2)  # fmt: skip
formula("bfloat16", "tl.maximum(x * y, x).to(tl.float32)", lambda x, y: torch.maximum(x * y, x).float(), **BFLOAT)
formula("to_fp8_e4m3", "x.to(tl.float8e4nv).to(tl.float32)",
        lambda x, y: x.to(torch.float8_e4m3fn).float(), since=89, **EXACT)  # fmt: skip
formula("to_fp8_e5m2", "x.to(tl.float8e5).to(tl.float32)", lambda x, y: x.to(torch.float8_e5m2).float(), **EXACT)
formula("half_to_fp8_e5m2", "x.to(tl.float8e5).to(tl.float32)",
        lambda x, y: x.to(torch.float8_e5m2).float(), dtype=torch.float16, since=89, **EXACT)  # fmt: skip
formula("bfloat16_to_fp8_e4m3", "x.to(tl.float8e4nv).to(tl.float32)",
        lambda x, y: x.to(torch.float8_e4m3fn).float(), dtype=torch.bfloat16, since=89, **EXACT)  # fmt: skip
formula("bitcast", "x.to(tl.int32, bitcast=True) ^ y.to(tl.int32, bitcast=True)",
        lambda x, y: x.view(torch.int32) ^ y.view(torch.int32), **EXACT)  # fmt: skip
formula("whole_division", "x // y", lambda x, y: x // y, dtype=torch.int32, low=1, high=1000, **EXACT)
formula("whole_division_of_64_bits", "(x.to(tl.int64) << 33) // y.to(tl.int64)",
        lambda x, y: x.long() * 2**33 // y.long(), dtype=torch.int32, low=1, high=1000, **EXACT)  # fmt: skip
formula("bits", "(x >> 2) | (y << 3) & ~x", lambda x, y: (x >> 2) | (y << 3) & ~x, **WHOLE)
formula("umulhi", "tl.umulhi((x << 24).to(tl.uint32), (y << 20).to(tl.uint32)).to(tl.int32)",
        lambda x, y: (x.long() * 2**24 * (y.long() * 2**20) >> 32).int(),
        dtype=torch.int32, low=1, high=100, **EXACT)  # fmt: skip
formula("int16", "tl.minimum(x, y) + tl.maximum(x, y) * 3",
        lambda x, y: torch.minimum(x, y) + torch.maximum(x, y) * 3,
        dtype=torch.int16, low=-99, high=99, **EXACT)  # fmt: skip
formula("int8", "tl.minimum(x, y) - tl.abs(x)",
        lambda x, y: torch.minimum(x, y) - x.abs(), dtype=torch.int8, low=-50, high=50, **EXACT)  # fmt: skip
formula("quantized", "libdevice.rint(x.to(tl.float32) * 0.5).to(tl.int8)",
        lambda x, y: (x.float() * 0.5).round().to(torch.int8), dtype=torch.int8, low=-50, high=50, **EXACT)  # fmt: skip
formula("float_to_uint8", "x.to(tl.uint8).to(tl.int32)",
        lambda x, y: x.clamp(0, 200).to(torch.uint8).int(), low=0, high=99, **EXACT)  # fmt: skip


def _bit_counts(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([bin(v & 0xFFFFFFFF).count("1") for v in x.flatten().tolist()])


formula("sin", "tl.sin(x)", lambda x, y: torch.sin(x))
formula("cos", "tl.cos(x)", lambda x, y: torch.cos(x))
formula("exp", "tl.exp(x)", lambda x, y: torch.exp(x))
formula("exp2", "tl.exp2(x)", lambda x, y: torch.exp2(x))
formula("log", "tl.log(x)", lambda x, y: torch.log(x), **POSITIVE)
formula("log2", "tl.log2(x)", lambda x, y: torch.log2(x), **POSITIVE)
formula("sqrt", "tl.sqrt(x)", lambda x, y: torch.sqrt(x), **POSITIVE)
formula("sqrt_rn", "tl.sqrt_rn(x)", lambda x, y: torch.sqrt(x), **POSITIVE)
formula("rsqrt", "tl.rsqrt(x)", lambda x, y: torch.rsqrt(x), **POSITIVE)
formula("erf", "tl.erf(x)", lambda x, y: torch.erf(x))
formula("sigmoid", "tl.sigmoid(x)", lambda x, y: torch.sigmoid(x))
formula("floor", "tl.floor(x)", lambda x, y: torch.floor(x))
formula("ceil", "tl.ceil(x)", lambda x, y: torch.ceil(x))
formula("abs", "tl.abs(x)", lambda x, y: x.abs())
formula("tanh", "libdevice.tanh(x)", lambda x, y: torch.tanh(x))
formula("round", "libdevice.rint(x)", lambda x, y: torch.round(x))
formula("trunc", "libdevice.trunc(x)", lambda x, y: torch.trunc(x))
formula("log1p", "libdevice.log1p(x)", lambda x, y: torch.log1p(x), **POSITIVE)
formula("expm1", "libdevice.expm1(x)", lambda x, y: torch.expm1(x))
formula("popc", "libdevice.popc(x)", lambda x, y: _bit_counts(x), **WHOLE)
formula("div_rn", "tl.div_rn(x, y)", lambda x, y: x / y, **POSITIVE)
formula("fdiv", "tl.fdiv(x, y)", lambda x, y: x / y, **POSITIVE)
formula("pow", "libdevice.pow(x, y)", torch.pow, **POSITIVE, tolerance=1e-4)
formula("atan2", "libdevice.atan2(x, y)", torch.atan2)
