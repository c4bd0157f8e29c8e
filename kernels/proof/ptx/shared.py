"""Shared memory of a running chunk of programs: loads, stores, and asynchronous copies into it.

A copy's bytes arrive at the wait for its group, not before: until then the place holds POISON, so that who reads too
early reads what nobody wrote. Source: NVIDIA, "PTX ISA", chapter 9.7.9.25 (asynchronous copies).
"""

from __future__ import annotations

import numpy as np

from fasttfm.kernels.proof.ptx.memory import POISON, WORDS, join, split


class Shared:
    def __init__(self, run, size: int) -> None:
        self.run, self.size = run, size
        self.pitch = -(-max(size, 16) // 16) * 16
        self.memory = np.full((run.programs, self.pitch // 4), POISON[4], dtype=np.uint32)
        self.flat: dict[int, np.ndarray] = {
            width: self.memory.reshape(-1).view(dtype) for width, dtype in WORDS.items()
        }
        self.rows = {width: np.arange(run.programs, dtype=np.int64)[:, None] * (self.pitch // width) for width in WORDS}

    def positions(self, index, address, mask, width) -> np.ndarray:
        """Of words of `width` bytes in their program's row; what lies outside is reported and moved inside."""
        shift = np.uint32(width.bit_length() - 1)
        turned = address if width == 1 else (address >> shift) | (address << (np.uint32(32) - shift))
        last = np.uint32(max(self.size - width, 0)) >> shift
        wrong = turned > last  # beyond, or not aligned: then its lowest bits have become the highest
        if wrong.any() or self.size < width:
            self.complain(index, address, mask, width)
            turned = np.minimum(address >> shift, last)
        return turned.astype(np.int64)

    def complain(self, index, address, mask, width) -> None:
        lanes = np.ones((1, 1), dtype=bool) if mask is None else mask
        if (((address & np.uint32(width - 1)) != 0) & lanes).any():
            self.run.fault("alignment", index, f"a shared address that {width} bytes do not divide")
        if ((address.astype(np.int64) + width > self.size) & lanes).any():
            self.run.fault("bounds", index, f"an access of {width} bytes outside of {self.size} bytes of shared memory")

    def gather(self, index, address, mask, width) -> np.ndarray:
        """Words of so many bytes, one for every address."""
        positions = self.positions(index, address, mask, width)
        if self.run.checks:
            self.run.races.read(index, address, mask, width)
        return self.flat[width].take(positions + self.rows[width])

    def load(self, index, address, guard, size, count, kept):
        mask = self.run.where(guard)
        raw = self.gather(index, address, mask, size * count)
        if size in POISON:
            self.check_written(index, raw, mask, size)
        parts = split(raw, size, count)
        if mask is None or not kept:
            return parts
        return tuple(np.where(mask, part, old) for part, old in zip(parts, kept))

    def check_written(self, index, raw, mask, size) -> None:
        """raw: what was read, by words of one or more elements of `size` bytes."""
        hit = raw.view(WORDS[size]) == POISON[size]
        if hit.any():
            hit = hit.reshape(*raw.shape, -1).any(-1)
            if mask is None or (hit & mask).any():
                self.run.fault("unwritten", index, "a load from shared memory that nobody wrote, or too early")

    def store(self, index, address, guard, size, values) -> None:
        mask, width = self.run.where(guard), size * len(values)
        shape = self.run.shape
        self.put(index, address, mask, join(values, shape, size), width)

    def put(self, index, address, mask, packed, width, code=None) -> None:
        """Stores words; packed has all programs and threads."""
        positions = np.broadcast_to(self.positions(index, address, mask, width) + self.rows[width], packed.shape)
        if mask is None:
            positions, packed = positions.ravel(), packed.ravel()
        else:
            chosen = np.broadcast_to(mask, packed.shape)
            positions, packed = positions[chosen], packed[chosen]
        self.flat[width][positions] = packed
        if self.run.checks:
            kept = self.flat[width][positions].view(np.uint8) == np.ascontiguousarray(packed).view(np.uint8)
            if not kept.all() and ("bounds", index) not in self.run.launch.faults:
                self.run.fault("value", index, "threads store different values at one place of shared memory")
            self.run.races.write(index, address, mask, width, code)


class Copies:
    """cp.async: what is on its way, group by group. Groups are counted per program, whose threads go together."""

    def __init__(self, run) -> None:
        self.run = run
        self.committed = np.zeros((run.programs, 1), dtype=np.int64)
        self.pending: list[tuple] = []

    def issue(self, index, destination, source, guard, width, count) -> None:
        run = self.run
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return
        if count is None:
            count = run.zero + np.uint32(width)
        wanted = count != 0
        reading = wanted if mask is None else wanted & mask
        packed = np.zeros(run.shape, dtype=WORDS[width])
        whole = mask is None and wanted.all()
        if reading.any():
            pieces = run.memory.locate(index, source, None if whole else reading, width)
            for buffer, offsets, lanes in pieces:
                raw = run.memory.gather(index, buffer, offsets, lanes, min(width, 4), width // min(width, 4))
                words = join(raw, run.shape, min(width, 4))
                packed = words if lanes is None else np.where(np.broadcast_to(lanes, run.shape), words, packed)
        partial = (count != 0) & (count != width)
        if partial.any():
            step = np.arange(width, dtype=np.uint32)
            lanes = np.ascontiguousarray(packed).view(np.uint8).reshape(*run.shape, width)
            packed = np.where(step < np.broadcast_to(count, run.shape)[..., None], lanes, 0).astype(np.uint8)
            packed = packed.view(WORDS[width])[..., 0]
        if run.checks:
            self.check_order(index, destination, mask, width)
        poison: np.ndarray = np.full((*run.shape, max(1, width // 4)), POISON[4]).view(WORDS[max(width, 4)])[..., 0]
        run.shared.put(index, destination, mask, poison, width)
        self.pending.append((index, destination, mask, np.ascontiguousarray(packed), width, self.committed.copy()))

    def check_order(self, index, destination, mask, width) -> None:
        """A thread's own copies are not ordered among themselves: none may go where one of its others is on its way.
        Those of other threads are races like any."""
        for issued, before, other, _, size, _ in self.pending:
            meet = (before.astype(np.int64) < destination.astype(np.int64) + width) & (
                destination < before.astype(np.int64) + size
            )
            for part in (mask, other):
                meet = meet if part is None else meet & part
            if meet.any():
                byte = int(np.broadcast_to(destination, meet.shape)[meet][0])
                message = f"shared memory at byte {byte} is copied to while an earlier copy to it is on its way"
                return self.run.fault("race", index, message, issued)
        return None

    def commit(self, index) -> None:
        arrived = self.run.rows(index)
        self.committed = self.committed + (1 if arrived is None else arrived.astype(np.int64))

    def wait(self, index, allowed: int) -> None:
        """All but the `allowed` youngest groups have arrived."""
        arrived = self.run.rows(index)
        remaining = []
        for issued, destination, mask, packed, width, group in self.pending:
            done = group < self.committed - allowed
            if arrived is not None:
                done = done & arrived
            if done.any():
                whole = done.all()
                part = mask if whole else (done if mask is None else done & mask)
                self.run.shared.put(issued, destination, part, packed, width)
            if not done.all():
                rest = ~done if mask is None else ~done & mask
                if rest.any():
                    remaining.append((issued, destination, rest if done.any() else mask, packed, width, group))
        self.pending = remaining

    def remember(self) -> None:
        """After a barrier: what is still on its way may be written in the new stretch too."""
        for issued, destination, mask, _, width, _ in self.pending:
            self.run.races.write(issued, destination, mask, width)
