"""Atomic operations: results, and the ordering between programs that they establish.

Threads take turns in order. A release at an address orders everything its program did before the last barrier, and its
own thread's work, before a later acquire there; each program keeps a vector clock of what it knows of the others.
Operations by many threads at once are counters, not locks: they order nothing.
Source: NVIDIA, "PTX ISA", chapter 8 (memory consistency); Lamport 1978; Mattern 1989 (vector clocks).
"""

from collections.abc import Callable

import numpy as np

from ptx_check.rounding import bf16_to_f32, f32_to_bf16, halves, pack

TYPES = {"b16": "u2", "f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8", "b32": "u4", "u32": "u4", "s32": "i4",
         "b64": "u8", "u64": "u8", "s64": "i8", "f16x2": "u4", "bf16x2": "u4"}  # fmt: skip
UFUNCS: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_FEW = 32
"""Maximum threads of a program in an operation that orders programs."""
_PROGRAMS = 2048
"""With more programs all are assumed to be ordered: their clocks would not fit in memory."""


def _sum_of_bf16(a, b):
    return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b))


def _in_pairs(one: Callable) -> Callable:
    def both(a, b):
        (a_low, a_high), (b_low, b_high) = halves(a), halves(b)
        return pack(one(a_low, b_low), one(a_high, b_high))

    return both


_SPECIAL: dict[tuple[str, str], Callable] = {
    ("add", "bf16"): _sum_of_bf16,
    ("add", "bf16x2"): _in_pairs(_sum_of_bf16),
    ("add", "f16x2"): _in_pairs(lambda a, b: (a.view(np.float16) + b.view(np.float16)).view(np.uint16)),
    ("exch", "b32"): lambda a, b: b,
    ("exch", "b64"): lambda a, b: b,
    ("inc", "u32"): lambda a, b: np.where(a >= b, np.uint32(0), a + np.uint32(1)),
    ("dec", "u32"): lambda a, b: np.where((a == 0) | (a > b), b, a - np.uint32(1)),
}


def take_turns(view, positions, operation: str, kind: str, data, compared=None, *, wanted: bool = True):
    """Apply view[position] = operation(view[position], datum) sequentially. Returns the old values, or None if unused.
    compared: expected values of cas."""
    view, data = view.view(TYPES[kind]), data.view(TYPES[kind])
    if operation in UFUNCS and (operation, kind) not in _SPECIAL and not wanted:
        UFUNCS[operation].at(view, positions, data)
        return None
    found = np.empty_like(data)
    apply: Callable = _SPECIAL.get((operation, kind)) or UFUNCS.get(operation, np.maximum)
    for lanes in _turns(positions):
        places = positions[lanes]
        found[lanes] = old = view[places]
        if operation == "cas":
            view[places] = np.where(old == compared.view(TYPES[kind])[lanes], data[lanes], old)
        else:
            view[places] = apply(old, data[lanes])
    return found


def _turns(positions) -> list:
    """Groups of lanes without repeated addresses: the first lane at each address, then the second, and so on."""
    if len(positions) == 1:
        return [slice(None)]
    order = np.argsort(positions, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(positions[order]) != 0])
    turns = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    return np.split(order[np.argsort(turns, kind="stable")], np.cumsum(np.bincount(turns))[:-1])


class Clocks:
    """Vector clocks of a launch: what each program is ordered after in every other program."""

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self.known: np.ndarray | None = None
        """[p, q] = n: program p is ordered after all barrier intervals of program q below n - 1, and after the accesses
        of q's releasing thread in interval n - 1. None until an operation orders programs."""
        self.too_many = False
        self.tellers = np.full(programs, -1, np.int64)
        self.told: dict[tuple[int, int], np.ndarray] = {}
        """Clock that an acquire receives, by address."""

    def exchange(self, base: int, positions, programs, threads, stretches, acquires: bool, releases: bool) -> None:
        """Update the clocks for accesses by threads of programs (arrays) to positions of a buffer."""
        if not (acquires or releases) or np.bincount(programs - programs.min()).max() > _FEW:
            return
        if self.programs > _PROGRAMS:
            self.too_many = True
            return
        if self.known is None:
            self.known = np.zeros((self.programs, self.programs), np.int32)
        for place, program, thread, stretch in zip(*(x.tolist() for x in (positions, programs, threads, stretches))):
            told = self.told.setdefault((base, place), np.zeros(self.programs, np.int32))
            if acquires:
                np.maximum(self.known[program], told, out=self.known[program])
            if releases:
                self.tellers[program] = thread
                np.maximum(told, self.known[program], out=told)
                told[program] = max(told[program], stretch + 1)

    def ordered(self, program, stretch, thread, later) -> np.ndarray:
        """Whether accesses in an earlier barrier interval happened before what `later` programs do now."""
        if self.known is None:
            return np.full(np.broadcast_shapes(program.shape, later.shape), self.too_many)
        several = (program >= self.programs) | (program < 0)  # an atomic operation of several programs, or none
        program = np.where(several, 0, program)
        known = self.known[later, program] - 1
        return ~several & ((stretch < known) | ((stretch == known) & (self.tellers[program] == thread)))

    def all_told(self, base: int, place: int, program: int) -> bool:
        """Whether a program has acquired everything released at an address."""
        told = self.told.get((base, place))
        return told is not None and self.known is not None and bool(
            np.delete(told <= self.known[program], program).all()
        )  # fmt: skip
