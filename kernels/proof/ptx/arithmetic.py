"""What each instruction that touches registers alone computes, as an expression of numpy.

meaning(opcode) says the types of the operands, the type of the result and the expression in x0, x1, ...; types are
Python names of numpy types in the generated code: u16, i32, f32, ... and p for predicates. bf16 and f16 registers are
their bits, widened by the expression: exact for sums and products, because float32 has more than twice their digits.
Source: NVIDIA, "PTX ISA", chapter 9.7.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fasttfm.kernels.proof.ptx.faults import Unsupported


@dataclass(frozen=True, slots=True)
class Meaning:
    operands: tuple[str, ...]
    result: str
    expression: str


_TYPES = {
    "s8": "i8", "u8": "u8", "b8": "u8", "s16": "i16", "u16": "u16", "b16": "u16", "f16": "u16", "bf16": "u16",
    "s32": "i32", "u32": "u32", "b32": "u32", "f32": "f32", "f16x2": "u32", "bf16x2": "u32", "tf32": "f32",
    "s64": "i64", "u64": "u64", "b64": "u64", "f64": "f64", "f32x2": "u64", "pred": "p",
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
_MODES = {"rn", "approx", "full", "ftz", "lo", "sat", "NaN", "relu", "wide", "hi", "rna", "rzi", "rni", "rmi", "rpi",
          "rz", "to"}  # fmt: skip


@functools.cache
def meaning(opcode: str) -> Meaning | None:
    """None for an opcode that this file does not know."""
    base, *words = opcode.split(".")
    types = [word for word in words if word in _TYPES]
    modes = {word for word in words if word not in _TYPES}
    if not types:
        return None
    if base == "cvt":
        return _conversion(types, modes)
    if base == "setp":
        return _comparison(words)
    if modes - _MODES:
        return None
    if len(types) > 1:
        return _mixed(base, types, modes)
    word = types[-1]
    if word in ("f32", "f64"):
        return _real(base, word, modes)
    if word == "f32x2" and base in ("add", "sub", "mul", "fma"):
        return _each(_real(base, "f32", modes), "u64", "f32")
    if word in (*_NARROW, "f16x2", "bf16x2"):
        return _narrow(base, word, modes)
    return _integer(base, word, modes)


def _integer(base: str, word: str, modes: set[str]) -> Meaning | None:
    t = _TYPES[word]
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
    if "hi" in modes:
        high = "multiply_high({0}, {1})"
        return {"mul": Meaning(two, t, high), "mad": Meaning(three, t, high + " + {2}")}.get(base)
    if base in _SIGNS:
        return Meaning(two, t, f"{{0}} {_SIGNS[base]} {{1}}")
    shifts = {"shl": f"{{0}} << {{1}}.astype({t})", "shr": f"{{0}} >> {{1}}.astype({t})"}
    if base in shifts:
        return Meaning((t, "u32"), t, shifts[base])
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
        "clz": Meaning(("u32",), "u32", "leading_zeros({0})"),
    }
    return meanings.get(base)


def _real(base: str, word: str, modes: set[str]) -> Meaning | None:
    t = _TYPES[word]
    ends = ("fmin", "fmax") if "NaN" not in modes else ("minimum", "maximum")
    codes = {
        "add": ("{0} + {1}", 2),
        "sub": ("{0} - {1}", 2),
        "mul": ("{0} * {1}", 2),
        "fma": ("fma32({0}, {1}, {2})" if word == "f32" else "", 3),
        "div": ("{0} / {1}", 2),
        "min": (f"np.{ends[0]}({{0}}, {{1}})", 2),
        "max": (f"np.{ends[1]}({{0}}, {{1}})", 2),
        "neg": ("-{0}", 1),
        "abs": ("np.abs({0})", 1),
        "mov": ("{0}", 1),
        **{name: (text, 1) for name, text in _APPROXIMATE.items()},
    }
    if base == "selp":
        return Meaning((t, t, "p"), t, "np.where({2}, {0}, {1})")
    text, count = codes.get(base, ("", 0))
    if not text or modes & {"rz", "sat", "relu"}:
        return None
    if "ftz" in modes:
        names = [f"flush({{{i}}})" for i in range(count)]
        text = f"flush({text.format(*names)})"
    return Meaning((t,) * count, t, text)


def _mixed(base: str, types: list[str], modes: set[str]) -> Meaning | None:
    """float32 and half precision or bfloat16 in one instruction (sm_100 on), whose last operand is the float32."""
    if len(types) != 2 or types[0] != "f32" or types[1] not in _NARROW or base not in ("add", "sub", "fma"):
        return None
    real = _real(base, "f32", modes)
    if real is None:
        return None
    narrow = len(real.operands) - 1
    operands = [_widened(types[1], f"{{{i}}}") for i in range(narrow)]
    return Meaning(("u16",) * narrow + ("f32",), "f32", real.expression.format(*operands, f"{{{narrow}}}"))


def _narrow(base: str, word: str, modes: set[str]) -> Meaning | None:
    """Half and bfloat16, alone or in pairs, through float32."""
    one = word.removesuffix("x2")
    if base in ("mov", "selp"):
        return _integer(base, "b32" if word.endswith("x2") else "b16", modes)
    real = _real(base, "f32", modes - {"ftz"})
    if real is None or base == "fma":  # a fused product and sum of these needs more digits than float32 has
        if base != "fma":
            return None
        wide = f"({_widened(one, '{0}')}.astype(f64) * {_widened(one, '{1}')} + {_widened(one, '{2}')}).astype(f32)"
        converted = Meaning(("u16",) * 3, "u16", f"f32_to_{one}({wide})")
    else:
        operands = [_widened(one, f"{{{i}}}") for i in range(len(real.operands))]
        converted = Meaning(("u16",) * len(operands), "u16", f"f32_to_{one}({real.expression.format(*operands)})")
    return _each(converted, "u32", "u16") if word.endswith("x2") else converted


def _widened(word: str, operand: str) -> str:
    return f"{word}_to_f32({operand})"


def _each(of_one: Meaning | None, whole: str, half: str) -> Meaning | None:
    """The same for both halves of a register."""
    if of_one is None:
        return None
    sides = []
    view = f".view({half})" if half == "f32" else ""
    bits = ".view(u32)" if half == "f32" else ""
    for side in (0, 1):
        operands = [f"halves({{{i}}})[{side}]{view}" for i in range(len(of_one.operands))]
        sides.append(f"({of_one.expression.format(*operands)}){bits}")
    return Meaning((whole,) * len(of_one.operands), whole, f"pack({sides[0]}, {sides[1]})")


def _comparison(words: list[str]) -> Meaning | None:
    compare, *middle, word = words
    word = word.removesuffix("x2")
    middle = [m for m in middle if m != "ftz"]
    t = _TYPES[word]
    left, right = ("{0}", "{1}") if word not in _NARROW else (_widened(word, "{0}"), _widened(word, "{1}"))
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


def _conversion(types: list[str], modes: set[str]) -> Meaning | None:
    if len(types) != 2:
        return None
    destination, source = types
    if destination in ("f16x2", "bf16x2") and source == "f32" and modes <= {"rn"}:
        one = destination.removesuffix("x2")
        return Meaning(("f32", "f32"), "u32", f"pack(f32_to_{one}({{1}}), f32_to_{one}({{0}}))")
    if destination in _NARROW and source == "f32" and modes <= {"rn"}:
        return Meaning(("f32",), "u16", f"f32_to_{destination}({{0}})")
    if destination in _NARROW and source in ("s8", "u8", "s16", "u16") and modes == {"rn"}:  # exact in float32 first
        return Meaning((_TYPES[source],), "u16", f"f32_to_{destination}({{0}}.astype(f32))")
    if destination == "f32" and source in _NARROW and modes <= {"ftz"}:
        return Meaning(("u16",), "f32", _widened(source, "{0}"))
    if destination == "tf32" and source == "f32" and modes <= {"rna"}:
        return Meaning(("f32",), "f32", "f32_to_tf32({0})")
    a, b = _TYPES[source], _TYPES[destination]
    whole = {"rzi": "np.trunc", "rni": "np.rint", "rmi": "np.floor", "rpi": "np.ceil"}
    rounding = next((whole[m] for m in modes if m in whole), None)
    if a[0] == "f" and b[0] in "iu" and rounding and modes <= {*whole, "ftz", "sat"}:
        return Meaning((a,), b, f"float_to_int({{0}}, {b}, {rounding})")
    if a[0] == b[0] == "f" and modes <= {*whole, "rn"}:
        text = f"{rounding}({{0}})" if rounding else "{0}"
        return Meaning((a,), b, f"{text}.astype({b})")
    if a[0] in "iu" and ((b[0] in "iu" and not modes) or (b[0] == "f" and modes == {"rn"})):
        return Meaning((a,), b, f"{{0}}.astype({b})")
    return None


def of_three(pair: Meaning) -> Meaning:
    """The same of three operands, as of two twice."""
    return Meaning((*pair.operands, pair.operands[0]), pair.result, pair.expression.format(pair.expression, "{2}"))


def known(opcode: str, location: object) -> Meaning:
    """meaning(), or Unsupported by name and place."""
    meant = meaning(opcode)
    if meant is None:
        raise Unsupported(f"opcode {opcode} is not known", location)  # type: ignore[arg-type]
    return meant
