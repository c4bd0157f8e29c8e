"""A decoder's caches for a search on a CPU, in which keys and values are written once and never moved.

Hypotheses that change rows, and sentences that leave, change small tables of numbers alone: where each earlier position
of a row was stored (its ancestors), and which sentence it translates. Attention reads through them, row by row
(cpu/step_passes.py), so a row does not depend on how many there are or how far their sources are padded.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from fasttfm.cpu import step_passes

_FIRST_CAPACITY = 32


class Rows:
    """Storage places of each of R rows' positions, and the sentence that each row translates."""

    def __init__(self) -> None:
        self.lengths = torch.zeros(0, dtype=torch.int64, device="cpu")
        """(P,): tokens of each source in the memory's keys and values."""
        self.slots = torch.zeros(0, dtype=torch.int32, device="cpu")
        """(R,): where a row stores its next position."""
        self.slot_count = 0
        """Slots that rows have had."""
        self.sentences = torch.zeros(0, dtype=torch.int32, device="cpu")
        """(R,): numbers of the sentences in the memory's keys and values."""
        self.positions = torch.zeros(0, dtype=torch.int64, device="cpu")
        """(R,): positions that each row has seen."""
        self.ancestors = torch.zeros(0, _FIRST_CAPACITY, dtype=torch.int32, device="cpu")
        """(R, capacity): where each earlier position is stored."""
        self.length = 0
        """Most positions that a row has seen."""
        self._first_slots = torch.zeros(0, dtype=torch.int32, device="cpu")
        """(P,): the first of the slots of each sentence."""
        self._slots_of: dict[int, range] = {}
        """The slots of each sentence that has not left, as far as is known."""

    def advance(self) -> None:
        """The newest position of every row has been stored."""
        self.ancestors.scatter_(1, self.positions[:, None], self.slots[:, None])
        self.positions += 1
        self.length += 1
        if self.length == self.ancestors.shape[1]:
            self.ancestors = torch.nn.functional.pad(self.ancestors, (0, self.ancestors.shape[1]))

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Makes row r a copy of the old row rows[r], as row ranks[r] (R,) int32 of its sentence, counted from 0."""
        self._take(rows)
        self._store_in(self._first_slots[self.sentences] + ranks)

    def join(self, sentences: Tensor, lengths: Tensor, beam: int, rows_per_sentence: int) -> None:
        """Rows for sentences of these numbers, after those that are there and at their first position."""
        missing = int(sentences.max()) + 1 - len(self.lengths)
        if missing > 0:
            self.lengths = torch.nn.functional.pad(self.lengths, (0, missing))
            self._first_slots = torch.nn.functional.pad(self._first_slots, (0, missing))
        self.lengths[sentences] = lengths
        first = self._reserve(sentences.tolist(), beam)
        self._first_slots[sentences] = self._first_slots.new_tensor(first)
        new = sentences.int().repeat_interleave(rows_per_sentence)
        self.sentences = torch.cat([self.sentences, new])
        self.positions = torch.cat([self.positions, self.positions.new_zeros(len(new))])
        self.ancestors = torch.cat([self.ancestors, self.ancestors.new_zeros(len(new), self.ancestors.shape[1])])
        ranks = torch.arange(rows_per_sentence, dtype=torch.int32, device="cpu")
        slots = self._first_slots[new].view(-1, rows_per_sentence) + ranks
        self._store_in(torch.cat([self.slots, slots.flatten()]))

    def _reserve(self, sentences: list[int], beam: int) -> list[int]:
        """The first of `beam` slots for each sentence, in the first gaps between those of sentences still here."""
        here = set(self.sentences.tolist())
        self._slots_of = {number: slots for number, slots in self._slots_of.items() if number in here}
        taken = sorted(self._slots_of.values(), key=lambda slots: slots.start)
        first_slots, end, place = [], 0, 0
        for number in sentences:
            while place < len(taken) and taken[place].start - end < beam:
                end, place = taken[place].stop, place + 1
            self._slots_of[number] = range(end, end + beam)
            first_slots.append(end)
            end += beam
        return first_slots

    def _take(self, rows: Tensor) -> None:
        self.ancestors, self.sentences, self.positions = (
            self.ancestors[rows],
            self.sentences[rows],
            self.positions[rows],
        )
        self.length = int(self.positions.max()) if rows.numel() else 0

    def _store_in(self, slots: Tensor) -> None:
        self.slots = slots
        if slots.numel():
            self.slot_count = max(self.slot_count, int(slots.max()) + 1)


def _enough(needed: int, size: int) -> int:
    """The size of memory that had `size` and needs `needed`: half as much again where it grows."""
    return size if needed <= size else max(needed, size * 3 // 2)


def _arrays(keys: Tensor, values: Tensor) -> tuple[Any, Any]:
    """The same memory as the compiled loops take it."""
    return step_passes.array(keys), step_passes.array(values)


class AncestorAttention:
    """Keys and values (P, capacity, H, D) of a layer's self-attention."""

    grows = True

    def __init__(self, rows: Rows, like: Tensor) -> None:
        """like (., H, ., D)."""
        self.rows = rows
        self._keys, self._values = like.new_empty(0, 0, like.shape[1], like.shape[3]), like.new_empty(0)
        self.arrays = _arrays(self._keys, self._values)

    def attend(self, joint: Tensor) -> Tensor:
        """The joined heads (R, d) of the newest position; joint (R, 3 * d) queries, keys and values."""
        rows = self.make_room()
        return step_passes.attend_to_ancestors(
            joint, self._keys, self._values, rows.ancestors, rows.slots, rows.positions
        )

    def make_room(self) -> Rows:
        """The rows, for whose newest position there is memory."""
        rows = self.rows
        capacity = rows.ancestors.shape[1]
        if self._keys.shape[0] < rows.slot_count or self._keys.shape[1] < capacity:
            self._grow(_enough(rows.slot_count, self._keys.shape[0]), capacity)
        return rows

    def _grow(self, slot_count: int, capacity: int) -> None:
        before, seen = self._keys, min(self.rows.length, self._keys.shape[1])
        larger = [before.new_empty(slot_count, capacity, *before.shape[2:]) for _ in range(2)]
        for new, old in zip(larger, (self._keys, self._values)):
            if seen:
                new[: old.shape[0], :seen] = old[:, :seen]
        self._keys, self._values = larger
        self.arrays = _arrays(self._keys, self._values)


class MemoryAttention:
    """Keys and values (B, H, S, D) of a layer's attention over the encoder's output."""

    grows = False

    def __init__(self, rows: Rows, keys: Tensor, values: Tensor) -> None:
        self.rows = rows
        self._keys, self._values = keys.contiguous(), values.contiguous()
        self.arrays = _arrays(self._keys, self._values)

    def store(self, sentences: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys and values (B, H, S, D) become those of the sentences with these numbers (B,)."""
        count, longest = int(sentences.max()) + 1, keys.shape[2]
        if count > self._keys.shape[0] or longest > self._keys.shape[2]:
            self._grow(_enough(count, self._keys.shape[0]), max(longest, self._keys.shape[2]))
        self._keys[sentences, :, :longest], self._values[sentences, :, :longest] = keys, values

    def _grow(self, count: int, longest: int) -> None:
        sentences, heads, before, size = self._keys.shape
        larger = [self._keys.new_zeros(count, heads, longest, size) for _ in range(2)]
        for new, old in zip(larger, (self._keys, self._values)):
            new[:sentences, :, :before] = old
        self._keys, self._values = larger
        self.arrays = _arrays(self._keys, self._values)

    def attend(self, query: Tensor) -> Tensor:
        """The joined heads (R, d) of query (R, d)."""
        return step_passes.attend_to_memory(query, self._keys, self._values, self.rows.sentences, self.rows.lengths)


class StepCache:
    """Keys and values of a decoder in a search: as DecoderCache, one position of each row at a time."""

    moves_nothing = True
    """Hypotheses may change rows at no cost."""

    def __init__(self, capacity: int | None = None, fused: Any = None) -> None:
        """A cache without rows; capacity: most positions, None for no end; fused: a DecoderStep of models, where it
        takes the steps."""
        self.capacity = capacity
        self.fused = fused
        self.source_lengths = None
        self._room = 0, 0
        self._rows = Rows()
        self._layers: list[tuple[AncestorAttention, MemoryAttention]] = []

    @property
    def length(self) -> int:
        """Target positions seen, most of any row."""
        return self._rows.length

    @property
    def positions(self) -> Tensor:
        """(R,) int64: target positions that each row has seen."""
        return self._rows.positions

    def layer(self, number: int) -> tuple[AncestorAttention, MemoryAttention]:
        """The caches of one decoder layer."""
        return self._layers[number]

    def arrays(self) -> tuple[Any, Any, list[Any]]:
        """Memory of all that a position is stored in and read from, as the compiled loops take it: ancestors, slots and
        positions; sentences and lengths; and of each layer the keys and values of both attentions."""
        rows = self._rows
        room = rows.slot_count, rows.ancestors.shape[1]
        if room != self._room:
            for own, _ in self._layers:
                own.make_room()
            self._room = room
        return (
            (rows.ancestors.numpy(), rows.slots.numpy(), rows.positions.numpy()),
            (rows.sentences.numpy(), rows.lengths.numpy()),
            [(own.arrays, memory.arrays) for own, memory in self._layers],
        )

    def advance(self) -> None:
        """All layers have seen the newest position."""
        self._rows.advance()

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Reorder rows and drop sentences at once, of sentences that may have begun at different times and have beams
        of different sizes: row r goes on from what row rows[r] (R,) was, as row ranks[r] (R,) int32 of its sentence's.
        """
        self._rows.go_on(rows, ranks)

    def join(
        self, keys_values: list[tuple[Tensor, Tensor]], lengths: Tensor, beam: int, rows_per_sentence: int
    ) -> None:
        """B sentences come in, after the rows that are there and in the memory of those that have left.

        keys_values: of their memory, (B, H, S, D) for each layer; lengths (B,): of their sources; beam: rows that they
        will have; rows_per_sentence: that they have at their first step.
        """
        if not self._layers:
            self._layers = [
                (AncestorAttention(self._rows, keys), MemoryAttention(self._rows, keys[:0], values[:0]))
                for keys, values in keys_values
            ]
        used = set(self._rows.sentences.tolist())
        free = (number for number in itertools.count() if number not in used)
        sentences = lengths.new_tensor(list(itertools.islice(free, lengths.shape[0])))
        for (_, memory), pair in zip(self._layers, keys_values, strict=True):
            memory.store(sentences, *pair)
        self._rows.join(sentences, lengths, beam, rows_per_sentence)
