"""Data movement: registers, constants, special registers, selects, predicate masks, shuffles and votes."""

from typing import Any

import numpy as np

from ptx_check.machine_code.integers import Step
from ptx_check.machine_code.operands import U32, U64, Code, Read, bits, pair, predicate, real, result, truth


def move(code: Code) -> Step:
    code.only("U32")
    code.count(2, 3)
    put, a = result(code.operands[0], code), bits(code.operands[1], code)
    return lambda s: put(s, a(s).copy())


def choose(code: Code) -> Step:
    """SEL, FSEL: the first operand if the predicate holds, else the second."""
    code.only("FTZ")
    code.count(4)
    target, one, other, choice = code.operands
    put, way = result(target, code), predicate(choice, code)
    if code.name == "FSEL":
        x, y = (real(each, code) for each in (one, other))
        return lambda s: put(s, np.where(way(s), x(s).view(U32), y(s).view(U32)))
    a, b = bits(one, code), bits(other, code)
    return lambda s: put(s, np.where(way(s), a(s), b(s)))


_SPECIAL: dict[str, Any] = {
    "SR_TID.X": lambda s: s.tid[s.w],
    "SR_TID.Y": lambda s: U32(0),
    "SR_TID.Z": lambda s: U32(0),
    "SR_CTAID.X": lambda s: s.ctaid[0][s.w],
    "SR_CTAID.Y": lambda s: s.ctaid[1][s.w],
    "SR_CTAID.Z": lambda s: s.ctaid[2][s.w],
    "SR_LANEID": lambda s: s.lane,
    "SR_CgaCtaId": lambda s: U32(0),
    "SRZ": lambda s: U32(0),
    "SR_CLOCKLO": lambda s: U32(s.count & 0xFFFFFFFF),
    "SR_GLOBALTIMERLO": lambda s: U32(s.count & 0xFFFFFFFF),
    "SR_VIRTID": lambda s: U32(0),
}


def special(code: Code) -> Step:
    """S2R, S2UR, CS2R: special registers (thread and program indices); CS2R without .32 writes a pair."""
    words = code.only("32")
    code.count(2)
    value = _SPECIAL.get(code.operands[1].text)
    if value is None:
        raise code.unknown(f"of {code.operands[1].text} is not known")
    if code.name == "CS2R" and "32" not in words:
        both = pair(code.operands[0], code)
        return lambda s: both(s, np.asarray(value(s)).astype(U64))
    put = result(code.operands[0], code)
    return lambda s: put(s, value(s))


def to_uniform(code: Code) -> Step:
    """R2UR: value of the lowest active lane; all active lanes must agree."""
    code.only()
    if len(code.operands) == 3 and code.operands[0].text not in ("PT", "UPT"):
        raise code.unknown("of this form is not known")
    put, a = result(code.operands[-2], code), bits(code.operands[-1], code)

    def step(s: Any) -> None:
        value = np.broadcast_to(a(s), s.shape)
        if s.m is None or s.m.shape[1] == 1:
            first = value[:, :1]
            same = (value == first).all()
        else:
            first = np.take_along_axis(value, s.m.argmax(1)[:, None], 1)
            same = ((value == first) | ~s.m).all()
        if not same:
            s.fault("divergence", code, "a warp's register is made of values that differ between its lanes")
        put(s, first)

    return step


def load_constant(code: Code) -> Step:
    """LDC, ULDC: load from a constant bank."""
    words = code.only("64", "U8", "U16", "32")
    code.count(2)
    target, source = code.operands
    if source.file != "c" or source.signs:
        raise code.unknown("of this form is not known")
    wide, size = "64" in words, 8 if "64" in words else 1 if "U8" in words else 2 if "U16" in words else 4
    put = pair(target, code) if wide else result(target, code)
    index: Read | None = None if source.index is None or source.index.zero else bits(source.index, code)
    kind = {1: np.uint8, 2: np.uint16, 4: U32, 8: U64}[size]

    def step(s: Any) -> None:
        bank = s.bank(source.bank)
        if index is None:
            value = bank[source.number : source.number + size].view(kind)[None]
        else:
            at = index(s).astype(np.int64) + source.number
            inside = (at >= 0) & (at <= len(bank) - size)
            if not (inside | ~s.active()).all():
                s.fault("bounds", code, "a constant outside of its bank")
            at = np.where(inside, at, 0)
            value = bank[at[..., None] + np.arange(size)].view(kind)[..., 0]
        put(s, value if wide else value.astype(U32))

    return step


def from_predicates(code: Code) -> Step:
    """P2R, UP2UR: write seven predicates as bits of a register, under a mask."""
    code.only()
    code.count(4)
    target, _, old, mask = code.operands
    put, kept, chosen = result(target, code), bits(old, code), U32(mask.number)
    uniform = code.name == "UP2UR"
    if code.operands[1].text not in ("PR", "UPR") or mask.file != "n":
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        file = s.UP if uniform else s.P
        made: Any = U32(0)
        for number in range(7):
            if int(chosen) >> number & 1:
                made = made | file[number][s.w].astype(U32) << U32(number)
        put(s, made | (kept(s) & ~chosen))

    return step


def to_predicates(code: Code) -> Step:
    """R2P: set predicates from bits of a register, under a mask."""
    code.only()
    code.count(3)
    _, source, mask = code.operands
    a = bits(source, code)
    if code.operands[0].text != "PR" or mask.file != "n":
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        value = a(s)
        for number in range(7):
            if mask.number >> number & 1:
                s.put_truth(number, (value >> U32(number) & U32(1)) != 0)

    return step


def shuffle(code: Code) -> Step:
    """SHFL: value of another lane; the predicate tells whether that lane is valid."""
    words = code.only("BFLY", "IDX", "UP", "DOWN")
    code.count(5)
    inside, target, *sources = code.operands
    tell, put = truth(inside, code), result(target, code)
    a, by, limit = (bits(each, code) for each in sources)
    mode = next(iter(words))

    def step(s: Any) -> None:
        value, lane, clamp = (np.broadcast_to(each(s), s.shape) for each in (a, by, limit))
        own = s.lane.astype(np.int64)
        segment = (clamp >> U32(8) & U32(31)).astype(np.int64)
        last = (own & segment) | (clamp & U32(31)).astype(np.int64) & ~segment
        lane = (lane & U32(31)).astype(np.int64)
        if mode == "BFLY":
            source = own ^ lane
        elif mode == "UP":
            source = own - lane
        elif mode == "DOWN":
            source = own + lane
        else:
            source = (lane & ~segment) | (own & segment)
        good = source >= last if mode == "UP" else source <= last
        found = np.take_along_axis(value, np.where(good, source, own), 1)
        tell(s, good)
        put(s, found)

    return step


def vote(code: Code) -> Step:
    """VOTE, VOTEU: any or all over active lanes, and their ballot."""
    words = code.only("ANY", "ALL")
    *written, source = code.operands
    read = predicate(source, code)
    ways = [(each.file in ("P", "UP"), (truth if each.file in ("P", "UP") else result)(each, code)) for each in written]

    def step(s: Any) -> None:
        running = s.active()
        holds = np.broadcast_to(read(s), s.shape)
        here = holds & running
        told = here.any(1, keepdims=True) if "ANY" in words else (holds | ~running).all(1, keepdims=True)
        ballot = (here.astype(U64) << np.arange(32, dtype=U64)).sum(1, keepdims=True).astype(U32)
        for is_truth, way in ways:
            way(s, told if is_truth else ballot)

    return step


def elect(code: Code) -> Step:
    """ELECT: true in the lowest active lane."""
    code.only()
    if any(not each.zero and each.file in ("R", "UR") for each in code.operands):
        raise code.unknown("of this form is not known")
    put = truth(code.operands[0], code)

    def step(s: Any) -> None:
        running = s.active()
        put(s, running & (s.lane == running.argmax(1)[:, None]))

    return step


_REDUCED: dict[str, Any] = {"SUM": np.add, "OR": np.bitwise_or, "AND": np.bitwise_and, "XOR": np.bitwise_xor,
                            "MIN": np.minimum, "MAX": np.maximum}  # fmt: skip


def reduce(code: Code) -> Step:
    """REDUX: reduction over all lanes of a warp into a uniform register."""
    words = code.only(*_REDUCED, "S32", "U32")
    code.count(2)
    put, a = result(code.operands[0], code), bits(code.operands[1], code)
    form = next((_REDUCED[word] for word in code.words if word in _REDUCED), np.bitwise_and)

    def step(s: Any) -> None:
        if not s.active().all():
            raise code.unknown("by a part of a warp is not known")
        value = np.broadcast_to(a(s), s.shape)
        made = form.reduce(value.view(np.int32) if "S32" in words else value, axis=1, keepdims=True)
        put(s, made.astype(np.int64).astype(U32))

    return step


MEANINGS = {
    **dict.fromkeys(("MOV", "UMOV"), move),
    **dict.fromkeys(("SEL", "USEL", "FSEL"), choose),
    **dict.fromkeys(("S2R", "S2UR", "CS2R"), special),
    "R2UR": to_uniform,
    **dict.fromkeys(("LDC", "ULDC"), load_constant),
    **dict.fromkeys(("P2R", "UP2UR"), from_predicates),
    "R2P": to_predicates,
    "SHFL": shuffle,
    **dict.fromkeys(("VOTE", "VOTEU"), vote),
    "ELECT": elect,
    "REDUX": reduce,
}
