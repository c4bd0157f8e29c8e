"""mbarriers: shared-memory words that count arrivals of threads, products and copied bytes, phase by phase.

A wait for a parity ends once the last completed phase has that parity. In a warp-specialized kernel the team waits
until then; in other kernels everything arrives when issued, so an unfinished wait is a deadlock. With a seed the bytes
of copies arrive late, in random order.
Source: NVIDIA, "PTX ISA", chapter 9.7.13.15.
"""

import random

import numpy as np

from ptx_check.faults import Unsupported
from ptx_check.memory import spread

MOST = 63
"""Maximum mbarriers per program."""


class Barriers:
    """The mbarriers of a running chunk of programs, each a word of 8 bytes of shared memory."""

    def __init__(self, run) -> None:
        self.run = run
        self.slots = np.full(run.shared.pitch // 8, -1, dtype=np.int64)
        """Column of each word in the tables below; the last column stands for words without a barrier."""
        shape = (run.programs, MOST + 1)
        self.expected = np.zeros(shape, dtype=np.int64)
        self.pending = np.zeros(shape, dtype=np.int64)
        self.bytes = np.zeros(shape, dtype=np.int64)
        """Bytes of bulk copies that a phase still waits for."""
        self.phase = np.zeros(shape, dtype=np.int64)
        self.commits = np.zeros((*shape, 2), dtype=np.int64)
        """The last tcgen05.commit that arrived in a phase, by the phase's parity."""
        self.late: list[tuple] = []
        """(programs, addresses, bytes) of pending copies."""

    def at(self, index, address, guard):
        """Return the running programs, the column of each one's barrier, and the mask of threads."""
        run = self.run
        mask = run.where(guard)
        programs, place = issuing(run, mask, address)
        place = run.shared.positions(index, place, None, 8)[:, 0]
        return programs, self.slots[place], mask

    def init(self, index, address, guard, count: int) -> None:
        run = self.run
        _, words = issuing(run, run.where(guard), address)
        for word in np.unique(run.shared.positions(index, words, None, 8)):
            if self.slots[word] < 0:
                self.slots[word] = self.slots.max() + 1
        if self.slots.max() >= MOST:
            location = run.launch.code.instructions[index].location
            raise Unsupported(f"more than {MOST} mbarriers of a program", location)
        programs, place, mask = self.at(index, address, guard)
        self.expected[programs, place] = self.pending[programs, place] = count
        self.phase[programs, place] = self.bytes[programs, place] = 0
        self.commits[programs, place] = 0
        self.note("write", index, address, mask)

    def invalidate(self, index, address, guard) -> None:
        programs, place, mask = self.at(index, address, guard)
        if (self.commits[programs, place].max(-1) > self.run.tensor.done[programs, 0, 0]).any():
            message = "an mbarrier is invalidated at which a product arrives that nobody has waited for"
            self.run.fault("race", index, message)
        self.expected[programs, place] = 0
        self.note("write", index, address, mask)

    def note(self, kind: str, index, address, mask) -> None:
        """Record accesses for race detection."""
        if self.run.checks:
            getattr(self.run.races, kind)(index, address, mask, 8)

    def arrive(self, index, address, guard, commit: int = 0) -> None:
        """Arrive with the running threads, or with a commit once all products up to it complete."""
        mask = self.run.where(guard)
        if mask is not None and not mask.any():
            return
        programs, place, mask = self.at(index, address, guard)
        self.check(index, programs, place)
        if commit:
            self.commits[programs, place, self.phase[programs, place] % 2] = commit
        threads = np.broadcast_to(np.True_ if mask is None else mask, self.run.shape).sum(1)[programs]
        self.take(index, programs, place, 1 if commit else threads, mask, commit)
        self.note("exchange", index, address, mask)

    def take(self, index, programs, place, threads, mask, commit: int = 0) -> None:
        """Count the arrival of threads, or of a commit."""
        if (self.pending[programs, place] < threads).any():
            self.run.fault("divergence", index, "more threads arrive at an mbarrier than its phase takes")
        self.pending[programs, place] -= threads
        if self.run.orders is not None and mask is not None:
            self.run.orders.arrive(int(place[0]), mask, commit)
        self.turn(programs, place)

    def turn(self, programs, place) -> None:
        """Complete the phase once all arrivals and bytes are in."""
        over = (self.pending[programs, place] <= 0) & (self.bytes[programs, place] == 0)
        self.phase[programs, place] += over
        self.pending[programs, place] = np.where(over, self.expected[programs, place], self.pending[programs, place])
        if self.run.orders is not None and over.any():
            self.run.orders.turn(int(place[0]), int(self.phase[programs[0], place[0]]))

    def expect(self, index, address, guard, count) -> None:
        """arrive.expect_tx: one thread arrives and announces `count` bytes."""
        mask = self.run.where(guard)
        if mask is not None and not mask.any():
            return
        if mask is None or (spread(mask, self.run.shape).sum(1) > 1).any():
            location = self.run.launch.code.instructions[index].location
            raise Unsupported("several threads that arrive at an mbarrier", location)
        programs, place, mask = self.at(index, address, guard)
        self.check(index, programs, place)
        _, counts = issuing(self.run, mask, count)
        self.bytes[programs, place] += counts[:, 0]
        self.take(index, programs, place, 1, mask)
        self.note("exchange", index, address, mask)

    def complete(self, index, address, guard, count: int):
        """Let `count` bytes of a copy arrive, now or later. Returns the mbarriers and their previous phases."""
        programs, place, _ = self.at(index, address, guard)
        self.check(index, programs, place)
        if self.run.orders is not None:
            self.run.orders.initialised(index, int(np.flatnonzero(self.slots == place[0])[0]))
        phase = self.phase[programs, place]
        self.late.append((programs, place, count))
        if self.run.teams.random is None or not self.run.launch.facts.specialised:
            self.arrived(None)
        return place, phase

    def arrived(self, chance: random.Random | None) -> None:
        """Deliver the bytes of a pending copy (a random one with a seed)."""
        programs, place, count = self.late.pop(chance.randrange(len(self.late)) if chance else 0)
        self.bytes[programs, place] -= count
        self.turn(programs, place)

    def wait(self, index, address, parity) -> np.ndarray:
        """try_wait: whether the last completed phase has this parity."""
        run = self.run
        programs, place, mask = self.at(index, address, None)
        _, parities = issuing(run, mask, parity)
        wanted = parities[:, 0].astype(np.int64) & 1
        self.check(index, programs, place)
        open_still = (self.phase[programs, place] % 2 == wanted).any()
        if open_still and run.launch.facts.specialised:
            self.wait_for(index, int(programs[0]), int(place[0]), int(wanted[0]))
            return np.zeros((1, 1), dtype=bool)
        if open_still:
            run.fault("deadlock", index, f"all threads wait for {self.told(programs[0], place[0])}")
        self.note("exchange", index, address, mask)
        if run.orders is not None:
            run.orders.acquire(int(place[0]))
        run.tensor.finished(programs, self.commits[programs, place, wanted])
        run.bulk.waited(programs, place, self.phase[programs, place])
        return np.ones((1, 1), dtype=bool)

    def wait_for(self, index: int, program: int, place: int, parity: int) -> None:
        """Suspend the running team until a phase of this parity has completed."""

        def over() -> bool:
            return self.phase[program, place] % 2 != parity

        self.run.teams.wait(index, over, lambda: self.told(program, place))

    def told(self, program: int, place: int) -> str:
        where = 8 * int(np.flatnonzero(self.slots == place)[0])
        missing = f"{self.pending[program, place]} arrivals and {self.bytes[program, place]} bytes"
        return f"the mbarrier at byte {where}, whose phase {self.phase[program, place]} lacks {missing}"

    def check(self, index, programs, place) -> None:
        if (self.expected[programs, place] == 0).any():
            self.run.fault("unwritten", index, "an mbarrier that was not initialised")


def issuing(run, mask, *values):
    """Programs with a running thread, and each value (programs, 1) of their first running thread."""
    if mask is None or mask.shape[1] == 1:
        every = np.broadcast_to(np.True_ if mask is None else mask[:, 0], run.programs)
        first = np.zeros(run.programs, dtype=np.int64)
    else:
        every = np.broadcast_to(mask.any(1), run.programs)
        first = np.broadcast_to(mask.argmax(1), run.programs)
    programs = np.flatnonzero(every)
    made = []
    for value in values:
        whole = np.broadcast_to(value, (run.programs, value.shape[1]))
        made.append(whole[programs, first[programs] if value.shape[1] > 1 else 0][:, None])
    return programs, *made
