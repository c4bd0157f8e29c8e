"""Global memory: the bytes of a launch's tensors, with checks of bounds and alignment.

Addresses are those of this process. Only elements of tensors may be accessed, not the gaps between or around them.
Uninitialized bytes are marked (allocations.py); values loaded from them are tracked to their use (undefined.py).
"""

import gc
from collections.abc import Iterable

import numpy as np
import torch

from ptx_check import sample
from ptx_check.allocations import bytes_of, marks_of
from ptx_check.atomics import TYPES, take_turns

WORD = 4
"""Aligned word size with which a compiler may load 16-bit numbers; the last word may extend past its tensor."""
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Unsigned type by width; for 16 bytes a type that numpy copies as a whole."""


class Buffer:
    """The storage of one or more tensors."""

    def __init__(self, storage: torch.UntypedStorage, tensors: list[torch.Tensor]) -> None:
        self.base, self.size = storage.data_ptr(), storage.nbytes()
        self.storage = storage
        self.bytes = bytes_of(storage, WORD)
        self.words: dict[int, np.ndarray] = {}
        self.marks = marks_of(storage)
        """Uninitialized bits of each byte; None: fully initialized."""
        self.unknown = sample.unknown.of(storage)
        """Bytes that skipped programs of an earlier launch may have written; None: none."""
        self.footprint: sample.Footprint | None = None
        """Access record of this launch, if enabled."""
        self.allowed = self._allowed(tensors)

    def view(self, width: int) -> np.ndarray:
        """View of the buffer as elements of `width` bytes."""
        if width not in self.words:
            self.words[width] = self.bytes[: len(self.bytes) // width * width].view(WORDS[width])
        return self.words[width]

    def undefined(self, width: int) -> np.ndarray | None:
        """View of the marks as elements of `width` bytes."""
        return None if self.marks is None else self.marks[: self.size // width * width].view(WORDS[width])

    def touches_unknown(self, positions, mask, width: int) -> bool:
        """Whether any of these words contains an unknown byte."""
        if self.unknown is None:
            return False
        found = self.unknown[: self.size // width * width].view(WORDS[width]).take(positions, mode="clip") != 0
        return bool((found if mask is None else found & mask).any())

    def _allowed(self, tensors: list[torch.Tensor]) -> np.ndarray | None:
        """Mask of the bytes that belong to elements; None: all bytes do."""
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
        """Whether each offset (uint64) begins `width` accessible bytes."""
        if width > self.size:
            return np.zeros(offsets.shape, dtype=bool)
        good = offsets <= np.uint64(self.size - width)
        if self.allowed is not None:
            first = offsets.view(np.int64)
            for step in range(0, width, min(width, 2)):
                good = good & self.allowed.take(first + step, mode="clip")
        return good


def buffers(tensors: Iterable[torch.Tensor]) -> list[Buffer]:
    """One buffer per storage, unordered."""
    by_storage: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            by_storage.setdefault(storage.data_ptr(), (storage, []))[1].append(tensor)
    return [Buffer(*of) for of in by_storage.values()]


_FAR = 1 << 40


def pointed_at(known: list[Buffer], address: int) -> list[Buffer]:
    """Find tensors passed to a launch by address, in 64-bit elements: those whose storage has this address."""
    words = np.concatenate([buffer.view(8) for buffer in known if buffer.size >= 8] or [np.zeros(0, np.uint64)])
    near = set(words[(words <= np.uint64(address)) & (words + np.uint64(_FAR) > np.uint64(address))].tolist())
    if not near:
        return []
    every = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    alive = (each for each in every if each.layout == torch.strided and each.device.type == "cpu")
    found = buffers(each for each in alive if each.data_ptr() in near)
    found = [each for each in found if each.base <= address < each.base + each.size]
    for buffer in found:
        buffer.footprint = None if known[0].footprint is None else sample.Footprint(buffer.size)
    return [] if {buffer.base for buffer in known}.issuperset(buffer.base for buffer in found) else found


class Global:
    """Loads and stores of a running chunk of programs."""

    def __init__(self, run, known: list[Buffer]) -> None:
        self.run, self.known = run, known
        self.last: dict[int, Buffer] = {}
        """Buffer last accessed by an instruction."""

    def locate(self, index, address, mask, width, least=0) -> list[tuple[Buffer, np.ndarray, np.ndarray | None]]:
        """Return (buffer, offsets, mask) of every accessed buffer, and report other accesses.

        least: minimum bytes of an access that must belong to a tensor; 0: all.
        """
        buffer = self.last.get(index)
        for candidate in (*([buffer] if buffer else []), *self.known):
            offsets = address - np.uint64(candidate.base)
            good = candidate.inside(offsets, least or width)
            if mask is not None:
                good = good | ~mask
            if good.all():
                self.last[index] = candidate
                self.aligned(index, offsets, mask, width)
                return [(candidate, offsets, mask)]
        return self.scattered(index, address, mask, width, least)

    def scattered(self, index, address, mask, width, least):
        left = np.ones(address.shape, dtype=bool)
        if mask is not None:
            left = left & mask
        address = np.broadcast_to(address, left.shape)
        pieces = []
        for candidate in self.known:
            offsets = address - np.uint64(candidate.base)
            lanes = left & candidate.inside(offsets, least or width)
            if lanes.any():
                self.aligned(index, offsets, lanes, width)
                pieces.append((candidate, offsets, lanes))
                left &= ~lanes
        if left.any():
            if further := pointed_at(self.known, int(address[left][0])):
                self.known += further
                return self.scattered(index, address, mask, width, least)
            self.run.fault("bounds", index, self.beside(address[left], width))
        return pieces

    def beside(self, addresses, width) -> str:
        """Describe the location of the first address."""
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
        """Load `count` arrays of elements of `size` bytes; lanes whose guard is false get those of `kept`."""
        run, width = self.run, size * count
        mask = run.where(guard)
        if mask is not None and not mask.any():
            return kept or (run.zero.astype(WORDS[size]),) * count
        pieces = self.locate(index, address, mask, width)
        if len(pieces) == 1 and pieces[0][2] is mask:
            buffer, offsets, _ = pieces[0]
            parts, marks = self.gather(index, buffer, offsets, mask, size, count)
            run.undefined.loaded(index, marks)
            if mask is None or not kept:
                return parts
            return tuple(np.where(mask, part, old) for part, old in zip(parts, kept))
        kept = kept or (np.zeros((1, 1), WORDS[size]),) * count
        made = [np.broadcast_to(old, run.shape).copy() for old in kept]
        unknown: list[np.ndarray] = []
        for buffer, offsets, lanes in pieces:
            parts, marks = self.gather(index, buffer, offsets, lanes, size, count)
            for destination, part in zip(made, parts):
                np.copyto(destination, part, where=lanes)
            if marks is not None:
                unknown = unknown or [np.zeros(run.shape, WORDS[size]) for _ in range(count)]
                for destination, part in zip(unknown, marks):
                    np.copyto(destination, part, where=lanes)
        run.undefined.loaded(index, tuple(unknown) or None)
        return tuple(made)

    def gather(self, index, buffer, offsets, mask, size, count):
        """The elements, and marks of uninitialized bits or None."""
        width = size * count
        positions = (offsets >> np.uint64(width.bit_length() - 1)).view(np.int64)
        parts = split(buffer.view(width).take(positions, mode="clip"), size, count)
        self.run.launch.guessed = self.run.launch.guessed or buffer.touches_unknown(positions, mask, width)
        if not self.run.checks:
            return parts, None
        self.run.traffic.read(index, buffer, offsets, mask, width)
        if buffer.marks is None:
            return parts, None
        marks = buffer.undefined(width).take(positions, mode="clip")
        if mask is not None:
            shape = np.broadcast_shapes(marks.shape, mask.shape)
            marks = np.where(spread(mask, shape), spread(marks, shape), marks.dtype.type(0))
        return parts, split(marks, size, count) if marks.view(np.uint8).any() else None

    def glance(self, index, address) -> tuple[np.ndarray]:
        """Initial load of a cas loop; cas compares it, so concurrent writes are not a race."""
        mask, made = self.run.active, np.zeros(self.run.shape, np.uint32)
        for buffer, offsets, lanes in self.locate(index, address, mask, WORD, WORD // 2):
            found = buffer.view(WORD).take((offsets >> np.uint64(2)).view(np.int64), mode="clip")
            np.copyto(made, found, where=True if lanes is None else lanes)
        return (made,)

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
            run.launch.changed = True
            if buffer.footprint is not None:
                buffer.footprint.note(positions, width, atomic=False)
            if run.checks:
                marks = buffer.undefined(width)
                if marks is not None:
                    marks[positions] = 0
                stored_alike(run, index, view[positions], packed, size, "global")
                run.traffic.write(index, buffer, flat, threads, width)

    def chosen(self, buffer, offsets, lanes, width, values) -> list[np.ndarray]:
        """Flat offsets, values and threads of the lanes that write; out-of-bounds and misaligned ones are left out."""
        everything = [spread(x, self.run.shape) for x in (offsets, values, self.run.threads)]
        good = (offsets <= np.uint64(len(buffer.bytes) - width)) & ((offsets & np.uint64(width - 1)) == 0)
        if lanes is not None:
            good = good & lanes
        if good.all():
            return [x.ravel() for x in everything]
        good = spread(good, self.run.shape)
        return [x[good] for x in everything]

    def exchange(self, index, address, guard, form: tuple[str, str], orders, value, compared, wanted: bool):
        """Execute an atomic operation. Returns the old values if used. form: operation and type. orders: whether it
        acquires and whether it releases."""
        run, size = self.run, np.dtype(TYPES[form[1]]).itemsize
        mask = run.where(guard)
        result = np.zeros(run.shape, WORDS[size])
        if mask is not None and not mask.any():
            return result
        least = WORD // 2 if form == ("cas", "b32") else 0
        for buffer, offsets, lanes in self.locate(index, address, mask, size, least):
            flat, data, threads = self.chosen(buffer, offsets, lanes, size, value)
            other = None if compared is None else self.chosen(buffer, offsets, lanes, size, compared)[1]
            positions = (flat >> np.uint64(size.bit_length() - 1)).view(np.int64)
            if buffer.footprint is not None:
                buffer.footprint.note(positions, size, atomic=True)
            run.launch.guessed = run.launch.guessed or buffer.touches_unknown(positions, None, size)
            marks = buffer.undefined(size)
            if run.checks and marks is not None and marks.take(positions, mode="clip").any():
                run.fault("unwritten", index, "an atomic operation on global memory that nobody wrote")
            found = take_turns(buffer.view(size), positions, *form, data, other, wanted=wanted)
            run.launch.changed |= found is None or bool((found != buffer.view(size).view(found.dtype)[positions]).any())
            if wanted:
                result.reshape(-1)[threads] = found.view(WORDS[size])
            if run.checks:
                run.traffic.accumulate(index, buffer, flat, threads, size, orders)
        return result


_UNITS = {2: 1, 4: 8, 8: 8}
"""Units in the last place by which copies of a number may differ if only some threads computed it with fma; by size."""


def stored_alike(run, index: int, kept: np.ndarray, packed: np.ndarray, size: int, memory: str) -> None:
    """Report threads of one instruction that stored different values at one address: a fault, or a note if
    floating-point numbers differ only in the last bits."""
    packed = np.ascontiguousarray(packed)
    if (kept.view(np.uint8) == packed.view(np.uint8)).all():
        return
    kind = "rounding" if rounded_otherwise(kept, packed, size) else "value"
    run.fault(kind, index, f"threads store different values at one place of {memory} memory")


def rounded_otherwise(one: np.ndarray, other: np.ndarray, size: int) -> bool:
    """Whether elements of `size` bytes differ only in the last bits of normal numbers; 4 bytes may be two 16-bit
    numbers."""
    if size == 1:
        return False
    unsigned = f"u{size}"
    a, b = one.view(unsigned), other.view(unsigned)
    near = np.maximum(a, b) - np.minimum(a, b) <= _UNITS[size]
    least = {2: 0x400, 4: 1 << 23, 8: 1 << 52}[size]  # smaller bit patterns are subnormal numbers or integers
    near &= (a & ~a.dtype.type(1 << (8 * size - 1))) >= least
    alike = near | (a == b)
    if size == 4 and not alike.all():
        a, b = a[~alike], b[~alike]
        return bool(a.size) and rounded_otherwise(a, b, 2)
    return bool(alike.all())


def spread(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """broadcast_to only if needed, as it is slow."""
    return array if array.shape == shape else np.broadcast_to(array, shape)


def split(raw: np.ndarray, size: int, count: int) -> tuple[np.ndarray, ...]:
    """Split gathered words into `count` arrays of elements."""
    if count == 1:
        return (raw,)
    parts: np.ndarray = raw.view(WORDS[size]).reshape(*raw.shape, count)
    return tuple(np.ascontiguousarray(parts[..., position]) for position in range(count))


def join(values, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Join arrays of elements into words, the inverse of split()."""
    if len(values) == 1:
        return spread(values[0], shape)
    made: np.ndarray = np.empty((*shape, len(values)), dtype=WORDS[size])
    for position, value in enumerate(values):
        made[..., position] = value
    return made.view(WORDS[size * len(values)])[..., 0]
