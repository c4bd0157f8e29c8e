"""KV caches for a search on a CPU: keys and values are written once and never moved.

Reordering hypotheses and removing sentences updates small index tables only: where each earlier position of a row is
stored (its ancestors), and which sentence the row translates. Attention reads through them row by row
(cpu/step_loops.py), so a row depends neither on the batch nor on the padding of the sources.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.cpu import step_passes

_FIRST_CAPACITY = 32


class Rows:
    """Index tables of R rows: where their positions are stored, and which sentence each translates. They keep their
    memory while it suffices."""

    def __init__(self) -> None:
        self.count, self.length, self.slot_count, self.moved = 0, 0, 0, 0
        """R; the most positions of any row; slots in use so far; how often tables or buffers of a layer have moved."""
        self._lengths: Any = np.zeros(0, np.int64)
        """(P,): tokens of each source in the encoder's keys and values."""
        self._first_slots: Any = np.zeros(0, np.int32)
        """(P,): each sentence's first slot."""
        self._slots_of: dict[int, range] = {}
        """Sentence -> its slots; sentences that have left are removed by the next join()."""
        self._ancestors = np.zeros((0, _FIRST_CAPACITY), np.int32)
        """(>= R, capacity): the storage row of each earlier position."""
        self._slots: Any = np.zeros(0, np.int32)
        self._sentences: Any = np.zeros(0, np.int32)
        self._positions: Any = np.zeros(0, np.int64)
        """(>= R,): the storage row for each row's next position; its sentence, an index into the encoder's keys and
        values; positions decoded so far."""

    def own(self) -> tuple[Any, Any, Any]:
        """ancestors, slots and positions of the rows."""
        return self._ancestors[: self.count], self._slots[: self.count], self._positions[: self.count]

    def sources(self) -> tuple[Any, Any]:
        """Sentences of the rows, and lengths of the sentences."""
        return self._sentences[: self.count], self._lengths

    @property
    def capacity(self) -> int:
        """The most positions of a row that fit."""
        return self._ancestors.shape[1]

    def _reach(self, rows: int, capacity: int) -> None:
        """Make room for so many rows and positions."""
        most = len(self._slots)
        if rows <= most and capacity <= self.capacity:
            return
        rows, capacity = max(rows, most), max(capacity, self.capacity)
        self._ancestors = np.pad(self._ancestors, ((0, rows - most), (0, capacity - self.capacity)))
        self._slots, self._sentences, self._positions = (
            np.pad(table, (0, rows - most)) for table in (self._slots, self._sentences, self._positions)
        )
        self.moved += 1

    def advance(self) -> None:
        """Record that every row has stored its newest position."""
        step_passes.loops().advance(*self.own())
        self.length += 1
        if self.length == self.capacity:
            self._reach(0, 2 * self.capacity)

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Continue the old row rows[r] as row r, in slot ranks[r] (R,) int32 of its sentence, counted from 0."""
        self._reach(len(rows), 0)
        most = max(self.count, len(rows))
        self.count = len(rows)
        tables = self._ancestors[:most], self._slots, self._sentences[:most], self._positions[:most]
        self.length = step_passes.loops().go_on(rows.numpy(), ranks.numpy(), self._first_slots, *tables)
        self._use_slots()

    def join(self, sentences: list[int], lengths: Tensor, beam: int, rows_per_sentence: int) -> None:
        """Append rows at their first position for these sentences."""
        missing = max(0, max(sentences) + 1 - len(self._lengths))
        self._lengths, self._first_slots = (np.pad(table, (0, missing)) for table in (self._lengths, self._first_slots))
        self._lengths[sentences] = lengths.numpy()
        self._first_slots[sentences] = self._reserve(sentences, beam)
        new = np.repeat(sentences, rows_per_sentence)
        old, self.count = self.count, self.count + len(new)
        self._reach(self.count, 0)
        ranks = np.tile(np.arange(rows_per_sentence), len(sentences))
        for table, values in (
            (self._ancestors, 0),
            (self._positions, 0),
            (self._sentences, new),
            (self._slots, self._first_slots[new] + ranks),
        ):
            table[old : self.count] = values
        self._use_slots()
        self.moved += 1

    def _reserve(self, sentences: list[int], beam: int) -> list[int]:
        """Reserve `beam` consecutive slots per sentence in the first free gaps; returns the first slot of each."""
        active = set(self._sentences[: self.count].tolist())
        self._slots_of = {number: slots for number, slots in self._slots_of.items() if number in active}
        taken = sorted(self._slots_of.values(), key=lambda slots: slots.start)
        first_slots, end, place = [], 0, 0
        for number in sentences:
            while place < len(taken) and taken[place].start - end < beam:
                end, place = taken[place].stop, place + 1
            self._slots_of[number] = range(end, end + beam)
            first_slots.append(end)
            end += beam
        return first_slots

    def _use_slots(self) -> None:
        self.slot_count = max(self.slot_count, int(self._slots[: self.count].max(initial=-1)) + 1)


class _Attention:
    """Keys and values of a layer, and the rows that read them."""

    def __init__(self, rows: Rows, empty: Tensor) -> None:
        """empty (0, ., ., .): keys and values without any."""
        self.rows = rows
        self._use(empty, empty)

    def _use(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self.arrays = step_passes.array(keys), step_passes.array(values)
        """keys and values for the compiled loops."""
        self.rows.moved += 1

    def _grow(self, count: int, *shape: int) -> None:
        """Move keys and values to buffers (at least count, *shape); more rows are made in steps of at least half."""
        before, *inner = self._keys.shape
        count = before if count <= before else max(count, before * 3 // 2)
        # NumPy asks for huge pages from 4 MiB on: of small ones the first steps of a search fault thousands in.
        memory = np.empty(2 * count * math.prod(shape) * self._keys.itemsize, np.uint8)
        keys, values = torch.from_numpy(memory).view(self._keys.dtype).view(2, count, *shape).unbind()
        for new, old in ((keys, self._keys), (values, self._values)):
            new[:before, : inner[0], : inner[1]] = old
        self._use(keys, values)


class AncestorAttention(_Attention):
    """Self-attention of a layer, with keys and values (P, capacity, H, D)."""

    def make_room(self) -> None:
        """Grow the buffers to fit every row's newest position."""
        slots, capacity = self.rows.slot_count, self.rows.capacity
        if self._keys.shape[0] < slots or self._keys.shape[1] < capacity:
            self._grow(slots, capacity, *self._keys.shape[2:])


class MemoryAttention(_Attention):
    """Cross-attention of a layer, with the encoder's keys and values (B, H, S, D)."""

    def store(self, sentences: list[int], keys: Tensor, values: Tensor) -> None:
        """Store keys and values (B, H, S, D) for B sentences."""
        count, longest = max(sentences) + 1, keys.shape[2]
        stored, heads, most, size = self._keys.shape
        if count > stored or longest > most:
            self._grow(count, heads, max(longest, most), size)
        one_run = count - sentences[0] == len(sentences)
        for own, new in ((self._keys, keys), (self._values, values)):
            if one_run:
                own[sentences[0] : count, :, :longest] = new
            else:
                own[sentences, :, :longest] = new.to(own.dtype)


class StepCache:
    """KV cache of a decoder in a search; like DecoderCache, but for one position per row and step."""

    moves_nothing = True
    """Reordering hypotheses costs nothing."""

    def __init__(self, fused: Any, capacity: int | None = None) -> None:
        """An empty cache. fused: the DecoderStep that computes the steps; capacity: most positions, None: no limit."""
        self.capacity = capacity
        self.fused = fused
        self._room = 0, 0
        self._rows = Rows()
        self._layers: list[tuple[AncestorAttention, MemoryAttention]] = []

    @property
    def length(self) -> int:
        """Target positions decoded so far, the most of any row."""
        return self._rows.length

    def make_room(self) -> int:
        """Make room for the next positions; returns a number that changes whenever any of arrays() moves."""
        room = self._rows.slot_count, self._rows.capacity
        if room != self._room:
            for own, _ in self._layers:
                own.make_room()
            self._room = room
        return self._rows.moved

    def arrays(self) -> tuple[Any, Any, list[Any]]:
        """All buffers of a step as arrays for the compiled loops: (ancestors, slots, positions), (sentences, lengths),
        and per layer the keys and values of both attentions. After make_room()."""
        return self._rows.own(), self._rows.sources(), [(own.arrays, memory.arrays) for own, memory in self._layers]

    def advance(self) -> None:
        """Record that all layers have computed the newest position."""
        self._rows.advance()

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Reorder rows and drop sentences: row r continues the old row rows[r] (R,), as row ranks[r] (R,) int32 of its
        sentence. Sentences may have joined at different times and have beams of different sizes."""
        self._rows.go_on(rows, ranks)

    def join(
        self, keys_values: Iterable[tuple[Tensor, Tensor]], lengths: Tensor, beam: int, rows_per_sentence: int
    ) -> None:
        """Append rows for B new sentences, which reuse the memory of sentences that have left.

        keys_values: per layer the encoder's keys and values (B, H, S, D), read before the next layer's are asked for;
        lengths (B,): of the sources; beam: most rows of a sentence; rows_per_sentence: rows in its first step.
        """
        used = set(self._rows.sources()[0].tolist())
        free = (number for number in itertools.count() if number not in used)
        sentences = list(itertools.islice(free, lengths.shape[0]))
        for number, (keys, values) in enumerate(keys_values):
            if number == len(self._layers):
                _, heads, _, size = keys.shape
                # int8 products round more coarsely than bfloat16
                empty = keys.new_empty(0, heads, 0, size, dtype=torch.bfloat16 if self.fused.int8 else keys.dtype)
                own = AncestorAttention(self._rows, empty.transpose(1, 2))
                self._layers.append((own, MemoryAttention(self._rows, empty)))
            self._layers[number][1].store(sentences, keys, values)
        self._rows.join(sentences, lengths, beam, rows_per_sentence)
