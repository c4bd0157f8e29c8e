"""The device's memory: the very bytes of the tensors that a launch was given, with bounds and alignment checked.

Addresses are those of this process. A tensor's elements may be touched, and nothing between or beside them. Memory that
nobody wrote is told by its bits: what is allocated under executed() is filled with POISON, a NaN that no computation
makes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

POISON = {2: np.uint16(0xFFA5), 4: np.uint32(0xFFA5FFA5), 8: np.uint64(0xFFA5FFA5FFA5FFA5)}
ACCUMULATED = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
"""Atomic operations."""
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""An unsigned type of every width; of 16 bytes one that numpy copies whole."""


class Buffer:
    """The storage of one or more tensors."""

    def __init__(self, storage: torch.UntypedStorage, tensors: list[torch.Tensor]) -> None:
        self.base, self.size = storage.data_ptr(), storage.nbytes()
        self.storage = storage
        raw: Any = (ctypes.c_uint8 * self.size).from_address(self.base)
        self.bytes: np.ndarray = np.frombuffer(raw, dtype=np.uint8)
        self.words: dict[int, np.ndarray] = {}
        self.allowed = self._allowed(tensors)
        self.written = False

    def view(self, width: int) -> np.ndarray:
        """The whole as elements of so many bytes."""
        if width not in self.words:
            self.words[width] = self.bytes[: self.size // width * width].view(WORDS[width])
        return self.words[width]

    def _allowed(self, tensors: list[torch.Tensor]) -> np.ndarray | None:
        """Which bytes are elements; None: all of them."""
        for tensor in tensors:
            if tensor.is_contiguous() and tensor.numel() * tensor.element_size() == self.size:
                return None
        marks = np.zeros(self.size, dtype=bool)
        for tensor in tensors:
            width = tensor.element_size()
            elements = torch.from_numpy(marks[: self.size // width * width].reshape(-1, width))
            strides = (*(stride * width for stride in tensor.stride()), 1)
            position = tensor.storage_offset() * width
            torch.as_strided(elements, (*tensor.shape, width), strides, position).fill_(True)
        return None if marks.all() else marks

    def inside(self, offsets: np.ndarray, width: int) -> np.ndarray:
        """Whether each offset (uint64) begins `width` bytes that may be touched."""
        if width > self.size:
            return np.zeros(offsets.shape, dtype=bool)
        good = offsets <= np.uint64(self.size - width)
        if self.allowed is not None:
            first = offsets.view(np.int64)
            for step in range(0, width, min(width, 2)):
                good = good & self.allowed.take(first + step, mode="clip")
        return good


def buffers(tensors: Iterable[torch.Tensor]) -> list[Buffer]:
    """One for every storage, in no order."""
    by_storage: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            by_storage.setdefault(storage.data_ptr(), (storage, []))[1].append(tensor)
    return [Buffer(*of) for of in by_storage.values()]


class Global:
    """Loads and stores of a running chunk of programs."""

    def __init__(self, run, known: list[Buffer]) -> None:
        self.run, self.known = run, known
        self.last: dict[int, Buffer] = {}
        """The buffer that an instruction touched last."""

    def locate(self, index, address, mask, width) -> list[tuple[Buffer, np.ndarray, np.ndarray | None]]:
        """(buffer, offsets, mask) of every buffer that is touched; reports the rest."""
        buffer = self.last.get(index)
        for candidate in (*([buffer] if buffer else []), *self.known):
            offsets = address - np.uint64(candidate.base)
            good = candidate.inside(offsets, width)
            if mask is not None:
                good = good | ~mask
            if good.all():
                self.last[index] = candidate
                self.aligned(index, offsets, mask, width)
                return [(candidate, offsets, mask)]
        return self.scattered(index, address, mask, width)

    def scattered(self, index, address, mask, width):
        left = np.ones(address.shape, dtype=bool)
        if mask is not None:
            left = left & mask
        address = np.broadcast_to(address, left.shape)
        pieces = []
        for candidate in self.known:
            offsets = address - np.uint64(candidate.base)
            lanes = left & candidate.inside(offsets, width)
            if lanes.any():
                self.aligned(index, offsets, lanes, width)
                pieces.append((candidate, offsets, lanes))
                left &= ~lanes
        if left.any():
            self.run.fault("bounds", index, self.beside(address[left], width))
        return pieces

    def beside(self, addresses, width) -> str:
        """Where the first of the addresses lies."""
        address = int(addresses[0])
        nearest = min(self.known, key=lambda b: max(b.base - address, address - b.base - b.size + 1, 0), default=None)
        text = f"{len(addresses)} accesses of {width} bytes outside of the launch's tensors"
        if nearest is None:
            return text
        return f"{text}, the first at byte {address - nearest.base:+d} of memory of {nearest.size} bytes"

    def aligned(self, index, offsets, mask, width) -> None:
        wrong = (offsets & np.uint64(width - 1)) != 0
        if wrong.any() and (mask is None or (wrong & mask).any()):
            self.run.fault("alignment", index, f"an address that {width} bytes do not divide")

    def load(self, index, address, guard, size, count, kept):
        """`count` arrays of elements of `size` bytes; where the guard is false, those of `kept`."""
        run, width = self.run, size * count
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return kept or (run.zero.astype(WORDS[size]),) * count
        pieces = self.locate(index, address, mask, width)
        if len(pieces) == 1 and pieces[0][2] is mask:
            buffer, offsets, _ = pieces[0]
            parts = self.gather(index, buffer, offsets, mask, size, count)
            if mask is None or not kept:
                return parts
            return tuple(np.where(mask, part, old) for part, old in zip(parts, kept))
        shape = run.shape
        kept = kept or (np.zeros((1, 1), WORDS[size]),) * count
        made = [np.broadcast_to(old, shape).copy() for old in kept]
        for buffer, offsets, lanes in pieces:
            for destination, part in zip(made, self.gather(index, buffer, offsets, lanes, size, count)):
                np.copyto(destination, part, where=lanes)
        return tuple(made)

    def gather(self, index, buffer, offsets, mask, size, count):
        width = size * count
        positions = (offsets >> np.uint64(width.bit_length() - 1)).view(np.int64)
        raw = buffer.view(width).take(positions, mode="clip")
        if self.run.checks:
            self.run.traffic.read(index, buffer, offsets, mask, width)
        parts = split(raw, size, count)
        if size in POISON:
            for part in parts:
                hit = part == POISON[size]
                if hit.any() and (mask is None or (hit & mask).any()):
                    self.run.fault("unwritten", index, "a load from global memory that nobody wrote")
        return parts

    def store(self, index, address, guard, size, values) -> None:
        run, width = self.run, size * len(values)
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return
        for buffer, offsets, lanes in self.locate(index, address, mask, width):
            flat, packed, threads = self.chosen(buffer, offsets, lanes, width, join(values, run.shape, size))
            positions = (flat >> np.uint64(width.bit_length() - 1)).view(np.int64)
            view = buffer.view(width)
            view[positions] = packed
            buffer.written = True
            if run.checks:
                if (view[positions].view(np.uint8) != packed.view(np.uint8)).any():
                    run.fault("value", index, "threads store different values at one place of global memory")
                run.traffic.write(index, buffer, flat, threads, width)

    def chosen(self, buffer, offsets, lanes, width, values) -> list[np.ndarray]:
        """Offsets, values and threads of the lanes that write, one after the other, without those that may not."""
        everything = [spread(x, self.run.shape) for x in (offsets, values, self.run.threads)]
        good = (offsets <= np.uint64(buffer.size - width)) & ((offsets & np.uint64(width - 1)) == 0)
        if lanes is not None:
            good = good & lanes
        if good.all():
            return [x.ravel() for x in everything]
        good = spread(good, self.run.shape)
        return [x[good] for x in everything]

    def accumulate(self, index, address, guard, operation: str, kind, value) -> None:
        """An atomic operation whose result nobody reads; threads take turns in their order."""
        run, size = self.run, np.dtype(kind).itemsize
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return
        for buffer, offsets, lanes in self.locate(index, address, mask, size):
            flat, data, threads = self.chosen(buffer, offsets, lanes, size, value)
            positions = (flat >> np.uint64(size.bit_length() - 1)).view(np.int64)
            view = buffer.view(size)
            if size in POISON and (view[positions] == POISON[size]).any():
                run.fault("unwritten", index, "an atomic operation on global memory that nobody wrote")
            ACCUMULATED[operation].at(view.view(kind), positions, data.view(kind))
            if run.checks:
                run.traffic.accumulate(index, buffer, flat, threads, size)


def spread(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """broadcast_to, which is slow, where it is needed."""
    return array if array.shape == shape else np.broadcast_to(array, shape)


def split(raw: np.ndarray, size: int, count: int) -> tuple[np.ndarray, ...]:
    """The elements of gathered words."""
    if count == 1:
        return (raw,)
    parts: np.ndarray = raw.view(WORDS[size]).reshape(*raw.shape, count)
    return tuple(np.ascontiguousarray(parts[..., position]) for position in range(count))


def join(values, shape: tuple[int, ...], size: int) -> np.ndarray:
    """The inverse: words of all values side by side."""
    if len(values) == 1:
        return spread(values[0], shape)
    made: np.ndarray = np.empty((*shape, len(values)), dtype=WORDS[size])
    for position, value in enumerate(values):
        made[..., position] = value
    return made.view(WORDS[size * len(values)])[..., 0]
