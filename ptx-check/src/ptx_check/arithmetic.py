"""numpy expressions for register-only instructions.

meaning(opcode) gives the operand types, the result type and the expression in x0, x1, ...; types are names of numpy
types in the generated code: u16, i32, f32, ... and p for predicates. bf16 and f16 registers hold bits, which the
expression widens: exact, or rounded harmlessly (see _narrow).
Source: NVIDIA, "PTX ISA", chapter 9.7.
"""

import functools
from dataclasses import dataclass

from ptx_check.faults import Unsupported
from ptx_check.forms import accepted


@dataclass(frozen=True, slots=True)
class Meaning:
    operands: tuple[str, ...]
    result: str
    expression: str


TYPES = {
    "s8": "i8", "u8": "u8", "b8": "u8", "s16": "i16", "u16": "u16", "b16": "u16", "f16": "u16", "bf16": "u16",
    "s32": "i32", "u32": "u32", "b32": "u32", "f32": "f32", "f16x2": "u32", "bf16x2": "u32", "tf32": "f32",
    "s64": "i64", "u64": "u64", "b64": "u64", "f64": "f64", "f32x2": "u64", "pred": "p", "u16x2": "u32", "s16x2": "u32",
    "e4m3x2": "u16", "e5m2x2": "u16",
}  # fmt: skip
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
            "hs": ">="}  # fmt: skip
_UNORDERED = {"equ": "!=", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # the negation of the opposite
_APPROXIMATE = {
    "ex2": "np.exp2({0})",
    "lg2": "np.log2({0})",
    "rsqrt": "(1.0 / np.sqrt({0}.astype(f64))).astype(f32)",
    "sqrt": "np.sqrt({0})",
    "rcp": "(f32(1) / {0})",
    "sin": "np.sin({0})",
    "cos": "np.cos({0})",
    "tanh": "np.tanh({0})",
}
_NARROW = ("f16", "bf16")
_EIGHT = ("e4m3x2", "e5m2x2")
_PROPERTIES = {
    "finite": "np.isfinite({0})",
    "infinite": "np.isinf({0})",
    "number": "~np.isnan({0})",
    "notanumber": "np.isnan({0})",
    "normal": "np.isfinite({0}) & (np.abs({0}) >= np.finfo({0}.dtype).smallest_normal)",
    "subnormal": "(np.abs({0}) < np.finfo({0}.dtype).smallest_normal) & ({0} != 0)",
}
"""Classes that testp tests for."""


@functools.cache
def meaning(opcode: str) -> Meaning | None:
    """Return the meaning of an opcode; None if it is not in forms.py."""
    if opcode not in accepted():
        return None
    base, *words = opcode.split(".")
    types = [word for word in words if word in TYPES]
    modes = {word for word in words if word not in TYPES}
    if base == "cvt":
        return _conversion(types, modes)
    if base == "setp":
        return _comparison(words)
    if base == "set":
        return _mask(words)
    if base == "dp4a":
        first, second = (word[0] + "8" for word in types)
        result = "i32" if "s32" in types else "u32"
        text = f"product_of_bytes({{0}}, {{1}}, {{2}}, {first.replace('s', 'i')}, {second.replace('s', 'i')})"
        return Meaning(("u32", "u32", result), result, text)
    if len(types) > 1:
        return _mixed(base, types, modes)
    word = types[-1]
    if word in ("f32", "f64"):
        return _real(base, word, modes)
    if word == "f32x2" and base in ("add", "sub", "mul", "fma"):
        return _each(_real(base, "f32", modes), "u64", "f32")
    if word in (*_NARROW, "f16x2", "bf16x2"):
        return _narrow(base, word, modes)
    if word in ("u16x2", "s16x2"):
        one = TYPES[word.removesuffix("x2")]
        return _each(_integer(base, word.removesuffix("x2"), modes), "u32", one)
    return _integer(base, word, modes)


def _integer(base: str, word: str, modes: set[str]) -> Meaning | None:
    t = TYPES[word]
    two, three = (t, t), (t, t, t)
    if t == "p":
        logic = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}"}
        if base in logic:
            return Meaning(two, t, logic[base])
        return Meaning((t,), t, "{0}" if base == "mov" else "~{0}") if base in ("mov", "not") else None
    if "wide" in modes:
        wide = f"{t[0]}{2 * int(t[1:])}"
        product = f"np.multiply({{0}}, {{1}}, dtype={wide})"
        return {"mul": Meaning(two, wide, product), "mad": Meaning((*two, wide), wide, product + " + {2}")}.get(base)
    if "sat" in modes:
        high = "sum_in_range(multiply_high({0}, {1}), {2})"
        return {
            "add": Meaning(two, t, "sum_in_range({0}, {1})"),
            "sub": Meaning(two, t, "difference_in_range({0}, {1})"),
            "mad": Meaning(three, t, high),
        }.get(base)
    if "hi" in modes:
        high = "multiply_high({0}, {1})"
        return {"mul": Meaning(two, t, high), "mad": Meaning(three, t, high + " + {2}")}.get(base)
    if base in _SIGNS:
        return Meaning(two, t, f"{{0}} {_SIGNS[base]} {{1}}")
    most = f"np.minimum({{1}}, u32({t[1:]})).astype({t})"  # the shift count has 32 bits, also for 16-bit operands
    shifts = {"shl": f"{{0}} << {most}", "shr": f"{{0}} >> {most}"}
    if base in shifts:
        return Meaning((t, "u32"), t, shifts[base])
    if base == "shf":
        return Meaning((t, t, "u32"), t, f"funnel({{0}}, {{1}}, {{2}}, {'l' in modes}, {'wrap' in modes})")
    positive = "np.maximum(%s, {0}.dtype.type(0))" if "relu" in modes else "%s"
    meanings = {
        "mad": Meaning(three, t, "{0} * {1} + {2}"),
        "div": Meaning(two, t, "quotient({0}, {1})"),
        "rem": Meaning(two, t, "remainder({0}, {1})"),
        "min": Meaning(two, t, positive % "np.minimum({0}, {1})"),
        "max": Meaning(two, t, positive % "np.maximum({0}, {1})"),
        "neg": Meaning((t,), t, "-{0}"),
        "abs": Meaning((t,), t, "np.abs({0})"),
        "not": Meaning((t,), t, "~{0}"),
        "mov": Meaning((t,), t, "{0}"),
        "selp": Meaning((t, t, "p"), t, "np.where({2}, {0}, {1})"),
        "bfe": Meaning((t, "u32", "u32"), t, "bits_of({0}, {1}, {2})"),
        "prmt": Meaning(("u32", "u32", "u32"), "u32", "permute({0}, {1}, {2})"),
        "lop3": Meaning(("u32", "u32", "u32", "u32"), "u32", "logic3({0}, {1}, {2}, int({3}[0, 0]))"),
        "popc": Meaning((t,), "u32", "count_bits({0})"),
        "clz": Meaning((t,), "u32", "leading_zeros({0})"),
        "brev": Meaning((t,), t, "turned({0})"),
        "bfind": Meaning((t,), "u32", f"highest_bit({{0}}, {'shiftamt' in modes})"),
        "sad": Meaning(three, t, "{2} + (np.maximum({0}, {1}) - np.minimum({0}, {1}))"),
        "mul24": Meaning(two, t, f"({{0}} << {t}(8) >> {t}(8)) * ({{1}} << {t}(8) >> {t}(8))"),
        "bfi": Meaning((t, t, "u32", "u32"), t, "inserted({0}, {1}, {2}, {3})"),
    }
    return meanings.get(base)


def _real(base: str, word: str, modes: set[str]) -> Meaning | None:
    t = TYPES[word]
    choose = ", np.%simum" if "NaN" in modes else ""
    fma = "fma32" if word == "f32" else "exact.fma64"
    codes = {
        "add": ("{0} + {1}", 2),
        "sub": ("{0} - {1}", 2),
        "mul": ("{0} * {1}", 2),
        "fma": (fma + "({0}, {1}, {2})", 3),
        "div": ("approximate_quotient({0}, {1})" if "approx" in modes else "{0} / {1}", 2),
        "min": (f"smaller({{0}}, {{1}}{choose % 'min' if choose else ''})", 2),
        "max": (f"larger({{0}}, {{1}}{choose % 'max' if choose else ''})", 2),
        "neg": ("-{0}", 1),
        "abs": ("np.abs({0})", 1),
        "mov": ("{0}", 1),
        "copysign": ("np.copysign({1}, {0})", 2),
        "testp": (_PROPERTIES.get(next(iter(modes)), "") if base == "testp" else "", 1),
        **{name: (text, 1) for name, text in _APPROXIMATE.items()},
    }
    if word == "f64":
        codes["rcp"] = ("1.0 / {0}", 1)
        if "approx" in modes:  # a seed with 20 bits of precision, which libraries refine
            return Meaning((t,), t, f"seed64({{0}}, {base!r}, {'ftz' in modes})")
    if base == "selp":
        return Meaning((t, t, "p"), t, "np.where({2}, {0}, {1})")
    text, count = codes[base]
    if base == "testp":
        return Meaning((t,), "p", text)
    if "xorsign" in modes:
        text = f"of_both_signs({text.format('np.abs({0})', 'np.abs({1})')}, {{0}}, {{1}})"
    way = next((mode for mode in modes if mode in ("rz", "rm", "rp")), None)
    if way and word == "f64":
        given = "".join(f", {{{position}}}" for position in range(count))
        text = f"exact.directed64({base!r}, {way!r}{given})"
    elif way:
        directed = {"add": "sum32({0}, {1}, ", "sub": "sum32({0}, -{1}, ", "mul": "product32({0}, {1}, ",
                    "fma": "product_sum32({0}, {1}, {2}, ", "div": "quotient32({0}, {1}, ",
                    "rcp": "quotient32(f32(1), {0}, ", "sqrt": "root32({0}, "}  # fmt: skip
        text = f"exact.{directed[base]}{way!r})"
    if "ftz" in modes:
        names = [f"flush({{{i}}})" for i in range(count)]
        text = f"flush({text.format(*names)})"
    if "sat" in modes:
        text = f"saturated({text})"
    return Meaning((t,) * count, t, text)


def _mixed(base: str, types: list[str], modes: set[str]) -> Meaning | None:
    """Instructions that mix float16 or bfloat16 with float32 (sm_100 and newer); the last operand is the float32."""
    if len(types) != 2 or types[0] != "f32" or types[1] not in _NARROW or base not in ("add", "sub", "fma"):
        return None
    real = _real(base, "f32", modes)
    if real is None:
        return None
    narrow = len(real.operands) - 1
    operands = [_widened(types[1], f"{{{i}}}") for i in range(narrow)]
    return Meaning(("u16",) * narrow + ("f32",), "f32", real.expression.format(*operands, f"{{{narrow}}}"))


def _narrow(base: str, word: str, modes: set[str]) -> Meaning | None:
    """float16 and bfloat16, single or in pairs, computed in float32.

    float32 has more than twice their significand bits, so its own rounding is exact or does not change the result.
    """
    one = word.removesuffix("x2")
    real = _real(base, "f32", modes - {"sat"} - ({"ftz"} if one == "f16" else set()))
    if real is None:
        return None
    text = real.expression
    if base == "fma":  # a fused multiply-add needs more bits than float32 has
        text = "fma_f16({0}, {1}, {2})"
    elif base == "mul" and one == "bf16":
        text = "product_bf16({0}, {1})"
    bits = [f"{{{i}}}" for i in range(len(real.operands))]
    if "ftz" in modes and one == "f16":
        bits = [f"flush16({operand})" for operand in bits]
    text = text.format(*(_widened(one, operand) for operand in bits))
    text = f"saturated({text})" if "sat" in modes else f"positive({text})" if "relu" in modes else text
    text = f"f32_to_{one}({text})"
    if "ftz" in modes and one == "f16":
        text = f"flush16({text})"
    converted = Meaning(("u16",) * len(bits), "u16", text)
    return _each(converted, "u32", "u16") if word.endswith("x2") else converted


def _widened(word: str, operand: str) -> str:
    return f"{word}_to_f32({operand})"


def _each(of_one: Meaning | None, whole: str, half: str) -> Meaning | None:
    """Apply a meaning to both halves of a register."""
    if of_one is None:
        return None
    sides = []
    view = "" if half == "u16" else f".view({half})"
    bits = {"f32": ".view(u32)", "i16": ".view(u16)"}.get(half, "")
    for side in (0, 1):
        operands = [f"halves({{{i}}})[{side}]{view}" for i in range(len(of_one.operands))]
        sides.append(f"({of_one.expression.format(*operands)}){bits}")
    return Meaning((whole,) * len(of_one.operands), whole, f"pack({sides[0]}, {sides[1]})")


def _comparison(words: list[str]) -> Meaning | None:
    compare, *middle, word = words
    word = word.removesuffix("x2")
    t = TYPES[word]
    left, right = "{0}", "{1}"
    if "ftz" in middle:
        middle.remove("ftz")
        left, right = (f"flush{'' if word == 'f32' else '16'}({side})" for side in (left, right))
    if word in _NARROW:
        left, right = _widened(word, left), _widened(word, right)
    real = word in ("f32", "f64", *_NARROW)
    if compare == "nan":
        text = f"np.isnan({left}) | np.isnan({right})"
    elif compare == "num":
        text = f"~(np.isnan({left}) | np.isnan({right}))"
    elif compare == "neu" or (compare == "ne" and not real):
        text = f"{left} != {right}"
    elif compare == "ne":  # ordered
        text = f"({left} < {right}) | ({left} > {right})"
    elif compare in _UNORDERED and real:
        opposite = _UNORDERED[compare]
        text = f"~(({left} < {right}) | ({left} > {right}))" if opposite == "!=" else f"~({left} {opposite} {right})"
    elif compare in _COMPARE:
        text = f"{left} {_COMPARE[compare]} {right}"
    else:
        return None
    if not middle:
        return Meaning((t, t), "p", text)
    if len(middle) == 1 and middle[0] in ("and", "or", "xor"):
        return Meaning((t, t, "p"), "p", f"({text}) {_SIGNS[middle[0]]} {{2}}")
    return None


_WHOLE = {"rzi": "np.trunc", "rni": "np.rint", "rmi": "np.floor", "rpi": "np.ceil"}


def _conversion(types: list[str], modes: set[str]) -> Meaning | None:
    destination, source = types
    if destination in _EIGHT:
        one = f"f32_to_{destination.removesuffix('x2')}"
        hold = "positive" if "relu" in modes else ""
        if source == "f32":
            return Meaning(("f32", "f32"), "u16", f"pack({one}({hold}({{1}})), {one}({hold}({{0}})))")
        parts = (f"{one}({hold}(f16_to_f32(halves({{0}})[{side}])))" for side in (0, 1))
        return Meaning(("u32",), "u16", f"pack({', '.join(parts)})")
    if source in _EIGHT:
        wide = f"{source.removesuffix('x2')}_to_f32(halves({{0}})[%d])"
        sides = (f"f32_to_f16(positive({wide % side}))" if "relu" in modes else f"f32_to_f16({wide % side})"
                 for side in (0, 1))  # fmt: skip
        return Meaning(("u16",), "u32", f"pack({', '.join(sides)})")
    if destination in ("f16x2", "bf16x2"):
        one = destination.removesuffix("x2")
        single = _rounded(one, source, modes)
        return Meaning(("f32", "f32"), "u32", f"pack({single.format('{1}')}, {single.format('{0}')})")
    a, b = TYPES[source], TYPES[destination]
    real_source, real_result = source in _REALS, destination in _REALS
    if not real_source and not real_result:
        return Meaning((a,), b, f"clamped({{0}}, {b})" if "sat" in modes else f"{{0}}.astype({b})")
    if not real_result:
        whole = next(_WHOLE[mode] for mode in modes if mode in _WHOLE)
        value = _widened(source, "{0}") if source in _NARROW else "{0}"
        value = f"flush({value})" if "ftz" in modes else value
        return Meaning((a,), b, f"float_to_int({value}, {b}, {whole})")
    if not real_source:
        return Meaning((a,), b, _from_integer(destination, source, modes))
    return Meaning((a,), b, _rounded(destination, source, modes))


_REALS = ("f16", "bf16", "f32", "f64", "tf32")


def _from_integer(destination: str, source: str, modes: set[str]) -> str:
    way = next(mode for mode in modes if mode in ("rn", "rz", "rm", "rp"))
    if destination == "f64":
        return "{0}.astype(f64)" if way == "rn" else f"exact.whole64({{0}}, {way!r})"
    if way == "rn" and destination == "f32":
        return "{0}.astype(f32)"
    return f"to_{destination}(exact.whole_number({{0}}), {way!r})"


def _rounded(destination: str, source: str, modes: set[str]) -> str:
    """Expression that converts one floating-point type to another."""
    value = _widened(source, "{0}") if source in _NARROW else "{0}"
    if "ftz" in modes and source == "f32":
        value = f"flush({value})"
    whole = next((_WHOLE[mode] for mode in modes if mode in _WHOLE), None)
    if whole:
        value = f"{whole}({value})"
    for name, hold in (("relu", "positive"), ("sat", "saturated")):
        if name in modes:
            value = f"{hold}({value})"
    way = next((mode for mode in modes if mode in ("rn", "rz", "rm", "rp")), "rn")
    if destination == "tf32":
        made = f"f32_to_tf32({value})" if "rna" in modes else f"to_tf32({value}, {way!r})"
    elif destination in ("f32", "f64") and (way == "rn" or source != "f64"):
        made = f"({value}).astype({destination})"
    elif way == "rn" and source != "f64":
        made = f"f32_to_{destination}({value})"
    else:
        made = f"to_{destination}(({value}).astype(f64), {way!r})"
    return f"flush({made})" if "ftz" in modes and destination == "f32" and source != "f32" else made


def _mask(words: list[str]) -> Meaning | None:
    """A comparison whose result is a register of ones (or a half of it) instead of a predicate."""
    compare, *middle, result, word = words
    if result not in ("u32", "s32") or set(middle) - {"ftz"}:
        return None
    compared = _comparison([compare, *middle, word])
    if compared is None or word in ("bf16x2", "f64", "s64", "u64", "b64"):
        return None
    if word == "f16x2":
        return _each(Meaning(compared.operands, "u16", f"({compared.expression}) * u16(0xffff)"), "u32", "u16")
    return Meaning(compared.operands, "u32", f"({compared.expression}) * u32(0xffffffff)")


def moved(opcode: str, count: int) -> int:
    """Number of leading operands, of `count`, whose bits an instruction moves; the rest control it. 0: it computes."""
    base, *words = opcode.split(".")
    if base == "cvt":
        whole = all(word[0] in "sub" and word[1:].isdigit() for word in words)
        return 1 if whole else 0
    counts = {"mov": 1, "shl": 1, "shr": 1, "bfe": 1, "brev": 1, "bfi": 2, "shf": 2, "prmt": 2, "selp": 2}
    return counts.get(base, 0)


def of_three(pair: Meaning) -> Meaning:
    """Apply a two-operand meaning to three operands, by nesting it."""
    return Meaning((*pair.operands, pair.operands[0]), pair.result, pair.expression.format(pair.expression, "{2}"))


def known(opcode: str, location: object) -> Meaning:
    """meaning() of an opcode; raises Unsupported with opcode and location if there is none."""
    meant = meaning(opcode)
    if meant is None:
        raise Unsupported(f"opcode {opcode} is not known", location)  # type: ignore[arg-type]
    return meant
