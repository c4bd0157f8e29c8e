"""KV caches for a search on a CPU: keys and values are written once and never moved.

Reordering hypotheses and removing sentences updates small index tables only: where each earlier position of a row is
stored (its ancestors), and which sentence the row translates. Attention reads through them row by row
(cpu/step_passes.py), so a row depends neither on the batch nor on the padding of the sources.
"""

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.cpu import step_passes

_FIRST_CAPACITY = 32


class Rows:
    """Index tables of R rows: where their positions are stored, and which sentence each translates."""

    def __init__(self) -> None:
        self.lengths = torch.zeros(0, dtype=torch.int64, device="cpu")
        """(P,): tokens of each source in the encoder's keys and values."""
        self.slots = torch.zeros(0, dtype=torch.int32, device="cpu")
        """(R,): the storage row for each row's next position."""
        self.slot_count = 0
        """Number of slots in use so far."""
        self.sentences = torch.zeros(0, dtype=torch.int32, device="cpu")
        """(R,): each row's sentence, an index into the encoder's keys and values."""
        self.positions = torch.zeros(0, dtype=torch.int64, device="cpu")
        """(R,): positions decoded so far."""
        self.ancestors = torch.zeros(0, _FIRST_CAPACITY, dtype=torch.int32, device="cpu")
        """(R, capacity): the storage row of each earlier position."""
        self.length = 0
        """The most positions of any row."""
        self._first_slots = torch.zeros(0, dtype=torch.int32, device="cpu")
        """(P,): each sentence's first slot."""
        self._slots_of: dict[int, range] = {}
        """Sentence -> its slots; sentences that have left are removed by the next join()."""

    def advance(self) -> None:
        """Record that every row has stored its newest position."""
        self.ancestors.scatter_(1, self.positions[:, None], self.slots[:, None])
        self.positions += 1
        self.length += 1
        if self.length == self.ancestors.shape[1]:
            self.ancestors = torch.nn.functional.pad(self.ancestors, (0, self.ancestors.shape[1]))

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Continue the old row rows[r] as row r, in slot ranks[r] (R,) int32 of its sentence, counted from 0."""
        self.ancestors, self.sentences = self.ancestors[rows], self.sentences[rows]
        self.positions = self.positions[rows]
        self.length = int(self.positions.max()) if rows.numel() else 0
        self._store_in(self._first_slots[self.sentences] + ranks)

    def join(self, sentences: Tensor, lengths: Tensor, beam: int, rows_per_sentence: int) -> None:
        """Append rows at their first position for these sentences."""
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
        """Reserve `beam` consecutive slots per sentence in the first free gaps; returns the first slot of each."""
        active = set(self.sentences.tolist())
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

    def _store_in(self, slots: Tensor) -> None:
        self.slots = slots
        if slots.numel():
            self.slot_count = max(self.slot_count, int(slots.max()) + 1)


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

    grows = True

    def attend(self, joint: Tensor) -> Tensor:
        """The concatenated heads (R, d) of the newest position; joint (R, 3 * d) is its query, key and value."""
        self.make_room()
        rows = self.rows
        return step_passes.attend_to_ancestors(
            joint, self._keys, self._values, rows.ancestors, rows.slots, rows.positions
        )

    def make_room(self) -> None:
        """Grow the buffers to fit every row's newest position."""
        slots, capacity = self.rows.slot_count, self.rows.ancestors.shape[1]
        if self._keys.shape[0] < slots or self._keys.shape[1] < capacity:
            self._grow(slots, capacity, *self._keys.shape[2:])


class MemoryAttention(_Attention):
    """Cross-attention of a layer, with the encoder's keys and values (B, H, S, D)."""

    grows = False

    def store(self, sentences: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (B, H, S, D) for sentences (B,)."""
        count, longest = int(sentences.max()) + 1, keys.shape[2]
        stored, heads, most, size = self._keys.shape
        if count > stored or longest > most:
            self._grow(count, heads, max(longest, most), size)
        self._keys[sentences, :, :longest], self._values[sentences, :, :longest] = keys, values

    def attend(self, query: Tensor) -> Tensor:
        """The concatenated heads (R, d) for query (R, d)."""
        return step_passes.attend_to_memory(query, self._keys, self._values, self.rows.sentences, self.rows.lengths)


class StepCache:
    """KV cache of a decoder in a search; like DecoderCache, but for one position per row and step."""

    moves_nothing = True
    """Reordering hypotheses costs nothing."""

    def __init__(self, capacity: int | None = None, fused: Any = None) -> None:
        """An empty cache. capacity: most positions, None for no limit; fused: the DecoderStep that computes the steps,
        if any."""
        self.capacity = capacity
        self.fused = fused
        self.source_lengths = None
        self._room = 0, 0
        self._rows = Rows()
        self._layers: list[tuple[AncestorAttention, MemoryAttention]] = []

    @property
    def length(self) -> int:
        """Target positions decoded so far, the most of any row."""
        return self._rows.length

    @property
    def positions(self) -> Tensor:
        """(R,) int64: target positions that each row has decoded."""
        return self._rows.positions

    def layer(self, number: int) -> tuple[AncestorAttention, MemoryAttention]:
        """Self- and cross-attention of one decoder layer."""
        return self._layers[number]

    def arrays(self) -> tuple[Any, Any, list[Any]]:
        """All buffers of a step as arrays for the compiled loops: (ancestors, slots, positions), (sentences, lengths),
        and per layer the keys and values of both attentions."""
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
        """Record that all layers have computed the newest position."""
        self._rows.advance()

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Reorder rows and drop sentences: row r continues the old row rows[r] (R,), as row ranks[r] (R,) int32 of its
        sentence. Sentences may have joined at different times and have beams of different sizes."""
        self._rows.go_on(rows, ranks)

    def join(
        self, keys_values: list[tuple[Tensor, Tensor]], lengths: Tensor, beam: int, rows_per_sentence: int
    ) -> None:
        """Append rows for B new sentences, which reuse the memory of sentences that have left.

        keys_values: per layer the encoder's keys and values (B, H, S, D); lengths (B,): of the sources; beam: most rows
        of a sentence; rows_per_sentence: rows in its first step.
        """
        if not self._layers:
            self._layers = [
                (AncestorAttention(self._rows, keys.new_empty(0, 0, keys.shape[1], keys.shape[3])),
                 MemoryAttention(self._rows, keys[:0]))
                for keys, _ in keys_values
            ]  # fmt: skip
        used = set(self._rows.sentences.tolist())
        free = (number for number in itertools.count() if number not in used)
        sentences = lengths.new_tensor(list(itertools.islice(free, lengths.shape[0])))
        for (_, memory), pair in zip(self._layers, keys_values, strict=True):
            memory.store(sentences, *pair)
        self._rows.join(sentences, lengths, beam, rows_per_sentence)
