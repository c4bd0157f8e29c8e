"""Tracking of undefined bits from their origin to their use.

Origins are uninitialized memory, copies that have not arrived, and unwritten registers. Instructions that move bits
also move their marks; instructions that compute mark their whole result. Loading, moving or discarding undefined bits
is allowed. Using them as an address, in a branch or guard, or in a store to global memory is a fault. Marks are masks
of a register's width, 1 for an undefined bit; registers without marks are not in the table, and an empty table costs
nothing.
"""

from collections.abc import Iterable

import numpy as np

FRESH = ""
"""Key for the marks of the last load."""
ONES = {"p": np.bool_(True), "u8": np.uint8(0xFF), "u16": np.uint16(0xFFFF), "u32": np.uint32(0xFFFFFFFF),
        "u64": np.uint64(0xFFFFFFFFFFFFFFFF)}  # fmt: skip
"""All bits of a type."""


def anded(a, b, marks_a, marks_b):
    """Marks of a & b: a defined 0 on either side defines the bit."""
    return (marks_a & (b | marks_b)) | (marks_b & (a | marks_a))


def ored(a, b, marks_a, marks_b):
    """Marks of a | b: a defined 1 on either side defines the bit."""
    return (marks_a & (~b | marks_b)) | (marks_b & (~a | marks_a))


class Undefined:
    """Marks of the registers of a chunk of programs."""

    def __init__(self, run, never: dict[str, str]) -> None:
        self.run = run
        self.marks: dict[str, np.ndarray | tuple] = {}
        self.origins: dict[str, int] = {}
        """Load that each register's marks originate from; absent for unwritten registers."""
        if run.checks:
            self.marks.update({name: np.full((1, 1), ONES[kind]) for name, kind in never.items()})

    def mask(self, name: str, kind) -> np.ndarray:
        """A register's marks in a type of any width; zeros if it has none."""
        marks = self.marks.get(name)
        if not isinstance(marks, np.ndarray):
            return np.zeros((1, 1), kind)
        wanted = np.dtype(kind)
        if marks.dtype.itemsize == wanted.itemsize:
            return marks.view(wanted)
        return marks.astype(f"u{wanted.itemsize}").view(wanted)

    def here(self, names: Iterable[str]) -> frozenset[str]:
        """Marked registers among these, in running threads."""
        running = self.run.active
        found = []
        for name in names:
            marks = self.marks.get(name)
            if marks is not None and (running is None or isinstance(marks, tuple) or (running & (marks != 0)).any()):
                found.append(name)
        return frozenset(found)

    def some(self, names: Iterable[str]) -> np.ndarray:
        """Threads in which any bit of any of these registers is undefined."""
        found = np.zeros((1, 1), dtype=bool)
        for name in names:
            marks = self.marks.get(name)
            if isinstance(marks, np.ndarray):
                found = found | (marks != 0)
        return found

    def whole(self, names: Iterable[str], kind: str) -> np.ndarray:
        """Marks of a computed result: all bits, in threads where an operand has any."""
        ones = ONES[kind]
        return np.where(self.some(names), ones, ones ^ ones)

    def halves(self, names: Iterable[str], kind: str) -> np.ndarray:
        """Marks of a result with separately computed halves: all bits of a half in which an operand has any."""
        ones = ONES[kind]
        bits = ones.itemsize * 4
        low = ones >> ones.dtype.type(bits)
        made = np.zeros((1, 1), ones.dtype)
        for name in names:
            marks = self.mask(name, ones.dtype)
            made = made | np.where(marks & low, low, 0).astype(ones.dtype)
            made = made | np.where(marks & ~low, ~low, 0).astype(ones.dtype)
        return made

    def put(self, name: str, marks: np.ndarray, guard, sources: Iterable[str]) -> None:
        """Update the marks of a register written by running threads that pass the guard.

        sources: registers from which the marks' origin is taken.
        """
        where = self.run.where(guard)
        before = self.marks.get(name)
        if where is not None:
            old = before if isinstance(before, np.ndarray) else marks.dtype.type(0)
            marks = np.where(where, marks, old)
        if marks.any():
            self.marks[name] = marks
            known = (s for s in sources if s in self.origins and (s == FRESH or s in self.marks))
            origin = next((self.origins[s] for s in known), None)
            if origin is not None:
                self.origins[name] = origin
            elif before is None:
                self.origins.pop(name, None)
        else:
            self.marks.pop(name, None)

    def loaded(self, index: int | None, marks: tuple[np.ndarray, ...] | None) -> None:
        """Hold the marks of loaded data until registers receive it."""
        if marks is not None:
            self.marks[FRESH] = marks
            self.origins.pop(FRESH, None)
            if index is not None:
                self.origins[FRESH] = index

    def fresh(self, count: int, kind: str) -> tuple[np.ndarray, ...]:
        """Take the held marks."""
        marks = self.marks.pop(FRESH, None)
        return marks if isinstance(marks, tuple) else (np.zeros((1, 1), ONES[kind].dtype),) * count

    def origin(self, names: Iterable[str]) -> int | None:
        """Load instruction from which the marks of the first marked register originate; None if there is none."""
        return next((self.origins[name] for name in names if name in self.marks and name in self.origins), None)

    def summed(self, index: int, names: tuple[str, ...], sources: tuple[str, ...], scale) -> None:
        """Update the marks of registers into which a product was accumulated, or stored if scale is false."""
        if FRESH in self.marks and (origin := self.origin(sources)) is not None:
            self.origins[FRESH] = origin
        fresh = self.fresh(len(names), "u32")
        for name, marks in zip(names, fresh):
            self.put(name, marks | np.where(scale, self.mask(name, np.uint32), np.uint32(0)), None, (FRESH, name))

    def taken(self, names: Iterable[str], kind) -> tuple[np.ndarray, ...] | None:
        """Marks of stored data; None if all bits are defined."""
        names = tuple(names)
        if self.marks.keys().isdisjoint(names):
            return None
        return tuple(self.mask(name, kind) for name in names)

    def used(self, index: int, names: Iterable[str], guard, what: str) -> None:
        """Report registers used by an instruction that have marks in its threads."""
        where = self.run.where(guard)
        for name in names:
            marks = self.marks.get(name)
            if not isinstance(marks, np.ndarray):
                continue
            hit = marks != 0
            if (hit if where is None else hit & where).any():
                origin = self.origins.get(name)
                if origin is None:
                    self.run.fault("unwritten", index, f"a register that nothing was put in is {what}")
                else:
                    message = f"what nobody wrote, or a copy that has not arrived, is read and {what}"
                    self.run.fault("unwritten", origin, message, index)

    def voted(self, name: str) -> np.ndarray:
        """Mask of the threads of warps with an undefined predicate in any running thread."""
        run = self.run
        marks = self.mask(name, np.bool_)
        if run.active is not None:
            marks = marks & run.active
        warps = np.broadcast_to(marks, (len(marks), run.width)).reshape(len(marks), -1, 32)
        return np.repeat(warps.any(2), 32, axis=1)

    def keep(self, crossing) -> None:
        """Forget block-local registers at the end of a block."""
        for name in [name for name in self.marks if name not in crossing]:
            del self.marks[name]
