"""Order in shared memory between teams of warps, by vector clocks.

Agents touch shared memory: warps, the products of each warp, the stores of tiles that it issues, and copies, which
count as their mbarrier's. A warp's clock says of every agent up to which point it knows what that has done. Threads
that meet at a barrier share what they know; an arrival at an mbarrier hands it to those who wait for the phase; a wait
for products or stores tells the warp that they are done. An access is a race where its warp does not know of an
earlier one that conflicts with it. Threads of a warp are ordered by barriers and bar.warp.sync.
Source: Flanagan and Freund 2009, "FastTrack", section 3.
"""

import numpy as np

from ptx_check.memory import spread

_THREAD, _EPOCH = 0x3FF, 10
_UNFENCED = "a product or copy takes what threads wrote into shared memory with no fence.proxy.async between"


class Orders:
    """The accesses to one program's shared memory, and what each warp knows of them."""

    met = False

    def __init__(self, run, size: int, grain: int, mbarriers: int) -> None:
        self.run, self.grain, self.cells = run, grain, -(-size // 16) * 16 // grain
        warps = self.warps = run.width // 32
        self.clocks = np.zeros((warps, 3 * warps + mbarriers), np.int64)
        """What each warp knows of warps, their products, their stores, and mbarriers."""
        self.clocks[np.arange(warps), np.arange(warps)] = 1
        self.told = np.zeros((mbarriers, self.clocks.shape[1]), np.int64)
        """What arrivals have told each mbarrier, and what that was when its last phase ended."""
        self.ended = np.zeros_like(self.told)
        self.writer, self.epoch, self.code, self.fence_of, self.by = (np.zeros(self.cells, np.int64) for _ in range(5))
        """The agent that wrote last, when on its clock (0: never), its thread, fences it had passed, instruction."""
        self.reads: dict[int, np.ndarray] = {}
        """Of an agent (2, cells): when it read last, and by which instruction."""
        self.reader = np.zeros(self.cells, np.int64)
        """The thread that read last, and warp barriers passed; 0: none."""
        self.fences = np.ones(warps, np.int64)

    # ------------------------------------------------------------------------------------------------------ accesses

    def read(self, index, address, mask, width, code=None) -> None:
        slots, span, codes = self.chosen(address, mask, width, code)
        warps = (codes & _THREAD) >> 5
        self.after_writes(index, slots, span, warps, codes, "written and read")
        for warp in np.unique(warps):
            self.note(int(warp), slots[warps == warp], span, self.clocks[warp, warp], index)
        self.reader.reshape(-1, span)[slots] = codes[:, None] + 1

    exchange = read

    def write(self, index, address, mask, width, code=None) -> None:
        slots, span, codes = self.chosen(address, mask, width, code)
        warps = (codes & _THREAD) >> 5
        self.after_writes(index, slots, span, warps, codes, "written twice")
        self.after_reads(index, slots, span, warps, codes)
        self.put(slots, span, warps, self.clocks[warps, warps], codes, self.fences[warps], index)

    def product(self, index, address, mask, width, group) -> None:
        """The warps that run multiply what lies at addresses, until their products up to this group are waited for."""
        slots, span = self.slots(address, width)
        for warp in self.here():
            self.after_writes(index, slots, span, np.full(len(slots), warp), None, "written and read")
            self.note(self.warps + warp, slots, span, group + 1, index)
        self.after_fence(index, slots, span)

    def storing(self, index, address, mask, width, group, warp) -> None:
        """A warp stores a tile from shared memory, which is read until this group is waited for."""
        slots, span = self.slots(address, width)
        self.after_writes(index, slots, span, np.full(len(slots), warp), None, "written and read")
        self.after_fence(index, slots, span)
        self.note(2 * self.warps + warp, slots, span, group + 1, index)

    def copying(self, index, address, mask, width, warp, place, phase) -> None:
        """A warp issues a copy into shared memory, which arrives when an mbarrier's phase ends."""
        slots, span = self.slots(address, width)
        warps = np.full(len(slots), warp)
        self.after_writes(index, slots, span, warps, None, "written twice")
        self.after_reads(index, slots, span, warps, None)
        self.put(slots, span, 3 * self.warps + place, phase + 1, 0, 0, index)

    def slots(self, address, width) -> tuple[np.ndarray, int]:
        """Places of words of so many bytes, and the cells of each."""
        span = max(1, width // self.grain)
        places = (address // np.uint32(max(width, self.grain))).astype(np.int64).ravel()
        return np.minimum(places, self.cells // span - 1), span

    def chosen(self, address, mask, width, code):
        code = self.run.code if code is None else code
        shape = np.broadcast_shapes(address.shape, code.shape, (1, 1) if mask is None else mask.shape)
        address, code = spread(address, shape), spread(code, shape)
        if mask is not None:
            taken = spread(mask, shape)
            address, code = address[taken], code[taken]
        return *self.slots(address, width), code.ravel()

    def note(self, agent: int, slots, span: int, when, index) -> None:
        if agent not in self.reads:
            self.reads[agent] = np.zeros((2, self.cells), np.int64)
        for row, value in zip(self.reads[agent], (when, index)):
            row.reshape(-1, span)[slots] = value

    def put(self, slots, span, *values) -> None:
        agents, epochs, codes, fences, index = (np.asarray(each) for each in values)
        tables = (self.writer, self.epoch, self.code, self.fence_of, self.by)
        for table, value in zip(tables, (agents, epochs, codes, fences, index)):
            table.reshape(-1, span)[slots] = value[..., None] if value.ndim else value
        for table in self.reads.values():
            table[0].reshape(-1, span)[slots] = 0
        self.reader.reshape(-1, span)[slots] = 0

    def after_writes(self, index, slots, span, warps, codes, what) -> None:
        """The last writes must be known to these warps; codes: of threads, None for no thread's own access."""
        writer, epoch, code = (t.reshape(-1, span)[slots] for t in (self.writer, self.epoch, self.code))
        wrong = self.clocks[warps[:, None], writer] < epoch
        if codes is not None:
            wrong |= (epoch != 0) & (writer == warps[:, None]) & _unmet(code, codes[:, None])
        if wrong.any():
            self.report(index, slots, span, wrong, self.by.reshape(-1, span)[slots], what)

    def after_reads(self, index, slots, span, warps, codes) -> None:
        for agent, table in self.reads.items():
            when = table[0].reshape(-1, span)[slots]
            wrong = self.clocks[warps, agent][:, None] < when
            if codes is not None and agent < self.warps:
                reader = self.reader.reshape(-1, span)[slots] - 1
                same = (when != 0) & (reader >= 0) & ((reader & _THREAD) >> 5 == agent) & (warps[:, None] == agent)
                wrong |= same & _unmet(reader, codes[:, None])
            if wrong.any():
                self.report(index, slots, span, wrong, table[1].reshape(-1, span)[slots], "read and written")

    def after_fence(self, index, slots, span) -> None:
        """Reports what threads wrote and have not fenced since: products and copies may read what was there before."""
        writer, epoch, fence = (t.reshape(-1, span)[slots] for t in (self.writer, self.epoch, self.fence_of))
        threads = (epoch != 0) & (writer < self.warps)
        wrong = threads & (self.fences[np.where(threads, writer, 0)] == fence)
        if wrong.any():
            self.run.fault("fence", index, _UNFENCED, int(self.by.reshape(-1, span)[slots][wrong][0]))

    def initialised(self, index, word: int) -> None:
        """A copy arrives at the mbarrier in this word of 8 bytes."""
        self.after_fence(index, np.array([word]), 8 // self.grain)

    def report(self, index, slots, span, wrong, others, what) -> None:
        byte = int((slots[:, None] * span + np.arange(span))[wrong][0]) * self.grain
        message = f"shared memory at byte {byte} is {what} with nothing between that orders them"
        self.run.fault("race", index, message, int(others[wrong][0]))

    # --------------------------------------------------------------------------------------------- what orders them

    def here(self) -> np.ndarray:
        return _warps_of(self.run.everyone())

    def fence(self) -> None:
        self.fences[self.here()] += 1

    def finished(self, group: int) -> None:
        """The warps that run have waited for their products before a group."""
        warps = self.here()
        self.clocks[warps, self.warps + warps] = group

    def stored(self, mask, group: int) -> None:
        """These threads have waited for the stores that their warps issued before a group."""
        warps = np.flatnonzero(
            self.run.spread(np.ones((1, 1), dtype=bool) if mask is None else mask)[0].reshape(-1, 32).any(1)
        )
        self.clocks[warps, 2 * self.warps + warps] = group

    def meet(self, threads: np.ndarray) -> None:
        """These threads are at a barrier together."""
        warps = _warps_of(threads)
        self.clocks[warps] = self.clocks[warps].max(0)
        self.clocks[warps, warps] += 1

    def arrive(self, place: int, threads: np.ndarray) -> None:
        warps = _warps_of(threads)
        self.told[place] = np.maximum(self.told[place], self.clocks[warps].max(0))
        self.clocks[warps, warps] += 1

    def turn(self, place: int, phase: int) -> None:
        """So many phases of an mbarrier have ended."""
        self.told[place, 3 * self.warps + place] = phase
        self.ended[place] = self.told[place]

    def acquire(self, place: int) -> None:
        """The warps that run have waited for the last phase of an mbarrier."""
        warps = self.here()
        self.clocks[warps] = np.maximum(self.clocks[warps], self.ended[place])

    def forget(self, code) -> bool:
        return False

    def barrier(self, arrived) -> None:
        """Every access was compared when it was made."""


def _warps_of(threads: np.ndarray) -> np.ndarray:
    return np.flatnonzero(threads[0].reshape(-1, 32).any(1))


def _unmet(one, other):
    """Tell which threads (and warp barriers passed << 10) of one warp differ, with no meeting between."""
    return ((one ^ other) & _THREAD != 0) & ((one ^ other) >> _EPOCH == 0)
