"""Operands of machine code in nvdisasm's syntax, and their readers and writers.

R0 to R254 are registers per lane, UR0 to UR62 per warp, P0 to P6 and UP0 to UP6 the predicates; RZ and PT are zero and
true. A register may have a prefix (-, ~, !, | |) and a suffix that selects halves (.H0_H0). Hexadecimal numbers are
integers, all others floating-point. c[0x0][0x210] is a constant, [R4.64+0x8] an address.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_check.faults import Location, Unsupported

U32, U64, I32, F32 = np.uint32, np.uint64, np.int32, np.float32
_REGISTER = re.compile(r"([-~!|+]*)(UR|UP|R|P)(\d+|Z|T)((?:\.\w+)*)(\|?)((?:\.\w+)*)$")
_CONSTANT = re.compile(r"([-~|]*)c\[0x(\w+)\]\[(?:(R\d+|RZ|UR\d+|URZ)\+?)?(-?0x\w+)?\](\|?)$")
_ZERO, _TRUE = 255, 7
"""Numbers of RZ and PT."""

Read = Callable[[Any], Any]
"""Function from the running warps to an array (warps, 32), (warps, 1) or (1, 1)."""


@dataclass(frozen=True, slots=True)
class Operand:
    text: str
    file: str = ""
    """R, UR, P or UP: register; c: constant; n: number; empty: anything else."""
    number: int = 0
    """Register index, constant offset, or bits of a number."""
    signs: str = ""
    words: tuple[str, ...] = ()
    """Suffixes, such as H0_H0 and 64."""
    bank: int = 0
    index: "Operand | None" = None
    """Register added to a constant's offset."""

    @property
    def zero(self) -> bool:
        return (self.file == "R" and self.number == _ZERO) or (self.file == "UR" and self.number == 63)


def operand(text: str) -> Operand:
    """Parse one operand."""
    text = text.strip()
    if match := _REGISTER.match(text):
        signs, file, number, first, bar, second = match.groups()
        place = {"RZ": _ZERO, "URZ": 63, "PT": _TRUE, "UPT": _TRUE}.get(file + number)
        words = tuple(word for word in (first + second).split(".") if word and word != "reuse")
        return Operand(text, file, int(number) if place is None else place, signs + bar, words)
    if match := _CONSTANT.match(text):
        signs, bank, index, offset, bar = match.groups()
        register = operand(index) if index else None
        return Operand(text, "c", int(offset or "0", 16), signs + bar, (), int(bank, 16), register)
    if re.match(r"-?0x[0-9a-f]+$", text):
        return Operand(text, "n", int(text, 16) & 0xFFFFFFFF)
    if re.match(r"[-+]?(\d+(\.\d*)?(e[-+]?\d+)?|INF|QNAN)$", text):
        value = text.replace("QNAN", "nan")
        return Operand(text, "n", int(np.float32(float(value)).view(np.uint32)))
    return Operand(text)


def split(text: str) -> list[str]:
    """Split operands at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)] if text else []


@dataclass(slots=True)
class Code:
    """An instruction being decoded."""

    kernel: str
    address: int
    opcode: str
    operands: list[Operand]
    guard: str
    target: int | None
    """Index (not address) of the branch target."""

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def location(self) -> Location:
        text = f"{self.guard} {self.opcode} {', '.join(each.text for each in self.operands)}".strip()
        return Location(self.kernel, 0, f"machine code {self.address:#x} {text}")

    def unknown(self, what: str = "is not known") -> Unsupported:
        return Unsupported(f"machine code: {self.opcode} {what}", self.location)

    def only(self, *known: str) -> set[str]:
        """Return the opcode's modifiers; raises Unsupported if one is not in `known`."""
        if not set(self.words) <= set(known):
            raise self.unknown()
        return set(self.words)

    def count(self, *allowed: int) -> None:
        if len(self.operands) not in allowed:
            raise self.unknown("of this form is not known")

    def outputs(self) -> tuple[list[Operand], Operand, list[Operand]]:
        """Return destination predicates, destination register, and sources."""
        first, *rest = self.operands
        written = []
        while rest and rest[0].file in ("P", "UP") and "!" not in rest[0].signs:
            written.append(rest.pop(0))
        return written, first, rest


def constant(value: int, kind: type = U32) -> Any:
    return np.full((1, 1), value & (0xFFFFFFFFFFFFFFFF if kind is U64 else 0xFFFFFFFF), kind)


def _plain(of: Operand, code: Code) -> Read:
    """Reader of 32 bits of a register or constant; ignores prefixes."""
    number = of.number
    if of.zero or of.file == "n":
        made = constant(0 if of.zero else number)
        return lambda s: made
    if of.file == "R":
        return lambda s: s.R[number][s.w]
    if of.file == "UR":
        return lambda s: s.UR[number][s.w]
    if of.file == "c" and of.index is None:
        return lambda s: s.bank(of.bank)[number : number + 4].view(U32)[None]
    raise code.unknown(f"takes {of.text}, which is not known,")


def bits(of: Operand, code: Code) -> Read:
    """Reader of a 32-bit integer."""
    plain = _plain(of, code)
    if of.words:
        raise code.unknown(f"takes {of.text}, which is not known,")
    if not of.signs:
        return plain
    if of.signs == "-":
        return lambda s: U32(0) - plain(s)
    if of.signs == "~":
        return lambda s: ~plain(s)
    if of.signs == "||":
        return lambda s: np.abs(plain(s).view(I32)).view(U32)
    raise code.unknown(f"takes {of.text}, which is not known,")


def signed(of: Operand, code: Code) -> Read:
    read = bits(of, code)
    return lambda s: read(s).view(I32)


def real(of: Operand, code: Code, *, flush: bool = False) -> Read:
    """Reader of a float32. flush: subnormals become zero."""
    plain, signs = _plain(of, code), of.signs
    if of.words or signs.replace("|", "").replace("-", ""):
        raise code.unknown(f"takes {of.text}, which is not known,")

    def read(s: Any) -> Any:
        value = plain(s)
        if "|" in signs:
            value = value & U32(0x7FFFFFFF)
        if "-" in signs:
            value = value ^ U32(0x80000000)
        if flush:
            value = np.where(value & U32(0x7F800000), value, value & U32(0x80000000))
        return value.view(F32)

    return read


def wide(of: Operand, code: Code) -> Read:
    """Reader of a 64-bit integer, such as a register pair; immediates are sign-extended."""
    number = of.number
    if of.zero:
        made = constant(0, U64)
        return lambda s: made
    if of.file in ("R", "UR"):

        def pair(s: Any) -> Any:
            file = s.R if of.file == "R" else s.UR
            return file[number][s.w].astype(U64) | file[number + 1][s.w].astype(U64) << U64(32)

        if of.signs not in ("", "-"):
            raise code.unknown(f"takes {of.text}, which is not known,")
        return (lambda s: U64(0) - pair(s)) if of.signs else pair
    if of.file == "c" and of.index is None and not of.signs:
        return lambda s: s.bank(of.bank)[number : number + 8].view(U64)[None]
    if of.file == "n":
        value = constant(number - (1 << 32) if number >> 31 else number, U64)
        return lambda s: value
    raise code.unknown(f"takes {of.text}, which is not known,")


def predicate(of: Operand, code: Code) -> Read:
    number, turned = of.number, "!" in of.signs
    if of.file not in ("P", "UP"):
        raise code.unknown(f"takes {of.text} for a predicate, which is not known,")
    if number == _TRUE:
        made = np.full((1, 1), not turned)
        return lambda s: made
    if of.file == "P":
        return (lambda s: ~s.P[number][s.w]) if turned else (lambda s: s.P[number][s.w])
    return (lambda s: ~s.UP[number][s.w]) if turned else (lambda s: s.UP[number][s.w])


def result(of: Operand, code: Code) -> Callable[[Any, Any], None]:
    """Writer of a register."""
    number = of.number
    if of.signs or of.words or of.file not in ("R", "UR"):
        raise code.unknown(f"writes {of.text}, which is not known,")
    if of.zero:
        return lambda s, value: None
    if of.file == "UR":
        return lambda s, value: s.put_uniform(number, value)
    return lambda s, value: s.put(number, value)


def pair(of: Operand, code: Code) -> Callable[[Any, Any], None]:
    """Writer of a 64-bit register pair."""
    if of.zero:
        return lambda s, value: None
    low = result(of, code)
    high = result(Operand(of.text, of.file, of.number + 1), code)

    def write(s: Any, value: Any) -> None:
        low(s, value.astype(U32))
        high(s, (value >> U64(32)).astype(U32))

    return write


def truth(of: Operand, code: Code) -> Callable[[Any, Any], None]:
    """Writer of a predicate."""
    number = of.number
    if of.number == _TRUE:
        return lambda s, value: None
    if of.file == "P":
        return lambda s, value: s.put_truth(number, value)
    if of.file == "UP":
        return lambda s, value: s.put_uniform_truth(number, value)
    raise code.unknown(f"writes {of.text}, which is not known,")
