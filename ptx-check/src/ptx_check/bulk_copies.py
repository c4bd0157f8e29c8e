"""Bulk tile copies (TMA): cp.async.bulk.tensor, and the tensor maps that describe tiles.

One thread issues a copy. Loads into shared memory arrive at an mbarrier, which counts their bytes; the destination
counts as unwritten until a thread has waited there. The source of a store may be overwritten after
cp.async.bulk.wait_group. A map has 128 bytes in an undocumented format; here it has the fields in _FIELDS.
Source: NVIDIA, "PTX ISA", chapter 9.7.9.27 (bulk copies), 9.7.9.28 (tensormap.replace), 5.5 (tensors).
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ptx_check.faults import Unsupported
from ptx_check.mbarriers import issuing
from ptx_check.memory import WORDS, spread
from ptx_check.races import READING, WRITING
from ptx_check.rounding import to_tf32
from ptx_check.warpgroup import read_operand

_FIELDS = {"global_address": 0, "rank": 8, "box_dim": 12, "global_dim": 32, "element_stride": 52, "elemtype": 72,
           "interleave_layout": 76, "swizzle_mode": 80, "fill_mode": 84, "global_stride": 88}  # fmt: skip
"""Offset of each field of a map; the first, for per-dimension fields."""
LONG = ("global_address", "global_stride")
"""Fields of 8 bytes; the others have 4."""
SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2, 11: 4}
"""Bytes per element, by the map's type number; types that flush subnormals are left out."""
_SUMMED = {2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 9: "f64", 10: "bf16"}
"""Types of reductions."""
_TF32 = 11
FILLED = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}
"""Fill value for out-of-bounds elements if the map requests NaN, by element size."""


_OF_HOST = {8: 9, 9: 10, 10: 8}
"""Type number of the host API -> type number in a map, where they differ."""


def map_of(
    address: int, swizzle: int, size: int, kind: int, box: list[int], shape: list[int], strides: list[int], padding: int
) -> torch.Tensor:
    """Build the 128 bytes of a map on the host, with the arguments of Triton's driver function: dimensions outermost
    first, strides in elements of `size` bytes."""
    rank = len(shape)
    values = [("global_address", 0, address), ("rank", 0, rank - 1), ("elemtype", 0, _OF_HOST.get(kind, kind)),
              ("swizzle_mode", 0, swizzle), ("fill_mode", 0, padding)]  # fmt: skip
    for dimension in range(rank):
        of = rank - 1 - dimension
        values += [("box_dim", dimension, box[of]), ("global_dim", dimension, shape[of])]
        values += [("element_stride", dimension, 1)]
        if dimension:
            values.append(("global_stride", dimension - 1, strides[of] * size))
    made = np.zeros(128, np.uint8)
    for field, dimension, value in values:
        at = offset_of(field, dimension)
        word = np.array([value], np.uint64 if field in LONG else np.uint32).view(np.uint8)
        made[at : at + len(word)] = word
    return torch.from_numpy(made)


def offset_of(field: str, dimension: int) -> int:
    return _FIELDS[field] + (8 if field in LONG else 4) * dimension


class Tile(NamedTuple):
    """Elements moved by a copy, for the issuing programs."""

    size: int
    programs: np.ndarray
    outside: np.ndarray
    """(programs, elements) addresses in global memory, for all programs of the run."""
    taken: np.ndarray
    """Mask of elements inside the tensor."""
    inside: np.ndarray
    """Addresses in shared memory."""
    issuers: np.ndarray
    """(programs, 1) mask of the issuing programs."""
    warp: int
    """Warp of the issuing thread."""
    fill: int
    kind: str
    """Type of the reduction into the tensor; empty for a plain copy."""
    rounded: bool
    """Whether float32 is rounded to tf32."""


class Arriving(NamedTuple):
    """A pending load into shared memory."""

    issued: int
    tile: Tile
    programs: np.ndarray
    place: np.ndarray
    """mbarrier of each program, and its phase when the copy was issued."""
    phase: np.ndarray
    data: np.ndarray
    marks: np.ndarray


class BulkCopies:
    """Bulk copies of a running chunk of programs."""

    def __init__(self, run) -> None:
        self.run = run
        self.arriving: list[Arriving] = []
        self.committed: dict[int, np.ndarray] = defaultdict(lambda: np.zeros((run.programs, 1), dtype=np.int64))
        """Store groups, by first warp of the issuing team."""
        self.reading: list[tuple] = []
        """(team, group, instruction, tile) of stores that may still be reading."""

    def publish(self, index, destination, source, guard) -> None:
        """tensormap.cp_fenceproxy: a warp copies a map into global memory."""
        run, step = self.run, self.run.lane << np.uint32(2)
        run.together(index)
        run.warps_met(run.where(guard))
        (words,) = run.shared.load(index, source + step, guard, 4, 1, None)
        if run.undefined.fresh(1, "u32")[0].any():
            run.fault("unwritten", index, "a tensor map that nobody has written whole")
        run.memory.store(index, destination + step.astype(np.uint64), guard, 4, (words,))

    # ------------------------------------------------------------------------------------------------------- tiles

    def issuers(self, index, guard) -> Iterator[np.ndarray]:
        """The issuing threads, one per warp."""
        run, mask = self.run, self.run.where(guard)
        mask = spread(np.ones((1, 1), dtype=bool) if mask is None else mask, run.shape)
        if (mask.reshape(run.programs, -1, 32).sum(2) > 1).any():
            run.fault("divergence", index, "more than one thread of a warp issues a bulk copy")
        for warp in np.unique(run.warp[0, mask.any(0)]):
            yield mask & (run.warp == warp)

    def tile(self, index, mask, address, coordinates, inside) -> Tile | None:
        """Decode the tile that one thread of each program copies."""
        run = self.run
        programs, address, inside, *coordinates = issuing(run, mask, address, inside, *coordinates)
        found = self.map_at(index, address)
        if found is None:
            return None
        words, longs = found.view(np.uint32).astype(np.int64), found[:, :8].view(np.uint64)
        rank = int(words[0, 2]) + 1
        strides = found[:, 88:120].view(np.uint64)[:, : rank - 1]
        alike = np.delete(words, [0, 1, *range(8, 13), *range(22, 30)], axis=1)
        size, swizzle = SIZES.get(int(words[0, 18])), int(words[0, 20])
        box, dimensions = words[0, 3 : 3 + rank].tolist(), words[:, 8 : 8 + rank]
        odd = (alike != alike[0]).any() or words[0, 19] or (words[0, 13 : 13 + rank] != 1).any() or swizzle > 3
        if odd or size is None or rank != len(coordinates) or (swizzle and box[0] * size != 16 << swizzle):
            raise Unsupported("a bulk copy of this tensor map", run.launch.code.instructions[index].location)
        if (longs % 16).any() or (strides % 16).any() or (inside % np.uint32(128)).any():
            run.fault(
                "alignment",
                index,
                "a bulk copy of a tensor or a stride that 16 bytes, or to a place that 128 do not divide",
            )
        numbers = np.arange(int(np.prod(box)))
        taken, outside = np.ones((len(programs), len(numbers)), dtype=bool), longs
        steps = np.concatenate([np.full((len(programs), 1), size, np.uint64), strides], axis=1)
        rest = numbers
        for dimension, extent in enumerate(box):
            at = coordinates[dimension].view(np.int32) + rest % extent
            rest = rest // extent
            taken &= (at >= 0) & (at < dimensions[:, dimension, None])
            outside = outside + at.astype(np.int64).view(np.uint64) * steps[:, dimension, None]
        inside = inside + (numbers * size).astype(np.uint32)
        inside = inside ^ ((inside >> np.uint32(7) & np.uint32((1 << swizzle) - 1)) << np.uint32(4))
        outside, taken, inside = (self.of_all(programs, each) for each in (outside, taken, inside))
        issuers = self.of_all(programs, np.ones((len(programs), 1), dtype=bool))
        fill, kind = FILLED.get(size, 0) if words[0, 21] else 0, _SUMMED.get(int(words[0, 18]), "")
        warp, rounded = int(mask.any(0).argmax()) // 32, bool(words[0, 18] == _TF32)
        return Tile(size, programs, outside, taken, inside, issuers, warp, fill, kind, rounded)

    def of_all(self, programs, values) -> np.ndarray:
        whole = np.zeros((self.run.programs, values.shape[1]), values.dtype)
        whole[programs] = values
        return whole

    def map_at(self, index, address) -> np.ndarray | None:
        """(programs, 128) bytes of the maps at addresses (programs, 1)."""
        found, left = np.zeros((len(address), 128), np.uint8), np.ones(len(address), dtype=bool)
        for buffer in self.run.memory.known:
            offsets = address[:, 0] - np.uint64(buffer.base)
            here = left & buffer.inside(offsets, 128)
            at = offsets[here].astype(np.int64)[:, None] + np.arange(128)
            if self.run.checks and buffer.marks is not None and buffer.marks[at].any():
                self.run.fault("unwritten", index, "a tensor map that nobody wrote")
                return None
            found[here] = buffer.bytes[at]
            left &= ~here
        if left.any():
            self.run.fault("bounds", index, "a tensor map outside of the launch's memory")
            return None
        return found

    def slices(self, tile: Tile):
        """Yields a tile in chunks of one element per thread: positions, addresses, mask."""
        width = self.run.width
        for first in range(0, tile.outside.shape[1], width):
            part = slice(first, first + width)
            short = width - tile.outside[:, part].shape[1]
            yield part, *(np.pad(each[:, part], ((0, 0), (0, short))) for each in (tile.outside, tile.taken))

    # ------------------------------------------------------------------------------------------------------ copies

    def load(self, index, guard, destination, address, coordinates, barrier) -> None:
        """Load tiles from global into shared memory; out-of-bounds elements are filled."""
        for mask in self.issuers(index, guard):
            if (tile := self.tile(index, mask, address, coordinates, destination)) is not None:
                self.load_tile(index, mask, tile, barrier)

    def load_tile(self, index, mask, tile: Tile, barrier) -> None:
        run = self.run
        word = WORDS[tile.size]
        data: np.ndarray = np.full(tile.outside.shape, tile.fill, word)
        marks: np.ndarray = np.zeros(tile.outside.shape, word)
        for part, addresses, lanes in self.slices(tile):
            end = data[:, part].shape[1]
            for buffer, offsets, some in run.memory.locate(index, addresses, lanes, tile.size) if lanes.any() else ():
                found, unknown = run.memory.gather(index, buffer, offsets, some, tile.size, 1)
                np.copyto(data[:, part], found[0][:, :end], where=some[:, :end])
                if unknown is not None:
                    np.copyto(marks[:, part], unknown[0][:, :end], where=some[:, :end])
        if tile.rounded:
            data = np.where(np.isfinite(data.view(np.float32)), to_tf32(data.view(np.float32), "rn").view(word), data)
        spots = self.spots(index, tile)
        run.shared.flat[tile.size][spots] = 0
        if run.checks:
            run.shared.marks[tile.size][spots] = ~word(0)
        place, phase = run.barriers_of_memory.complete(index, barrier, mask, tile.outside.shape[1] * tile.size)
        entry = Arriving(index, tile, tile.programs, place, phase, data[tile.programs], marks[tile.programs])
        self.arriving.append(entry)
        self.write(entry)

    def spots(self, index, tile: Tile) -> np.ndarray:
        """Positions of a tile in shared memory, for the issuing programs."""
        shared = self.run.shared
        places = shared.positions(index, tile.inside, tile.issuers, tile.size) + shared.rows[tile.size]
        return places[tile.programs]

    def write(self, entry: Arriving) -> None:
        if self.run.checks:
            some = np.zeros((self.run.programs, 1), dtype=bool)
            some[entry.programs] = True
            arrival = entry.tile.warp, int(entry.place[0]), int(entry.phase[0])
            self.run.races.copying(entry.issued, entry.tile.inside, some, entry.tile.size, *arrival)

    def waited(self, programs, place, phase) -> None:
        """Complete the loads that arrived at mbarriers which programs have waited for, up to these phases."""
        run, left = self.run, []
        at, now = np.full(run.programs, -1), np.zeros(run.programs, dtype=np.int64)
        at[programs], now[programs] = place, phase
        for entry in self.arriving:
            there = (at[entry.programs] == entry.place) & (now[entry.programs] > entry.phase)
            if there.any():
                rows = np.searchsorted(entry.tile.programs, entry.programs[there])
                spots, size = self.spots(entry.issued, entry.tile)[rows], entry.tile.size
                run.shared.flat[size][spots] = entry.data[there]
                if run.checks:
                    run.shared.marks[size][spots] = entry.marks[there]
                    if run.shared.proxies is not None:
                        run.shared.proxies.stamps[size][spots] = 0
            if not there.all():
                parts = (part[~there] for part in entry[2:])
                left.append(Arriving(entry.issued, entry.tile, *parts))
        if run.checks and len(self.arriving) and run.races.forget(WRITING):
            for entry in left:
                self.write(entry)
        self.arriving = left

    def store(self, index, guard, address, coordinates, source, operation: str) -> None:
        """Store tiles from shared into global memory without out-of-bounds elements, as plain stores or atomic
        reductions."""
        for mask in self.issuers(index, guard):
            if (tile := self.tile(index, mask, address, coordinates, source)) is not None:
                self.store_tile(index, tile, operation)

    def store_tile(self, index, tile: Tile, operation: str) -> None:
        run = self.run
        if operation and (not tile.kind or (tile.kind == "bf16" and operation != "add")):
            location = run.launch.code.instructions[index].location
            raise Unsupported(f"{operation} of a tensor of {tile.kind or 'bytes'}", location)
        data, marks = read_operand(run, index, tile.inside, tile.issuers, tile.size)
        if marks is not None and (marks[tile.taken] != 0).any():
            run.fault("unwritten", index, "what nobody wrote is stored in global memory")
        active, run.active = run.active, None
        for part, addresses, lanes in self.slices(tile):
            short = run.width - data[:, part].shape[1]
            if lanes.any():
                values = np.pad(data[:, part], ((0, 0), (0, short)))
                if operation:
                    form = operation, tile.kind
                    run.memory.exchange(index, addresses, lanes, form, (False, False), values, None, wanted=False)
                else:
                    run.memory.store(index, addresses, lanes, tile.size, (values,))
        run.active = active
        self.reading.append((run.leader, self.committed[run.leader].copy(), index, tile))
        self.read(self.reading[-1])

    def read(self, entry) -> None:
        _, group, index, tile = entry
        if self.run.checks:
            going = tile.issuers & (group >= 0)
            issued = int(group[0, 0]), tile.warp
            self.run.races.storing(index, tile.inside, going, tile.size, *issued)

    def commit(self, guard) -> None:
        self.committed[self.run.leader] += self.taking_part(guard)

    def taking_part(self, guard) -> np.ndarray:
        """(programs or 1, 1): programs with a running thread that passes the guard."""
        mask = self.run.where(guard)
        return np.ones((1, 1), dtype=bool) if mask is None else mask.any(1, keepdims=True)

    def wait(self, guard, allowed: int) -> None:
        """Wait until all but the `allowed` youngest groups have finished reading."""
        run, here, left = self.run, self.taking_part(guard), []
        done = self.committed[run.leader] - allowed
        for team, group, index, tile in self.reading:
            if team == run.leader:
                group = np.where(here & (group < done), -1, group)
            if (tile.issuers & (group >= 0)).any():
                left.append((team, group, index, tile))
        if run.orders is not None:
            run.orders.stored(run.where(guard), int(done[0, 0]))
        if run.checks and self.reading and run.races.forget(READING):
            for entry in left:
                self.read(entry)
        self.reading = left

    def remember(self) -> None:
        """After a barrier: pending copies continue in the new barrier interval."""
        for entry in self.arriving:
            self.write(entry)
        for reading in self.reading:
            self.read(reading)
