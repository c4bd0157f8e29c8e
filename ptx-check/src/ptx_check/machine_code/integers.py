"""Integer instructions: sums with carries, products, shifts, bits, comparisons."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_check.machine_code.operands import (
    I32,
    U32,
    U64,
    Code,
    Operand,
    Read,
    bits,
    pair,
    predicate,
    result,
    signed,
    truth,
    wide,
)

Step = Callable[[Any], None]
_LOW, _HIGH = U64(0xFFFFFFFF), U64(32)


def _addend(of: Operand, code: Code) -> Read:
    """Reader of an addend in 64 bits, for the carry: -x is 2**32 - x, also for 0."""
    if of.signs == "-":
        plain = bits(Operand(of.text, of.file, of.number, "", of.words, of.bank), code)
        return lambda s: U64(1 << 32) - plain(s).astype(U64)
    plain = bits(of, code)
    return lambda s: plain(s).astype(U64)


def _carries(written: list[Operand], code: Code) -> Callable[[Any, Any], None]:
    """Writer of a sum's carry to up to two predicates: carry > 0 and carry > 1."""
    ways = [truth(each, code) for each in written]

    def write(s: Any, total: Any) -> None:
        carry = total >> _HIGH
        for position, way in enumerate(ways):
            way(s, carry > U64(position))

    return write


def add(code: Code) -> Step:
    words = code.only("X", "64")
    written, target, sources = code.outputs()
    if "64" in words:
        if written or len(sources) != 3:
            raise code.unknown("of this form is not known")
        a, b, c = (wide(each, code) for each in sources)
        write = pair(target, code)
        return lambda s: write(s, a(s) + b(s) + c(s))
    addends = sources[:3] if code.name != "VIADD" else sources
    extra = [predicate(each, code) for each in sources[3:]]
    if bool(extra) != ("X" in words):
        raise code.unknown("of this form is not known")
    if "X" in words and any(each.signs == "-" for each in addends):
        raise code.unknown("of this form is not known")
    reads, put, carry = [_addend(each, code) for each in addends], result(target, code), _carries(written, code)

    def step(s: Any) -> None:
        total = sum((read(s) for read in reads[1:]), reads[0](s))
        for each in extra:
            total = total + each(s).astype(U64)
        put(s, total.astype(U32))
        carry(s, total)

    return step


def multiply_add(code: Code) -> Step:
    words = code.only("X", "WIDE", "U32", "HI", "MOV", "IADD", "SHL", "S32")
    written, target, sources = code.outputs()
    extra = [predicate(each, code) for each in sources[3:]]
    if bool(extra) != ("X" in words):
        raise code.unknown("of this form is not known")
    if words & {"WIDE", "HI"}:
        return _wide_product(code, written, target, sources[:3], extra, "U32" not in words, "HI" in words)
    a, b = (bits(each, code) for each in sources[:2])
    c, put, carry = _addend(sources[2], code), result(target, code), _carries(written, code)
    if written and "X" not in words and "IADD" not in words and "MOV" not in words:
        raise code.unknown("with a carry is not known")

    def step(s: Any) -> None:
        total = (a(s) * b(s)).astype(U64) + c(s)
        for each in extra:
            total = total + each(s).astype(U64)
        put(s, total.astype(U32))
        carry(s, total)

    return step


def _wide_product(code, written, target, sources, extra, with_sign: bool, high: bool) -> Step:
    if len(written) > 1:
        raise code.unknown("of this form is not known")
    read = signed if with_sign else bits
    a, b, c = read(sources[0], code), read(sources[1], code), wide(sources[2], code)
    to = np.int64 if with_sign else U64
    put = result(target, code) if high else pair(target, code)
    carry = truth(written[0], code) if written else None

    def step(s: Any) -> None:
        product = (a(s).astype(to) * b(s).astype(to)).view(U64)
        total = product + c(s)
        if carry is not None:
            carry(s, total < product)
        for each in extra:
            total = total + each(s).astype(U64)
        put(s, (total >> _HIGH).astype(U32) if high else total)

    return step


def scaled_add(code: Code) -> Step:
    """LEA: (a << n) + b; HI: the upper half of a shifted 64-bit value, plus b."""
    words = code.only("HI", "X", "SX32")
    written, target, sources = code.outputs()
    put, carry = result(target, code), _carries(written, code)
    x, b = bits(sources[0], code), _addend(sources[1], code)
    rest = sources[2:]
    above: Read | None = None
    if "HI" in words and "SX32" not in words:
        above = bits(rest.pop(0), code)
    if rest[0].file != "n":
        raise code.unknown("by a register is not known")
    by = U64(rest[0].number)
    extra = predicate(rest[1], code) if "X" in words else None
    if len(rest) != 1 + ("X" in words):
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        low = x(s)
        shifted = low.astype(U64)
        if "HI" in words:
            top = (low.view(I32) >> I32(31)).view(U32) if above is None else above(s)
            shifted = (shifted | top.astype(U64) << _HIGH) << by >> _HIGH
        else:
            shifted = (shifted << by) & _LOW
        total = shifted + b(s)
        if extra is not None:
            total = total + extra(s).astype(U64)
        put(s, total.astype(U32))
        carry(s, total)

    return step


def shift(code: Code) -> Step:
    """SHF: funnel shift of the pair c:a by b; writes its lower or upper (HI) half."""
    words = code.only("L", "R", "U32", "U64", "S32", "S64", "HI", "W")
    code.count(4)
    target, low, by, high = code.operands
    put, a, n, c = result(target, code), bits(low, code), bits(by, code), bits(high, code)
    right, upper, with_sign = "R" in words, "HI" in words, bool(words & {"S32", "S64"})
    narrow = bool(words & {"U32", "S32"})
    most = U64(31 if "W" in words and narrow else 63)

    def step(s: Any) -> None:
        below, above, count = a(s).astype(U64), c(s), n(s).astype(U64)
        count = count & most if "W" in words else np.minimum(count, U64(32 if narrow else 63))
        whole = below | above.astype(U64) << _HIGH
        if not right:
            moved = whole << count
        elif narrow and upper:  # shifts only the upper register
            moved = (above.view(I32).astype(np.int64) if with_sign else above.astype(np.int64)) >> count.view(np.int64)
            moved = moved.view(U64) << _HIGH
        else:
            moved = (whole.view(np.int64) >> count.view(np.int64)).view(U64) if with_sign else whole >> count
        put(s, (moved >> _HIGH if upper else moved).astype(U32))

    return step


def extend(code: Code) -> Step:
    """SGXT: sign-extend (U32: zero-extend) the lowest b bits."""
    words = code.only("U32", "W")
    code.count(3)
    put, a = result(code.operands[0], code), bits(code.operands[1], code)
    if code.operands[2].file != "n" or not 0 < code.operands[2].number <= 32:
        raise code.unknown("by a register is not known")
    free = 32 - code.operands[2].number
    if "U32" in words:
        return lambda s: put(s, a(s) << U32(free) >> U32(free))
    return lambda s: put(s, ((a(s) << U32(free)).view(I32) >> I32(free)).view(U32))


def looked_up(table: int, a: Any, b: Any, c: Any) -> Any:
    """Apply a truth table bitwise: bit 4 a + 2 b + c of `table`."""
    common = _COMMON.get(table)
    if common is not None:
        return common(a, b, c)
    made = (a ^ a) & b & c
    for place in range(8):
        if table >> place & 1:
            made = made | ((a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c))
    return made


_COMMON: dict[int, Callable[[Any, Any, Any], Any]] = {
    0xC0: lambda a, b, c: a & b,
    0xFC: lambda a, b, c: a | b,
    0x3C: lambda a, b, c: a ^ b,
    0x96: lambda a, b, c: a ^ b ^ c,
    0xF8: lambda a, b, c: a | b & c,
    0xEA: lambda a, b, c: a & b | c,
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
    0x30: lambda a, b, c: a & ~b,
    0x33: lambda a, b, c: ~b,
}


def logic(code: Code) -> Step:
    """LOP3: any bitwise function of three operands; the predicate is set if the result is not 0."""
    code.only("LUT")
    operands = list(code.operands)
    out = truth(operands.pop(0), code) if operands[0].file in ("P", "UP") else None
    if len(operands) not in (5, 6) or (len(operands) == 6 and operands[5].text not in ("!PT", "!UPT")):
        raise code.unknown("of this form is not known")
    put, table = result(operands[0], code), operands[4].number
    a, b, c = (bits(each, code) for each in operands[1:4])

    def step(s: Any) -> None:
        made = looked_up(table, a(s), b(s), c(s))
        put(s, made)
        if out is not None:
            out(s, made != U32(0))

    return step


def truth_logic(code: Code) -> Step:
    """PLOP3: two functions of three predicates."""
    code.only("LUT")
    code.count(7)
    one, other, *sources, first, second = code.operands
    ways = [(truth(out, code), table.number) for out, table in ((one, first), (other, second))]
    a, b, c = (predicate(each, code) for each in sources)

    def step(s: Any) -> None:
        values = a(s), b(s), c(s)
        made = [looked_up(table, *values) for _, table in ways]
        for (way, _), value in zip(ways, made):
            way(s, value)

    return step


def permute(code: Code) -> Step:
    """PRMT: select four bytes of a pair by the hex digits of b; digits 8 to 15 replicate the byte's sign."""
    code.only()
    code.count(4)
    target, low, by, high = code.operands
    put, a, c = result(target, code), bits(low, code), bits(high, code)
    choice = bits(by, code)

    def step(s: Any) -> None:
        pair_of, digits = a(s).astype(U64) | c(s).astype(U64) << _HIGH, choice(s)
        made: Any = U32(0)
        for place in range(4):
            digit = digits >> U32(4 * place) & U32(15)
            byte = (pair_of >> (digit & U32(7)).astype(U64) * U64(8) & U64(255)).astype(U32)
            if (digit & U32(8)).any():
                byte = np.where(digit & U32(8), np.where(byte & U32(128), U32(255), U32(0)), byte)
            made = made | byte << U32(8 * place)
        put(s, made)

    return step


def absolute(code: Code) -> Step:
    code.only()
    put, a = result(code.operands[0], code), signed(code.operands[1], code)
    return lambda s: put(s, np.abs(a(s)).view(U32))


def least_or_greatest(code: Code) -> Step:
    """IMNMX, VIMNMX, VIMNMX3, VIADDMNMX: minimum if the predicate holds, else maximum."""
    words = code.only("U32", "RELU", "S32")
    target, *sources, choice = code.operands
    read = bits if "U32" in words else signed
    put, way = result(target, code), predicate(choice, code)
    if code.name == "VIADDMNMX":
        one, other, *rest = sources
        a, b = bits(one, code), bits(other, code)
        kind = U32 if "U32" in words else I32
        reads: list[Read] = [lambda s: (a(s) + b(s)).view(kind), *(read(each, code) for each in rest)]
    else:
        reads = [read(each, code) for each in sources]
    if len(reads) != (3 if code.name == "VIMNMX3" else 2):
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        values = [each(s) for each in reads]
        least, most = values[0], values[0]
        for value in values[1:]:
            least, most = np.minimum(least, value), np.maximum(most, value)
        made = np.where(way(s), least, most)
        put(s, (np.maximum(made, 0) if "RELU" in words else made).view(U32))

    return step


COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip
JOINED: dict[str, Callable[[Any, Any], Any]] = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


def compare(code: Code) -> Step:
    """ISETP: the comparison and its negation, each combined with a predicate; EX: upper half of a 64-bit comparison."""
    words = code.only(*COMPARED, *JOINED, "U32", "EX", "S32")
    code.count(6 if "EX" in words else 5)
    by, joint = (next(w for w in code.words if w in table) for table in (COMPARED, JOINED))
    one, other, left, right, with_, *rest = code.operands
    read = bits if "U32" in words else signed
    puts = truth(one, code), truth(other, code)
    a, b, also = read(left, code), read(right, code), predicate(with_, code)
    lower = predicate(rest[0], code) if rest else None

    def step(s: Any) -> None:
        x, y, p = a(s), b(s), also(s)
        found = COMPARED[by](x, y)
        if lower is not None:
            strict = {"LE": np.less, "GE": np.greater}.get(by)
            if by == "NE":
                found = found | lower(s)
            elif by == "EQ":
                found = found & lower(s)
            else:
                found = (strict(x, y) if strict else found) | (np.equal(x, y) & lower(s))
        puts[0](s, JOINED[joint](found, p))
        puts[1](s, JOINED[joint](~found, p))

    return step


def population(code: Code) -> Step:
    code.only()
    put, a = result(code.operands[0], code), bits(code.operands[1], code)
    return lambda s: put(s, np.bitwise_count(a(s)).astype(U32))


def leading(code: Code) -> Step:
    """FLO: position of the highest bit that differs from the sign (SH: counted from the top); all ones if none does."""
    words = code.only("U32", "SH", "S32")
    put, a = result(code.operands[-2], code), bits(code.operands[-1], code)
    if len(code.operands) == 3:
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        value = a(s)
        if "U32" not in words:
            value = value ^ (value.view(I32) >> I32(31)).view(U32)
        place = np.frexp(value.astype(np.float64))[1] - 1
        place = np.where(value == 0, -1, 31 - place if "SH" in words else place)
        put(s, place.astype(I32).view(U32))

    return step


def reverse(code: Code) -> Step:
    code.only()
    put, a = result(code.operands[0], code), bits(code.operands[1], code)

    def step(s: Any) -> None:
        value = a(s)
        for by, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
            value = (value >> U32(by) & U32(mask)) | (value & U32(mask)) << U32(by)
        put(s, value.byteswap())

    return step


def bit_mask(code: Code) -> Step:
    """BMSK: mask of b ones from bit a on."""
    words = code.only("W", "C")
    put, a, b = result(code.operands[0], code), bits(code.operands[1], code), bits(code.operands[2], code)

    def step(s: Any) -> None:
        start, count = a(s).astype(U64), b(s).astype(U64)
        if "W" in words:
            start, count = start & U64(31), count & U64(31)
        start, count = np.minimum(start, U64(32)), np.minimum(count, U64(32))
        put(s, ((((U64(1) << count) - U64(1)) << start) & _LOW).astype(U32))

    return step


MEANINGS = {
    **dict.fromkeys(("IADD3", "UIADD3", "VIADD", "UVIADD"), add),
    **dict.fromkeys(("IMAD", "UIMAD"), multiply_add),
    **dict.fromkeys(("LEA", "ULEA"), scaled_add),
    **dict.fromkeys(("SHF", "USHF"), shift),
    **dict.fromkeys(("SGXT", "USGXT"), extend),
    **dict.fromkeys(("LOP3", "ULOP3"), logic),
    **dict.fromkeys(("PLOP3", "UPLOP3"), truth_logic),
    **dict.fromkeys(("PRMT", "UPRMT"), permute),
    **dict.fromkeys(("IABS", "UIABS"), absolute),
    **dict.fromkeys(("IMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX", "UIMNMX", "UVIMNMX"), least_or_greatest),
    **dict.fromkeys(("ISETP", "UISETP"), compare),
    **dict.fromkeys(("POPC", "UPOPC"), population),
    **dict.fromkeys(("FLO", "UFLO"), leading),
    **dict.fromkeys(("BREV", "UBREV"), reverse),
    **dict.fromkeys(("BMSK", "UBMSK"), bit_mask),
}
