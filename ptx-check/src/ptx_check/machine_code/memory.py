"""Memory instructions: global, shared and local memory with bounds and alignment checks, cp.async, ldmatrix, atomics.

Shared memory begins at RESERVED; the part below belongs to the system. Unwritten bytes are all ones, a NaN in every
floating-point type.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_check.atomics import take_turns
from ptx_check.machine_code.integers import Step
from ptx_check.machine_code.operands import U32, U64, Code, Operand, Read, bits, operand, predicate, result, truth, wide
from ptx_check.memory import Buffer, pointed_at

RESERVED = 1024
"""Reserved bytes at the beginning of shared memory on sm_90."""
_CACHING = ("E", "CONSTANT", "STRONG", "WEAK", "GPU", "SYS", "CTA", "SM", "EF", "EL", "LU", "BYPASS", "LTC128B",
            "LTC64B", "LTC256B", "NA", "ENL2", "PRIVATE", "MMIO")  # fmt: skip
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def size_of(code: Code, *others: str) -> tuple[int, bool]:
    """Bytes moved by an instruction, and whether they are sign-extended."""
    words = code.only(*_SIZES, *_CACHING, *others)
    return next((_SIZES[word] for word in code.words if word in _SIZES), 4), bool(words & {"S8", "S16"})


def address(of: Operand, code: Code) -> Read:
    """Reader of a 64- or 32-bit address such as [R4.64+UR6+0x8], optionally after desc[UR8]."""
    match = re.match(r"(?:desc\[UR\d+\])?\[([^\]]*)\]$", of.text)
    if match is None:
        raise code.unknown(f"at {of.text} is not known")
    terms = [operand(term) for term in match[1].replace("+-", "+ -").split("+") if term.strip()]
    long = any("64" in each.words for each in terms)
    reads: list[Read] = []
    offset = 0
    for term in terms:
        if term.file == "n":
            offset += term.number - (1 << 32) if term.number >> 31 else term.number
        elif "64" in term.words:
            reads.append(wide(Operand(term.text, term.file, term.number), code))
        else:
            reads.append(_extended(bits(term, code)))
    added, mask = U64(offset & 0xFFFFFFFFFFFFFFFF), U64(0xFFFFFFFFFFFFFFFF if long else 0xFFFFFFFF)

    def read(s: Any) -> Any:
        total = np.full((1, 1), added)
        for each in reads:
            total = total + each(s)
        return np.broadcast_to(total if long else total & mask, s.shape)

    return read


def _extended(read: Read) -> Read:
    return lambda s: read(s).astype(U64)


class Global:
    """Global memory: the tensors of a launch."""

    def __init__(self, known: list[Buffer]) -> None:
        self.known = known
        self.before: list[np.ndarray] = []
        """Contents of `known` before the launch."""
        self.last: dict[int, Buffer] = {}

    def pieces(self, s: Any, code: Code, at: Any, lanes: Any, size: int) -> Any:
        """Return (buffer, offsets, lanes) of every accessed buffer, and report other addresses."""
        if (at[lanes] & U64(size - 1)).any():
            s.fault("alignment", code, f"an address that {size} bytes do not divide")
            lanes = lanes & ((at & U64(size - 1)) == 0)
        buffer = self.last.get(code.address)
        left = lanes
        found = []
        for candidate in (*([buffer] if buffer else []), *self.known):
            offsets = at - U64(candidate.base)
            here = left & candidate.inside(offsets, size)
            if here.any():
                found.append((candidate, offsets.view(np.int64), here))
                self.last[code.address] = candidate
                left = left & ~here
                if not left.any():
                    return found
        if left.any():
            if further := pointed_at(self.known, int(at[left][0])):
                self.known += further
                self.before += [each.bytes.copy() for each in further]
                return self.pieces(s, code, at, lanes, size)
            first = int(at[left][0])
            near = min(self.known, key=lambda b: max(b.base - first, first - b.base - b.size + 1, 0), default=None)
            beside = f", the first at byte {first - near.base:+d} of memory of {near.size} bytes" if near else ""
            s.fault("bounds", code, f"{left.sum()} accesses of {size} bytes outside of the launch's tensors{beside}")
        return found

    def load(self, s: Any, code: Code, at: Any, lanes: Any, size: int) -> list[Any]:
        """Load words of 4 bytes, or one of 1 or 2 bytes."""
        unit = min(size, 4)
        made = [np.zeros(s.shape, U32) for _ in range(max(1, size // 4))]
        for buffer, offsets, here in self.pieces(s, code, at, lanes, size):
            places = np.where(here, offsets, 0) // unit
            s.guess(buffer, places, here, unit)
            view = buffer.view(unit)
            for number, words in enumerate(made):
                np.copyto(words, view.take(places + number, mode="clip"), where=here)
        return made

    def store(self, s: Any, code: Code, at: Any, lanes: Any, size: int, values: list[Any]) -> None:
        unit = min(size, 4)
        for buffer, offsets, here in self.pieces(s, code, at, lanes, size):
            places, view = offsets[here] // unit, buffer.view(unit)
            for number, value in enumerate(values):
                view[places + number] = np.broadcast_to(value, s.shape)[here]
            if buffer.footprint is not None:
                buffer.footprint.note(offsets[here] // size, size, atomic=False)


class Shared:
    """Shared memory of a chunk of programs: `size` bytes each, from RESERVED on."""

    def __init__(self, programs: int, size: int) -> None:
        self.end = RESERVED + size
        self.pitch = -(-self.end // 1024) * 1024
        self.bytes = np.full(programs * self.pitch, 0xFF, np.uint8)
        self.views = {size: self.bytes.view(kind) for size, kind in ((1, np.uint8), (2, np.uint16), (4, U32))}
        self.written, self.writer = (np.zeros(len(self.bytes) // 16, np.int64) for _ in range(2))
        """Time and warp of the last write by a thread, per 16 bytes."""

    def places(self, s: Any, code: Code, at: Any, lanes: Any, size: int, what: str) -> tuple[Any, Any]:
        """Return positions in `bytes` and the lanes with valid addresses; reports the others."""
        at = at.astype(np.int64)
        good = (at >= RESERVED) & (at + size <= self.end)
        if not (good | ~lanes).all():
            bad = lanes & ~good
            where = f"{bad.sum()} of {size} bytes outside of the program's shared memory, the first at {at[bad][0]:#x}"
            s.fault("bounds", code, f"{what}: {where}")
        if ((at & (size - 1)) != 0)[lanes].any():
            s.fault("alignment", code, f"an address in shared memory that {size} bytes do not divide")
            good = good & ((at & (size - 1)) == 0)
        lanes = lanes & good
        return np.where(lanes, at, RESERVED) + s.program[s.w] * self.pitch, lanes

    def load(self, s: Any, code: Code, at: Any, lanes: Any, size: int) -> list[Any]:
        places, _ = self.places(s, code, at, lanes, size, "reads")
        unit = min(size, 4)
        view = self.views[unit]
        return [view.take(places // unit + number).astype(U32) for number in range(max(1, size // 4))]

    def store(self, s: Any, code: Code, at: Any, lanes: Any, size: int, values: list[Any]) -> None:
        places, lanes = self.places(s, code, at, lanes, size, "writes")
        unit, view = min(size, 4), self.views[min(size, 4)]
        some = places[lanes] // unit
        for number, value in enumerate(values):
            view[some + number] = np.broadcast_to(value, s.shape)[lanes]
        grains = places[lanes] >> 4
        self.written[grains], self.writer[grains] = s.count, np.broadcast_to(s.rows[:, None], s.shape)[lanes]


class Local:
    """Local memory of lanes."""

    def __init__(self, lanes: int, size: int) -> None:
        self.size = size
        self.words = np.full((size // 4, lanes // 32, 32), 0xFFFFFFFF, U32)

    def places(self, s: Any, code: Code, at: Any, lanes: Any, size: int) -> tuple[Any, ...]:
        at = at.astype(np.int64)
        good = (at >= 0) & (at + size <= self.size) & (at % size == 0)
        if not (good | ~lanes).all():
            bad = int(at[lanes & ~good][0])
            s.fault("bounds", code, f"{size} bytes at {bad:#x} of a thread's own memory of {self.size}")
        rows = np.broadcast_to(s.rows[:, None], s.shape)
        return np.where(good, at, 0) // 4, rows, np.broadcast_to(s.lane, s.shape), lanes & good

    def load(self, s: Any, code: Code, at: Any, lanes: Any, size: int) -> list[Any]:
        word, row, lane, _ = self.places(s, code, at, lanes, size)
        if size < 4:
            return [self.words[word, row, lane] >> _bits_below(at) & U32((1 << 8 * size) - 1)]
        return [self.words[word + number, row, lane] for number in range(size // 4)]

    def store(self, s: Any, code: Code, at: Any, lanes: Any, size: int, values: list[Any]) -> None:
        word, row, lane, good = self.places(s, code, at, lanes, size)
        if size < 4:  # keep the rest of the word
            below = _bits_below(at)
            part = U32((1 << 8 * size) - 1) << below
            values = [self.words[word, row, lane] & ~part | values[0] << below & part]
        for number, value in enumerate(values):
            self.words[word[good] + number, row[good], lane[good]] = np.broadcast_to(value, s.shape)[good]


def _bits_below(at: Any) -> Any:
    """Bit offset of an address in its 4-byte word."""
    return (at & U64(3)).astype(U32) * U32(8)


_SPACES: dict[str, Callable[[Any], Any]] = {
    "G": lambda s: s.memory, "S": lambda s: s.shared, "L": lambda s: s.local,
}  # fmt: skip


def load(code: Code) -> Step:
    """LDG, LDS, LDL: load from global, shared or local memory."""
    size, with_sign = size_of(code)
    code.count(2)
    space = _SPACES[code.name[2]]
    target, source = code.operands
    at = address(source, code)
    puts = [result(_next(target, number), code) for number in range(max(1, size // 4))]

    def step(s: Any) -> None:
        values = space(s).load(s, code, at(s), s.active(), size)
        for put, value in zip(puts, values):
            if with_sign:
                value = value.astype(np.int8 if size == 1 else np.int16).astype(np.int32).view(U32)
            put(s, value)

    return step


def store(code: Code) -> Step:
    """STG, STS, STL: store to global, shared or local memory."""
    size, _ = size_of(code)
    code.count(2)
    space = _SPACES[code.name[2]]
    target, source = code.operands
    at = address(target, code)
    reads = [bits(_next(source, number), code) for number in range(max(1, size // 4))]
    return lambda s: space(s).store(s, code, at(s), s.active(), size, [read(s) for read in reads])


def _next(of: Operand, number: int) -> Operand:
    """Register at an offset from another."""
    return of if of.zero or not number else Operand(of.text, of.file, of.number + number)


def copy(code: Code) -> Step:
    """LDGSTS: copy from global to shared memory, or zeros if the predicate is false.

    Completes immediately (early) or at the wait for its group (late).
    """
    size, _ = size_of(code)
    code.count(2, 3)
    inside, outside = (address(each, code) for each in code.operands[:2])
    some = predicate(code.operands[2], code) if len(code.operands) > 2 else None

    def step(s: Any) -> None:
        lanes = s.active()
        taken = lanes if some is None else lanes & some(s)
        values = s.memory.load(s, code, outside(s), taken, size)
        if s.order.copies:
            s.shared.store(s, code, inside(s), lanes, size, [U32(0xFFFFFFFF)] * len(values))
            s.copies.append((s.rows, s.groups[s.rows].copy(), code, inside(s).copy(), lanes.copy(), size, values))
        else:
            s.shared.store(s, code, inside(s), lanes, size, values)

    return step


def commit(code: Code) -> Step:
    """LDGDEPBAR: commit the copies so far as a group."""
    code.only()

    def step(s: Any) -> None:
        s.groups[s.rows] += 1

    return step


def wait(code: Code) -> Step:
    """DEPBAR: wait for all copy groups except the youngest.

    Scoreboards other than SB0 guard registers, which are written immediately here.
    """
    code.only("LE")
    code.count(1, 2)
    board, most = code.operands[0].text, code.operands[1].number if len(code.operands) > 1 else 0
    if not re.match(r"SB\d$", board):
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        if board == "SB0" and (s.copies or s.stores):
            s.arrive(s.rows, s.groups - most)

    return step


def arrived(s: Any, rows: Any, before: Any) -> None:
    """Complete the copies of these warps with groups below `before`."""
    kept = []
    waiting = np.zeros(len(s.groups), bool)
    waiting[rows] = True
    for entry in s.copies:
        of, group, code, at, lanes, size, values = entry
        here = waiting[of] & (group < before[of])
        if here.any():
            s.select(of[here])
            s.shared.store(s, code, at[here], lanes[here], size, [v[here] for v in values])
        if not here.all():
            rest = ~here
            kept.append((of[rest], group[rest], code, at[rest], lanes[rest], size, [v[rest] for v in values]))
    s.copies = kept


def load_matrices(code: Code) -> Step:
    """LDSM: 8x8 matrices of 16-bit elements, one lane's address per row; MT88: transposed."""
    words = code.only("16", "M88", "MT88", "2", "4")
    code.count(2)
    count, turned = 4 if "4" in words else 2 if "2" in words else 1, "MT88" in words
    at = address(code.operands[1], code)
    puts = [result(_next(code.operands[0], number), code) for number in range(count)]

    def step(s: Any) -> None:
        whole(s, code)
        lanes = np.broadcast_to(s.lane < 8 * count, s.shape)
        words_of = s.shared.load(s, code, at(s), lanes, 16)
        matrices = np.stack(words_of, -1)[:, : 8 * count].reshape(-1, count, 8, 4)
        if turned:
            matrices = np.ascontiguousarray(matrices.view(np.uint16).swapaxes(2, 3)).view(U32)
        for number, put in enumerate(puts):
            put(s, matrices[:, number].reshape(-1, 32))

    return step


def store_matrices(code: Code) -> Step:
    """STSM: store 8x8 matrices of 16-bit elements, one lane's address per row; MT88: transposed."""
    words = code.only("16", "M88", "MT88", "2", "4")
    code.count(2)
    count, turned = 4 if "4" in words else 2 if "2" in words else 1, "MT88" in words
    at = address(code.operands[0], code)
    reads = [bits(_next(code.operands[1], number), code) for number in range(count)]

    def step(s: Any) -> None:
        whole(s, code)
        matrices = np.stack([np.broadcast_to(read(s), s.shape).reshape(-1, 8, 4) for read in reads], 1)
        if turned:
            matrices = np.ascontiguousarray(matrices.view(np.uint16).swapaxes(2, 3)).view(U32)
        rows = np.zeros((len(matrices), 32, 4), U32)
        rows[:, : 8 * count] = matrices.reshape(-1, 8 * count, 4)
        lanes = np.broadcast_to(s.lane < 8 * count, s.shape)
        s.shared.store(s, code, at(s), lanes, 16, [rows[..., word] for word in range(4)])

    return step


def whole(s: Any, code: Code) -> None:
    """Report a warp of which only some lanes are active."""
    if s.m is not None and s.m.shape[1] != 1:
        s.fault("divergence", code, "not all lanes of a warp come here together")


_ATOMIC = {"ADD": "add", "MIN": "min", "MAX": "max", "AND": "and", "OR": "or", "XOR": "xor", "EXCH": "exch",
           "CAS": "cas"}  # fmt: skip
_TYPES = {"S32": "s32", "U32": "u32", "64": "u64", "S64": "s64", "F32": "f32", "F16x2": "f16x2", "F64": "f64"}


def atomic(code: Code) -> Step:
    """ATOMG, REDG, RED: atomics on global memory, lane by lane."""
    words = code.only(*_ATOMIC, *_TYPES, *_CACHING, "FTZ", "RN")
    form = next(_ATOMIC[word] for word in code.words if word in _ATOMIC)
    kind = next((_TYPES[word] for word in code.words if word in _TYPES), "u32")
    if kind not in ("u32", "s32", "f32") or words & {"64"}:
        raise code.unknown()
    operands = list(code.operands)
    told = truth(operands.pop(0), code) if operands[0].file == "P" else None
    put = None if operands[0].text.startswith(("desc", "[")) else result(operands.pop(0), code)
    at, *reads = address(operands[0], code), *(bits(each, code) for each in operands[1:])
    if form == "cas" or form in ("and", "or", "xor", "exch"):
        kind = "b32"

    def step(s: Any) -> None:
        values = [np.broadcast_to(read(s), s.shape) for read in reads]
        made = np.zeros(s.shape, U32)
        for buffer, offsets, here in s.memory.pieces(s, code, at(s), s.active(), 4):
            s.guess(buffer, np.where(here, offsets, 0) // 4, here, 4)
            data = [value[here] for value in values]
            compared, new = (data[0], data[1]) if form == "cas" else (None, data[0])
            found = take_turns(buffer.view(4), offsets[here] // 4, form, kind, new, compared, wanted=put is not None)
            if put is not None:
                made[here] = found.view(U32)
            if buffer.footprint is not None:
                buffer.footprint.note(offsets[here] // 4, 4, atomic=True)
        if put is not None:
            put(s, made)
        if told is not None:
            told(s, s.active())

    return step


def fence(code: Code) -> Step:
    """FENCE.VIEW.ASYNC: make these warps' shared-memory writes visible to products and bulk copies."""
    code.only("VIEW", "ASYNC", "S", "G")
    if "G" in code.words:
        raise code.unknown()

    def step(s: Any) -> None:
        s.fenced[s.rows] = s.count

    return step


MEANINGS = {
    **dict.fromkeys(("LDG", "LDS", "LDL"), load),
    **dict.fromkeys(("STG", "STS", "STL"), store),
    "LDGSTS": copy,
    "LDGDEPBAR": commit,
    "DEPBAR": wait,
    "LDSM": load_matrices,
    "STSM": store_matrices,
    **dict.fromkeys(("ATOMG", "REDG", "RED"), atomic),
    "FENCE": fence,
}
