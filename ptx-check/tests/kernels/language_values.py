"""Features of the language that make numbers of numbers: functions, several in a formula, operators, whole numbers of
every width, casts. What single instructions give is held bit by bit by test_every_form.py."""

import torch
from language import DOUBLE, EXACT, POSITIVE, WHOLE, formula

COUNTS = {"dtype": torch.int32, "low": 0, "high": 1000, "tolerance": 0.0}
BYTES = {"dtype": torch.uint8, "low": 0, "high": 0x70, "tolerance": 0.0}
"""Of a float8 all that are finite and not negative."""
INT8 = {"dtype": torch.int8, "low": -128, "high": 128, "tolerance": 0.0}

# ---------------------------------------------------------------------------------------------------------- functions


formula("circular_functions", "tl.sin(x) + tl.cos(y) + libdevice.tan(x * 0.3) + libdevice.atan(y)",
        lambda x, y: x.sin() + y.cos() + (x * 0.3).tan() + y.atan())  # fmt: skip
formula("gamma_functions", "libdevice.lgamma(x) + libdevice.tgamma(y)",
        lambda x, y: x.lgamma() + y.double().lgamma().exp().float(), **POSITIVE)  # fmt: skip
formula("rounding", "tl.floor(x) + 10 * tl.ceil(y) + 100 * libdevice.rint(x) + 1000 * libdevice.trunc(y)",
        lambda x, y: x.floor() + 10 * y.ceil() + 100 * x.round() + 1000 * y.trunc(), **EXACT)  # fmt: skip
formula("copysign_and_nextafter", "libdevice.nextafter(libdevice.copysign(x, y), y)",
        lambda x, y: torch.nextafter(torch.copysign(x, y), y), **EXACT)  # fmt: skip
formula("softmax", "tl.softmax(x, 0)", lambda x, y: torch.softmax(x, 0))
formula("sin_of_large_numbers", "tl.sin(1e6 * x)", lambda x, y: torch.sin(1e6 * x), tolerance=1e-4)
formula("functions_of_float64", "tl.exp(x) * tl.exp2(y) + tl.log(x) + libdevice.log1p(y)",
        lambda x, y: x.exp() * y.exp2() + x.log() + y.log1p(), **DOUBLE, **POSITIVE)  # fmt: skip

# ----------------------------------------------------------------------------------------- operators and whole numbers


formula("half", "tl.exp2(tl.fma(x, y, tl.clamp(x, -1.0, 1.0)).to(tl.float32))",
        lambda x, y: (x * y + x.clamp(-1, 1)).float().exp2(),
        dtype=torch.float16, low=-2, high=2, tolerance=1e-2)  # fmt: skip
formula("division_of_64_bits", "(x.to(tl.int64) << 33) // y.to(tl.int64)",
        lambda x, y: x.long() * 2**33 // y.long(), **COUNTS | {"low": 1})  # fmt: skip
formula("uint64", "(x.to(tl.int64).to(tl.uint64, bitcast=True) % 1000).to(tl.int64)",
        lambda x, y: torch.tensor([v % 2**64 % 1000 for v in x.flatten().tolist()]), **WHOLE)  # fmt: skip
formula("int8", "tl.minimum(x, y) - tl.abs(x)",
        lambda x, y: torch.minimum(x, y) - x.abs(), **INT8 | {"low": -50, "high": 50})  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- casts


formula("to_bfloat16", "x.to(tl.bfloat16).to(tl.float32)", lambda x, y: x.bfloat16().float(), **EXACT)
formula("to_whole_numbers",
        "(x * 1000).to(tl.int32).to(tl.int64) + (y * 1099511627776.0).to(tl.int64) + tl.abs(x * 9).to(tl.uint8)",
        lambda x, y: (x * 1000).int().long() + (y * 2.0**40).long() + (x * 9).abs().long(), **EXACT)  # fmt: skip
formula("of_int8", "x.to(tl.float16).to(tl.float32) + y.to(tl.bfloat16).to(tl.float32)",
        lambda x, y: x.half().float() + y.bfloat16().float(), **INT8)  # fmt: skip
formula("bools", "(x > y).to(tl.float32) * 3 + x.to(tl.int1).to(tl.float32)",
        lambda x, y: (x > y).float() * 3 + (x != 0).float(), **WHOLE | {"low": -1, "high": 2})  # fmt: skip
formula("to_fp8_e4m3", "x.to(tl.float8e4nv).to(tl.float32)",
        lambda x, y: x.to(torch.float8_e4m3fn).float(), since=89, **EXACT)  # fmt: skip
formula("bits_of_fp8_e5m2", "x.to(tl.float8e5, bitcast=True).to(tl.float32)",
        lambda x, y: x.view(torch.float8_e5m2).float(), **BYTES)  # fmt: skip
formula("fp8_e4b15", "(x.to(tl.float16) * 0.125).to(tl.float8e4b15).to(tl.float16)",
        lambda x, y: x.half() / 8, dtype=torch.int8, low=-14, high=15, **EXACT)  # fmt: skip
